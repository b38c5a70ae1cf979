"""Which request fields this server cannot honour. The one place to change when a feature arrives.

A field of REFUSED is an error unless its value asks for nothing: silence would let a client believe that its answer
follows a schema, or comes from a tool call, when it does not. Any other field that the schemas do not know is ignored
and named in the response header X-Stretto-Ignored, or refused as well where the server is strict.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stretto.serve.errors import ApiError, did_you_mean, unsupported
from stretto.serve.schemas import Body, ChatRequest, CompletionRequest, GenerationBody

_OLD = "OpenAI has replaced it; use tools and tool_choice"
_TOOLS = "a completion has no tools; use chat completions"
_GRAMMAR = "the name says no form; use structured_outputs"
_TEXT_ONLY = "the model reads and writes text only"
_BEAM = "only sampling is available; use n"
_NOT_HERE = "this server has nothing that would honour it; leave it out"

REFUSED: Mapping[str, str] = {
    "grammar": _GRAMMAR,
    **dict.fromkeys(("tools", "tool_choice"), _TOOLS),
    **dict.fromkeys(("functions", "function_call"), _OLD),
    **dict.fromkeys(("audio", "modalities", "prompt_embeds", "mm_processor_kwargs"), _TEXT_ONLY),
    **dict.fromkeys(("use_beam_search", "length_penalty", "beam_width", "early_stopping"), _BEAM),
    **dict.fromkeys(("prediction", "store", "verbosity", "web_search_options", "service_tier", "documents",
                     "xtc_probability",
                     "typical_p", "mirostat", "dry_multiplier", "thinking_token_budget", "lora_path", "adapter_id",
                     "return_hidden_states", "kv_transfer_params", "input_embeds", "suffix"), _NOT_HERE),
    "vllm_xargs": "parameters of a logit processor stand beside its name in logit_processors",
    **dict.fromkeys(("image_data", "video_data", "audio_data", "media_io_kwargs"), _TEXT_ONLY),
    **dict.fromkeys(("return_routed_experts", "return_entropy", "return_bytes", "return_assistant_tokens_mask",
                     "return_prompt_text", "repetition_detection", "ec_transfer_params", "bootstrap_host",
                     "bootstrap_port", "bootstrap_room", "data_parallel_rank", "background", "lora_id", "moderation",
                     "guided_whitespace_pattern", "stream_interval"), _NOT_HERE),
    **dict.fromkeys(("token_ids_logprob", "logprob_token_ids"),
                    "ask for logprobs of the best tokens, or on a server with --max-logprobs -1 of all"),
    "max_new_tokens": "use max_tokens, or in /generate sampling_params.max_new_tokens",
    "stop_regex": "use stop, or a grammar of the kind regex",
    "extra_key": "use cache_salt",
    "guided_decoding_backend": "grammars run through llguidance",
    "truncation_side": "prompts are cut at their beginning",
    "logits_processors": "the name here is logit_processors: a list of {name, params}",
    "chat_template": "templates come from the model's files, not from requests",
    "spaces_between_special_tokens": "special tokens are joined as the tokenizer joins them",
}

_NOTHING: tuple[Any, ...] = (None, False, [], {}, "")  # values that ask for nothing, whatever the field
ASKS_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "service_tier": ("auto", "default"),
    "length_penalty": (1, 1.0),
    "typical_p": (1, 1.0),
    "spaces_between_special_tokens": (True,),
    "parallel_tool_calls": (True,),
    "xtc_probability": (0, 0.0),
    "mirostat": (0,),
    "dry_multiplier": (0, 0.0),
    "stream_interval": (1,),
    "guided_decoding_backend": ("auto", "guidance"),
    "truncation_side": ("left",),
    "best_of": (1,),
}


# what one of the two APIs knows and the other does not
_CHAT_ONLY = dict.fromkeys(ChatRequest.model_fields.keys() - CompletionRequest.model_fields.keys(),
                           "/v1/chat/completions has it")
_COMPLETIONS_ONLY = dict.fromkeys(CompletionRequest.model_fields.keys() - ChatRequest.model_fields.keys(),
                                  "/v1/completions has it")

ASKS_EMPTY = frozenset({"web_search_options"})  # an empty object asks for the defaults of something


def _asks_nothing(name: str, value: Any) -> bool:
    if name in ASKS_EMPTY:
        return value is None
    return any(type(value) is type(empty) and value == empty for empty in (*_NOTHING, *ASKS_NOTHING.get(name, ())))


def refuse(fields: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Raises ApiError for the first field that asks for something and has a reason here why it cannot have it."""
    for name, value in fields.items():
        if name in reasons and not _asks_nothing(name, value) and (name, value) != ("n", 1):
            raise unsupported(name, reasons[name])


def _elsewhere(body: Body) -> Mapping[str, str]:
    if not isinstance(body, GenerationBody):
        return {}
    return _COMPLETIONS_ONLY if isinstance(body, ChatRequest) else _CHAT_ONLY


def check_fields(body: Body, strict: bool) -> list[str]:
    """Names of the fields that are ignored. Raises ApiError for a refused one, and for any unknown one if strict."""
    extra = dict(body.model_extra or {})
    if getattr(body, "suffix", None):
        extra["suffix"] = body.suffix  # type: ignore[attr-defined]
    refused = {**_elsewhere(body), **REFUSED}
    refuse(extra, refused)
    unknown = [name for name in extra if name not in refused and name not in ASKS_NOTHING]
    if unknown and strict:
        known = [*type(body).model_fields, *REFUSED]
        raise ApiError(400, f"unknown request field {unknown[0]!r}.{did_you_mean(unknown[0], known)}", param=unknown[0],
                       code="unknown_parameter")
    return unknown


def ignored_header(names: list[str]) -> dict[str, str]:
    """X-Stretto-Ignored, safe for any name that a client may have sent."""
    if not names:
        return {}
    shown = [name.encode("ascii", "backslashreplace").decode().replace("\n", "\\n").replace("\r", "\\r")[:64]
             for name in names[:32]]
    safe = ["".join(c if c.isprintable() and c != "," else "?" for c in name) for name in shown]
    return {"X-Stretto-Ignored": ",".join(safe)}
