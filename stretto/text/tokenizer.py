"""Token ids from text and back, and chat templates, without importing transformers.

A Tokenizer comes from a folder in Hugging Face layout (tokenizer.json) or from a GGUF file's metadata. No torch in this
module.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, overload

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from stretto.text.chat_template import ChatTemplate, ChatTemplateError
from stretto.text.detokenize import Decoder, TokenBytes, decoder_factory, decoder_kinds
from stretto.text.gguf_file import GGUFError, GGUFFile
from stretto.text.gguf_vocab import VocabularyError, build_tokenizer, special_ids
from stretto.text.reply_template import TemplateReply
from stretto.text.segments import Segments, without_added_space

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerError(ValueError):
    """A tokenizer that cannot be loaded. The message names the file and the way out."""


@dataclass(frozen=True)
class TokenizerParts:
    """What a Tokenizer is made of, wherever it came from."""

    backend: Backend
    templates: Mapping[str, str] = field(default_factory=dict)
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # bos_token, eos_token, ...
    eos_token_ids: tuple[int, ...] = ()
    response_template: Mapping[str, Any] | None = None  # how the model's answers are taken apart, in its own words


class Tokenizer:
    """Tokenizer and chat template of one model. Used from several threads at once."""

    def __init__(self, parts: TokenizerParts):
        self.backend = parts.backend
        self.segments = Segments(parts.backend)
        self._inside = without_added_space(parts.backend)
        self._openers = frozenset(parts.backend.get_added_tokens_decoder())
        self.special_ids = frozenset(i for i, t in self.backend.get_added_tokens_decoder().items() if t.special)
        self.vocab_size = self.backend.get_vocab_size()  # ids with a token; a model's logits may be wider
        self._special_tokens = dict(parts.special_tokens)
        self.bos_token_id = self._id("bos_token")
        self.eos_token_id = self._id("eos_token")  # the tokenizer's own; generation ends at any of eos_token_ids
        self.pad_token_id = self._id("pad_token")
        own = () if self.eos_token_id is None else (self.eos_token_id,)
        self.eos_token_ids = parts.eos_token_ids or own
        self.response_template = parts.response_template
        self._templates = ChatTemplate(parts.templates, self._special_tokens)
        self._decoder = decoder_factory(self.backend, self.special_ids)
        self._bytes = TokenBytes(self.backend, decoder_kinds(self.backend))

    def _id(self, name: str) -> int | None:
        token = self._special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)

    @property
    def chat_template(self) -> str | None:
        """Source of the default template."""
        return self._templates.sources.get("default")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. `add_special_tokens`: what the tokenizer puts around a text, usually BOS in front."""
        return self.segments.encode(text, add_special_tokens)

    def encode_inside(self, text: str) -> list[int]:
        """Token ids of a text that follows another one: nothing is put around it, and no space in front."""
        return self._inside.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids; ids without a token are left out."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def decoder(self, skip_special_tokens: bool = True) -> Decoder:
        """Decodes one answer id by id; what it gives, joined, is what `decode` gives for all of its ids."""
        return self._decoder(skip_special_tokens)

    def begins_text(self, prompt: Sequence[int]) -> bool:
        """What stands behind these ids begins a text of its own: there are none, or an added token is the last, behind
        which tokenizers put their space in front as well."""
        return not prompt or prompt[-1] in self._openers

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token stands for within a text; b"" for an id without a token. A token of a byte-level
        vocabulary may be part of a character."""
        return self._bytes[token_id]

    def render_chat_template(self, messages: Sequence[Mapping[str, Any]],
                             tools: Sequence[Mapping[str, Any]] | None = None, add_generation_prompt: bool = True,
                             **kwargs: Any) -> str:
        """The prompt's text; keywords are variables of the template, save `continue_final_message` (see ChatTemplate).
        Raises ChatTemplateError, a ValueError, with the template's own words."""
        return self._templates.render(messages, tools=tools, add_generation_prompt=add_generation_prompt, **kwargs)

    @overload
    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]],
                            tools: Sequence[Mapping[str, Any]] | None = None, add_generation_prompt: bool = True, *,
                            tokenize: Literal[True] = True, **kwargs: Any) -> list[int]: ...

    @overload
    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]],
                            tools: Sequence[Mapping[str, Any]] | None = None, add_generation_prompt: bool = True, *,
                            tokenize: Literal[False], **kwargs: Any) -> str: ...

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]],
                            tools: Sequence[Mapping[str, Any]] | None = None, add_generation_prompt: bool = True, *,
                            tokenize: bool = True, **kwargs: Any) -> list[int] | str:
        """Token ids of the rendered messages; `tokenize=False`: their text. The template alone says whether there is a
        BOS: the tokenizer adds nothing, so there are never two."""
        text = self.render_chat_template(messages, tools, add_generation_prompt, **kwargs)
        return self.encode(text, add_special_tokens=False) if tokenize else text


