"""Where the model of a configuration is: the first part of a start, which a process can do that never loads torch.

    Config --locate--> Located (paths on this disk)  --start_core--> EngineCore         the second part: engine/build.py

Finding a model may mean fetching it, which takes as long as it takes.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stretto.compat import ConfigError, Refusal
from stretto.config import Config
from stretto.model.hub import resolve_model
from stretto.spec.identify import verifier_of
from stretto.text.chat_template import ChatTemplate, ChatTemplateError
from stretto.text.tokenizer import Tokenizer, TokenizerError, load_tokenizer


@dataclass(frozen=True)
class Located:
    """A configuration whose model is on this disk. `config` names the target where the user named its drafter."""

    config: Config
    path: Path
    tokenizer_path: Path

    def tokenizer(self) -> Tokenizer:
        return configured_tokenizer(self.config, self.tokenizer_path)


def configured_tokenizer(config: Config, path: Path) -> Tokenizer:
    """With the chat template that the configuration names. Raises TokenizerError."""
    return load_tokenizer(path, named_template(config.model.chat_template))


def named_template(file: Path | None) -> str | None:
    """A template of the user's own. Raises TokenizerError, which names the file, for one that is no template."""
    if file is None:
        return None
    try:
        text = file.read_text(encoding="utf-8")
        ChatTemplate({"default": text}, {})
    except (OSError, UnicodeDecodeError) as e:
        raise TokenizerError(f"{file} cannot be read: {e}") from e
    except ChatTemplateError as e:
        raise TokenizerError(f"--chat-template {file}: {e}") from e
    return text


def locate(config: Config) -> Located:
    """Finds the model and the tokenizer, fetching them if need be. Raises ModelNotFound, TokenizerError for a chat
    template of the user's own, and compat.ConfigError."""
    named_template(config.model.chat_template)
    config = _with_verifier(config)
    path = resolve_model(config.model.model)
    return Located(config, path, resolve_model(config.model.tokenizer) if config.model.tokenizer else path)


def _with_verifier(config: Config) -> Config:
    """A model in the layout of vLLM's speculators is a drafter that names its target: both are served."""
    name = config.model.model
    verifier = verifier_of(name) if name is not None else None
    if name is None or verifier is None:
        return config
    if config.speculation.speculation not in ("off", name):
        raise ConfigError([Refusal(f"--speculation {config.speculation.speculation}", f"model {name}",
                                   "it is a drafter itself", f"serve {verifier} with the drafter that you want")])
    return replace(config, model=replace(config.model, model=verifier),
                   speculation=replace(config.speculation, speculation=name))


@dataclass(frozen=True)
class Deferred:
    """A call that is looked up where it is made: whoever pickles it need not import what it names, nor wait for it."""

    function: str  # "package.module:name"
    argument: Any

    def __call__(self) -> Any:
        function: Callable[[Any], Any] = pkgutil.resolve_name(self.function)
        return function(self.argument)
