"""Stretto: a language-model serving engine in which every feature works with every other.

    from stretto import LLM, SamplingParams

The names below are loaded when they are first used, so that `import stretto` does not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stretto.compat import ConfigError
    from stretto.engine.async_llm import AsyncLLM
    from stretto.engine.llm import LLM, Completion
    from stretto.params import Grammar, ParameterError, SamplingParams
    from stretto.protocol import Output, Request, RequestError, SessionTurn

__version__ = "0.1.0"

_WHERE = {"AsyncLLM": "stretto.engine.async_llm", "LLM": "stretto.engine.llm", "Completion": "stretto.engine.llm",
          "ConfigError": "stretto.compat", "Grammar": "stretto.params", "ParameterError": "stretto.params",
          "SamplingParams": "stretto.params", "Output": "stretto.protocol", "Request": "stretto.protocol",
          "RequestError": "stretto.protocol", "SessionTurn": "stretto.protocol"}

__all__ = ["LLM", "AsyncLLM", "Completion", "ConfigError", "Grammar", "Output", "ParameterError", "Request",
           "RequestError", "SamplingParams", "SessionTurn", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'stretto' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)
