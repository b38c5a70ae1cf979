"""The shapes of answers that are made as plain objects, for the OpenAPI document; tests hold the answers to them.

Those of chat completions, completions and errors are the structs that the answers are made of. A struct here names what
a client may rely on; more fields may stand beside them.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Status(msgspec.Struct):
    """A probe that is content."""

    status: str
    seconds: float | msgspec.UnsetType = msgspec.UNSET  # of /health_generate


class ModelCard(msgspec.Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(msgspec.Struct):
    object: Literal["list"]
    data: list[ModelCard]


class Version(msgspec.Struct):
    version: str


class ServerInfo(msgspec.Struct):
    """The start-up report (model, device, memory, kv, limits, features, start), and what the API is told to do."""

    version: str
    model_name: str
    served_model_names: list[str]
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    kv_tokens: int
    eos_token_ids: list[int]
    speculation_tokens: int
    hidden_size: int
    pooling: Literal["last", "mean"]
    default_sampling: dict[str, float]
    strict_requests: bool
    max_body_bytes: int
    max_live_requests: int
    api_key_required: bool


class ModelInfo(msgspec.Struct):
    """SGLang's names."""

    model_path: str
    tokenizer_path: str
    is_generation: bool
    served_model_name: str
    max_context_length: int
    max_total_num_tokens: int
    max_running_requests: int
    vocab_size: int
    eos_token_id: list[int]
    preferred_sampling_params: dict[str, float] | None
    weight_version: str


class TokenizerInfo(msgspec.Struct):
    tokenizer_class: str
    vocab_size: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: str | None


class Tokens(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class PromptText(msgspec.Struct):
    prompt: str


class AbortedIds(msgspec.Struct):
    aborted: list[str]


class Deleted(msgspec.Struct):
    id: str
    object: str
    deleted: bool


class Load(msgspec.Struct):
    """SGLang's names."""

    dp_rank: int
    timestamp: float
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float
    max_running_requests: int
    utilization: float
    cache_hit_rate: float
    spec_accept_rate: float
    num_retracted_reqs: int
    live_requests: int


class Aggregate(msgspec.Struct):
    total_running_reqs: int
    total_waiting_reqs: int
    total_reqs: int
    avg_token_usage: float


class Loads(msgspec.Struct):
    timestamp: str
    version: str
    dp_rank_count: int
    loads: list[Load]
    aggregate: Aggregate


class Flushed(msgspec.Struct):
    success: bool
    message: str


class LoadedAdapters(msgspec.Struct):
    success: bool
    message: str
    loaded_adapters: dict[str, str]  # name -> path


class Recording(msgspec.Struct):
    recording: bool
    num_steps: int


class ChromeTrace(msgspec.Struct):
    """For ui.perfetto.dev."""

    traceEvents: list[dict[str, Any]]


class SessionObject(msgspec.Struct):
    object: Literal["session"]
    id: str
    state: Literal["idle", "running", "closing"]
    tokens: int
    cached_tokens: int
    turns: int
    waiting: int
    last_turn: str
    idle_seconds: float
    ttl: float | None
    capacity: int | None


class SessionList(msgspec.Struct):
    object: Literal["list"]
    data: list[SessionObject]


class PromptUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingObject(msgspec.Struct):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str  # base64 of float32, little-endian


class EmbeddingList(msgspec.Struct):
    object: Literal["list"]
    model: str
    data: list[EmbeddingObject]
    usage: PromptUsage


class Encoded(msgspec.Struct):
    """SGLang's shape of an embedding."""

    embedding: list[float]
    meta_info: dict[str, Any]


class ScoreObject(msgspec.Struct):
    object: Literal["score"]
    index: int
    score: float


class ScoreList(msgspec.Struct):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreObject]
    usage: PromptUsage


class RankedDocument(msgspec.Struct):
    index: int
    relevance_score: float
    document: PromptTextOf | msgspec.UnsetType = msgspec.UNSET


class PromptTextOf(msgspec.Struct):
    text: str


class Ranking(msgspec.Struct):
    id: str
    model: str
    results: list[RankedDocument]
    usage: PromptUsage


class Generated(msgspec.Struct):
    """An answer of /generate. `meta_info`: id, finish_reason, counts of tokens, log-probabilities."""

    text: str
    output_ids: list[int]
    meta_info: dict[str, Any]
    index: int | msgspec.UnsetType = msgspec.UNSET  # in streams of several


class ResponseObject(msgspec.Struct):
    """OpenAI's Response."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None


class ResponseEvent(msgspec.Struct):
    """response.created, response.output_text.delta, ..., response.completed."""

    type: str
    sequence_number: int


class ResponseItems(msgspec.Struct):
    object: Literal["list"]
    data: list[dict[str, Any]]
    has_more: bool
    first_id: str | None
    last_id: str | None


class ResponseState(msgspec.Struct):
    id: str
    object: Literal["response"]
    status: str


class MessageUsage(msgspec.Struct):
    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int


class MessageObject(msgspec.Struct):
    """Anthropic's Message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(msgspec.Struct):
    """message_start, content_block_delta, ..., message_stop; ping; error."""

    type: str


class InputTokens(msgspec.Struct):
    input_tokens: int


class AnthropicErrorDetail(msgspec.Struct):
    type: str
    message: str
    param: str | None
    code: str | None


class AnthropicError(msgspec.Struct):
    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str | None
