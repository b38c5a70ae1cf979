"""A tokenizer from GGUF metadata, as an object of the `tokenizers` library.

A GGUF file stores the tokens, their kinds, and either merges ("gpt2": byte-level BPE) or scores ("llama": SentencePiece
BPE with byte fallback). How text is cut before BPE is stored only by a name, `tokenizer.ggml.pre`; the patterns below
are those of the model's own tokenizer.json. A name that is not listed is refused: with a wrong pattern a model gets
other tokens than it was trained on, and its answers become quietly worse.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

log = logging.getLogger(__name__)

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
_SPACE = "\u2581"  # how SentencePiece writes a space

_LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
           r"|\s*[\r\n]+|\s+(?!\S)|\s+")
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
           r"|\s*[\r\n]+|\s+(?!\S)|\s+")
_SEED = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+"
         r"|\s*[\r\n]+|\s+(?!\S)|\s+")
_TEKKEN = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
           r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
           r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
_ENDING, _LARGE, _SMALL = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]",
                           r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]")  # of a word
_GPT4O = (rf"[^\r\n\p{{L}}\p{{N}}]?{_LARGE}*{_SMALL}+{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?{_LARGE}+{_SMALL}*{_ENDING}"
          r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+")


@dataclass(frozen=True)
class _Pre:
    """How a byte-level tokenizer cuts text: by one pattern after the other, or by GPT-2's own where there are none."""

    patterns: tuple[str, ...] = ()
    digits: bool = False  # every digit alone: before GPT-2's pattern, behind those of one's own
    nfc: bool = False
    ignore_merges: bool = False  # a piece that is a token is that token, whatever the merges say
    add_bos: bool = False  # where the file does not say


_GPT2, _DIGITS = _Pre(), _Pre(digits=True)
_LLAMA_BPE, _CL100K, _O200K = _Pre((_LLAMA3,), ignore_merges=True, add_bos=True), _Pre((_LLAMA3,)), _Pre((_GPT4O,))
PRE_TOKENIZERS: dict[str, _Pre] = {
    "default": _GPT2, "gpt-2": _GPT2, "gpt2": _GPT2, "phi-2": _GPT2, "olmo": _GPT2, "mpt": _GPT2,
    "granite-docling": _GPT2, "trillion": _GPT2,
    "smollm": _DIGITS, "starcoder": _DIGITS, "codeshell": _DIGITS, "refact": _DIGITS, "command-r": _DIGITS,
    "exaone": _DIGITS, "minerva-7b": _DIGITS,
    "llama-bpe": _LLAMA_BPE, "llama3": _LLAMA_BPE, "llama-v3": _LLAMA_BPE, "falcon3": _LLAMA_BPE, "pixtral": _LLAMA_BPE,
    "dbrx": _CL100K, "smaug-bpe": _CL100K, "glm4": _CL100K, "chatglm-bpe": _CL100K, "gpt-4o": _O200K, "llama4": _O200K,
    "qwen2": _Pre((_QWEN2,), nfc=True), "qwen35": _Pre((_QWEN35,), nfc=True), "megrez": _Pre((_QWEN2,)),
    "deepseek-r1-qwen": _Pre((_QWEN2,)), "deepseek-coder": _Pre(_DEEPSEEK_CODER, digits=True),
    "seed-coder": _Pre((_SEED,)), "tekken": _Pre((_TEKKEN,), ignore_merges=True, add_bos=True),
}
# Control tokens that end a turn, for files that name only the end of a document as eos.
_TURN_ENDS = ("<|eot_id|>", "<|eot|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
# Those of gpt-oss, where <|end|> ends a message and a turn goes on with the next one.
_TURN_ENDS_OF_MESSAGES = ("<|return|>", "<|call|>")
_TURN_ENDS_OF_ROLES = ("<|user|>", "<|observation|>")  # GLM-4: who speaks next


class VocabularyError(ValueError):
    """A vocabulary that cannot be turned into the tokenizer that it stands for."""


def special_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """bos_token_id and pad_token_id (int or None) and eos_token_id (list) of a GGUF file.

    The list holds the ids the file names as end of document, turn or message; if it names no end of turn, also the
    control tokens that are one by their text."""
    get = metadata.get
    eos = [get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, kinds = get("tokenizer.ggml.tokens", []), get("tokenizer.ggml.token_type", [])
    control = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=False)) if kind == _CONTROL}
    ends: tuple[str, ...] = () if eos[1] is not None else _TURN_ENDS
    if "<|return|>" in control:
        ends = _TURN_ENDS_OF_MESSAGES
        eos = [i for i in eos if i != control.get("<|end|>")]
    elif eos[1] is not None and eos[1] == control.get("<|user|>"):
        ends = _TURN_ENDS_OF_ROLES
    eos += [control[token] for token in ends if token in control]
    return {"bos_token_id": get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": list(dict.fromkeys(i for i in eos if i is not None)),
            "pad_token_id": get("tokenizer.ggml.padding_token_id")}


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that GGUF metadata describes. Raises VocabularyError."""
    kind, tokens = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise VocabularyError("the GGUF file holds no vocabulary (tokenizer.ggml.tokens)")
    if kind == "gpt2":
        tokenizer, add_bos = _byte_level(metadata, tokens)
    elif kind == "llama":
        tokenizer, add_bos = _sentencepiece(metadata, tokens), True
    else:
        raise VocabularyError(f"GGUF tokenizer model {kind!r} is not supported; supported: gpt2 (byte-level BPE), llama"
                              " (SentencePiece BPE)")
    _add_special(tokenizer, tokens, metadata.get("tokenizer.ggml.token_type", []))
    _add_frame(tokenizer, metadata, add_bos)
    return tokenizer


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> tuple[Tokenizer, bool]:
    name = metadata.get("tokenizer.ggml.pre")
    if name in (None, "default"):
        log.warning("the GGUF file does not say how its tokenizer cuts text (tokenizer.ggml.pre); taking GPT-2's way")
    pre = PRE_TOKENIZERS.get(name or "default")
    if pre is None:
        raise VocabularyError(f"GGUF pre-tokenizer {name!r} is not known; known: {', '.join(PRE_TOKENIZERS)}. Use the"
                              " model's own tokenizer.json (a folder in Hugging Face layout) as tokenizer")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    vocab = {token: i for i, token in enumerate(tokens)}
    missing = [m for m in merges if len(m) != 2 or m[0] + m[1] not in vocab]
    if missing:
        raise VocabularyError(f"{len(missing)} merges make no token of the vocabulary, the first is {missing[0]}")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges))
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.patterns]
    if pre.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pre.patterns))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.add_bos


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    """SentencePiece's BPE joins the pair whose result has the best score; as merges: all pairs, best result first."""
    scores, kinds = metadata.get("tokenizer.ggml.scores"), metadata.get("tokenizer.ggml.token_type")
    if not scores or not kinds or not len(scores) == len(kinds) == len(tokens):
        raise VocabularyError("a GGUF tokenizer of model llama needs a score and a type for every token")
    vocab = {token: i for i, token in enumerate(tokens)}
    plain = {t for t, kind in zip(tokens, kinds, strict=True) if kind not in (_UNKNOWN, _CONTROL, _BYTE)}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    byte_fallback = _BYTE in kinds
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=_merges(vocab, plain, scores), fuse_unk=True,
                                     byte_fallback=byte_fallback, unk_token=tokens[unknown]))
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    steps = [normalizers.Prepend(_SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    decoding: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*decoding, decoders.Strip(" ", 1, 0)] if prefix else decoding)
    return tokenizer