def load_tokenizer(path: str | Path, chat_template: str | None = None) -> Tokenizer:
    """From a folder in Hugging Face layout or a .gguf file. `chat_template` replaces the model's own default template.
    Raises TokenizerError."""
    path = Path(path)
    try:
        parts = _from_gguf(path) if path.suffix == ".gguf" else _from_folder(path)
        if chat_template is not None:
            templates = {**parts.templates, "default": chat_template}
            parts = replace(parts, templates=templates, response_template=None)  # it was the other template's
        return Tokenizer(parts)
    except (VocabularyError, ChatTemplateError) as e:
        raise TokenizerError(f"{path}: {e}") from e
    except (GGUFError, OSError) as e:
        raise TokenizerError(str(e)) from e


def _from_gguf(path: Path) -> TokenizerParts:
    metadata = GGUFFile(path).metadata
    backend, ids = build_tokenizer(metadata), special_ids(metadata)
    named = {"bos_token": ids["bos_token_id"], "pad_token": ids["pad_token_id"],
             "eos_token": metadata.get("tokenizer.ggml.eos_token_id"),
             "unk_token": metadata.get("tokenizer.ggml.unknown_token_id")}
    texts = {name: backend.id_to_token(i) for name, i in named.items() if i is not None}
    special = {name: text for name, text in texts.items() if text is not None}
    prefix = "tokenizer.chat_template"
    templates = {key.removeprefix(prefix).lstrip(".") or "default": value for key, value in metadata.items()
                 if key == prefix or key.startswith(prefix + ".")}
    return TokenizerParts(backend, templates, special, tuple(ids["eos_token_id"]))


def _from_folder(folder: Path) -> TokenizerParts:
    """tokenizer.json decides what is put around a text. As in transformers 5, add_bos_token and add_eos_token of
    tokenizer_config.json have no say where there is a tokenizer.json."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        others = [n for n in ("tokenizer.model", "tekken.json", "vocab.json") if (folder / n).is_file()]
        raise TokenizerError(f"{folder} has no tokenizer.json" + (
            f", only {', '.join(others)}; convert it once with transformers: AutoTokenizer.from_pretrained(folder)"
            ".save_pretrained(folder)" if others else "; it is part of a model's folder in Hugging Face layout"))
    try:
        backend = Backend.from_file(str(file))
    except Exception as e:  # the library raises bare Exception
        raise TokenizerError(f"{file} cannot be read: {e}") from e
    backend.no_truncation()  # a saved training set-up must not cut prompts
    backend.no_padding()
    config = _json(folder / "tokenizer_config.json")
    declared = {**_json(folder / "special_tokens_map.json"), **config}
    special = {name: text for name in _NAMED if (text := _text(declared.get(name))) is not None}
    _add_tokens(backend, config, special)
    return TokenizerParts(backend, _templates(folder, config), special, _eos_ids(folder),
                          _response_template(folder, config))


def _add_tokens(backend: Backend, config: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """Tokens that only tokenizer_config.json declares, and special ones that tokenizer.json holds as ordinary ones."""
    added = {t.content: t.special for t in backend.get_added_tokens_decoder().values()}
    declared = config.get("added_tokens_decoder") or {}
    for _, entry in sorted(declared.items(), key=lambda item: int(item[0])):
        if added.get(entry["content"]) != bool(entry.get("special")):
            token = AddedToken(**{k: v for k, v in entry.items() if k != "__type"})
            backend.add_special_tokens([token]) if token.special else backend.add_tokens([token])
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or ()
    extra = list(extra.values()) if isinstance(extra, Mapping) else list(extra)
    marked = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}
    for text in dict.fromkeys([*special.values(), *(t for t in map(_text, extra) if t is not None)]):
        if text not in marked:
            backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """A chat_template.jinja file wins over what tokenizer_config.json embeds."""
    embedded = config.get("chat_template")
    if isinstance(embedded, list):
        found = {entry["name"]: entry["template"] for entry in embedded}
    else:
        found = {"default": embedded} if embedded else {}
    if not found and (old := _json(folder / "chat_template.json").get("chat_template")):
        found = {"default": old}
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[file.stem] = file.read_text(encoding="utf-8")
    if (file := folder / "chat_template.jinja").is_file():
        found["default"] = file.read_text(encoding="utf-8")
    return found


def _response_template(folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    declared = config.get("response_template")
    if declared is None:
        return None
    try:
        TemplateReply(declared, "")
    except (ValueError, TypeError, AttributeError) as e:
        raise TokenizerError(f"{folder / 'tokenizer_config.json'} has a response_template that cannot be used: {e};"
                             " repair it, or take it out") from e
    return declared


def _eos_ids(folder: Path) -> tuple[int, ...]:
    """generation_config.json decides, where it says so, else config.json; () if neither does."""
    for name in ("generation_config.json", "config.json"):
        value = _json(folder / name).get("eos_token_id")
        if value is not None:
            return tuple(value) if isinstance(value, list) else (value,)
    return ()


def _json(file: Path) -> dict[str, Any]:
    """The file's object; {} if there is no such file."""
    if not file.is_file():
        return {}
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as e:
        raise TokenizerError(f"{file} is not valid JSON: {e}") from e


def _text(token: Any) -> str | None:
    """A token as configuration files write it: text, or an object that holds it."""
    return token.get("content") if isinstance(token, Mapping) else token
