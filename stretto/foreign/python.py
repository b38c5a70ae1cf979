"""Names of vLLM's and SGLang's Python interfaces that are not here, and what is there instead. No torch here."""

from __future__ import annotations

from collections.abc import Mapping

_KEEPS = "an engine keeps its memory until close()"
_WEIGHTS = "an engine has the weights that it was made with; make another one"

OF_LLM: Mapping[str, str] = {
    "beam_search": "there is no beam search, only sampling: SamplingParams(n=...) gives several answers, and best_of of"
                   " /v1/completions the likeliest of them",
    "encode": "embed gives the vectors of texts; token ids are tokenizer.encode's",
    "classify": "no model here has classes; embed gives vectors",
    "reward": "no model here gives rewards; embed gives vectors",
    "shutdown": "close ends the engine, as the end of `with` does",
    "async_generate": "AsyncLLM has generate for asyncio",
    "llm_engine": "the engine is core, what it is stands in info, its configuration in prepared.resolved",
    "model_config": "what runs stands in info and prepared.resolved",
    "set_tokenizer": "it is the option tokenizer=...",
    "sleep": _KEEPS, "wake_up": _KEEPS, "release_memory_occupation": _KEEPS, "resume_memory_occupation": _KEEPS,
    "collective_rpc": _WEIGHTS, "apply_model": _WEIGHTS, "update_weights_from_disk": _WEIGHTS,
    "update_weights_from_tensor": _WEIGHTS, "update_weights_from_distributed": _WEIGHTS,
    "get_metrics": "core.stats() has the numbers that /metrics has of a server",
    "get_server_info": "what runs stands in info and prepared.resolved",
    "reset_prefix_cache": "cached prefixes give way by themselves; prefix_caching=False shares nothing",
    "flush_cache": "cached prefixes give way by themselves; prefix_caching=False shares nothing",
    "load_lora_adapter": "manage(LoadAdapter(...)) loads one (stretto.protocol)",
    "unload_lora_adapter": "manage(UnloadAdapter(...)) unloads one (stretto.protocol)",
}

OF_COMPLETION: Mapping[str, str] = {
    "outputs": "a completion is one answer: its text is in text, its ids in token_ids; the n answers to a prompt follow"
               " each other in the list, each with its index",
    "prompt_token_ids": "they are prompt_tokens",
    "cumulative_logprob": "each token's is in logprobs; add them up",
    "finished": "what generate returns is complete; finish_reason says why it ended",
    "metrics": "what a completion cost stands in usage",
    "num_cached_tokens": "it is usage.cached_tokens",
}


def missing(owner: object, name: str, others: Mapping[str, str]) -> AttributeError:
    """The error for an attribute that `owner` does not have, with the way out where another engine has one."""
    reason = f": {others[name]}" if name in others else ""
    return AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}{reason}", name=name, obj=owner)