def _merges(vocab: Mapping[str, int], plain: set[str], scores: list[float]) -> list[tuple[str, str]]:
    ranked = []
    for token in plain:
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in plain and right in plain:
                ranked.append((-scores[vocab[token]], vocab[token], vocab[left], vocab[right], left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]


def _add_special(tokenizer: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    """Control tokens are found in text before anything else and can be left out of decoded text; user-defined ones
    are found likewise, and are text. SentencePiece's own ones with a space are not: they are merged like any other,
    since in the text that is searched a space is not yet written as they write it."""
    for kind, special in (((_CONTROL, _UNKNOWN), True), ((_USER_DEFINED,), False)):
        added = [AddedToken(token, special=special, normalized=False)
                 for token, k in zip(tokens, kinds, strict=False) if k in kind and (special or _SPACE not in token)]
        tokenizer.add_special_tokens(added) if special else tokenizer.add_tokens(added)


def _add_frame(tokenizer: Tokenizer, metadata: Mapping[str, Any], add_bos: bool) -> None:
    """The tokens that `add_special_tokens` puts around a text."""
    wanted = {"bos": metadata.get("tokenizer.ggml.add_bos_token", add_bos),
              "eos": metadata.get("tokenizer.ggml.add_eos_token", False)}
    ids = {end: metadata.get(f"tokenizer.ggml.{end}_token_id") for end in wanted if wanted[end]}
    frame = {end: (tokenizer.id_to_token(i), i) for end, i in ids.items() if i is not None}
    if not frame:
        return
    before = [frame["bos"][0]] if "bos" in frame else []
    after = [frame["eos"][0]] if "eos" in frame else []
    tokenizer.post_processor = processors.TemplateProcessing(single=[*before, "$A", *after],
                                                             special_tokens=list(set(frame.values())))
