"""Request bodies of the HTTP API as pydantic models. A field may be null everywhere: it then has its default.

Types are strict ("5" is no number), except that 5.0 is the integer 5, as in JSON Schema. Fields that are not declared
here stay in `model_extra`: request_fields.py says which of them are refused by name and which are only ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    WithJsonSchema,
    field_validator,
)

LARGEST_INT = 2**63 - 1  # what travels to the engine
LARGEST_SEED = 2**64 - 1


def _integral(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _prompt(value: Any) -> Any:
    """A string, a list of strings, token ids, or a list of lists of token ids; never mixed."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string, a list of strings, a list of token ids or a list of such lists")
    if not value:
        raise ValueError("the list is empty; give at least one prompt")
    kinds = {type(item) for item in value}
    if kinds == {str} or kinds == {int}:
        return value
    if kinds == {list}:
        for i, item in enumerate(value):
            if any(type(token) is not int for token in item):
                raise ValueError(f"prompt {i} is a list that holds something else than token ids")
        return value
    raise ValueError("a list must hold only strings, only token ids, or only lists of token ids")


def _stop(value: Any) -> Any:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    if isinstance(value, str):
        return [value]
    if value is None:
        return None
    raise ValueError("must be a string or a list of strings")


def _ids(value: Any) -> Any:
    if value is not None and (not isinstance(value, list) or any(type(token) is not int for token in value)):
        raise ValueError("must be a list of token ids")
    return value


def _some_ids(value: Any) -> Any:
    if value == []:
        raise ValueError("the list is empty, which leaves nothing to generate; leave the field out to allow all tokens")
    return _ids(value)


def _seed(value: int) -> int:
    if value > LARGEST_SEED:  # pydantic's own check prints such a bound as a float
        raise ValueError(f"must be at most {LARGEST_SEED}")
    return value


def _truncation(value: int) -> int:
    if value < -1 or value == 0:
        raise ValueError(f"must be 1 or more, or -1 for as many as there is room for; it is {value}")
    return value


def _text_or_objects(value: Any) -> Any:
    if isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, dict) for item in value)):
        return value
    raise ValueError("must be a string or a list of objects")


def _text_or_object(value: Any) -> Any:
    if value is None or isinstance(value, (str, dict)):
        return value
    raise ValueError("must be a string or an object")


def _texts(value: Any) -> Any:
    if isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) for item in value)):
        return value
    raise ValueError("must be a string or a list of strings")


Integer = Annotated[int, BeforeValidator(_integral), Field(ge=-(2**63), le=LARGEST_INT)]
Seed = Annotated[int, BeforeValidator(_integral), Field(ge=-(2**63)), AfterValidator(_seed),
                 WithJsonSchema({"type": "integer", "minimum": -(2**63), "maximum": LARGEST_SEED})]
_IDS: dict = {"type": "array", "items": {"type": "integer"}}
_STRINGS: dict = {"type": "array", "items": {"type": "string"}}
_PROMPTS: list = [{"type": "string"}, _STRINGS, _IDS, {"type": "array", "items": _IDS}]
Prompt = Annotated[Any, BeforeValidator(_prompt), WithJsonSchema({"anyOf": _PROMPTS})]
PromptOrNull = Annotated[Any, BeforeValidator(lambda value: value if value is None else _prompt(value)),
                         WithJsonSchema({"anyOf": [*_PROMPTS, {"type": "null"}]})]
Stop = Annotated[Any, BeforeValidator(_stop),
                 WithJsonSchema({"anyOf": [{"type": "string"}, _STRINGS, {"type": "null"}]})]
TokenIds = Annotated[Any, BeforeValidator(_ids), WithJsonSchema({"anyOf": [_IDS, {"type": "null"}]})]
AllowedIds = Annotated[Any, BeforeValidator(_some_ids),
                       WithJsonSchema({"anyOf": [_IDS | {"minItems": 1}, {"type": "null"}]})]

_OBJECTS: dict = {"type": "array", "items": {"type": "object"}}
TextOrObjects = Annotated[Any, BeforeValidator(_text_or_objects),
                          WithJsonSchema({"anyOf": [{"type": "string"}, _OBJECTS]})]
TextOrObjectsOrNull = Annotated[Any, BeforeValidator(lambda value: value if value is None else _text_or_objects(value)),
                                WithJsonSchema({"anyOf": [{"type": "string"}, _OBJECTS, {"type": "null"}]})]
TextOrObject = Annotated[Any, BeforeValidator(_text_or_object),
                         WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}]})]


def _above_zero(value: float) -> float:
    if value <= 0:
        raise ValueError(f"must be above 0; it is {value:g}")
    return value


Seconds = Annotated[float, BeforeValidator(lambda v: float(v) if type(v) is int else v), AfterValidator(_above_zero),
                    WithJsonSchema({"type": "number", "exclusiveMinimum": 0})]


class Body(BaseModel):
    """Unknown fields are kept in model_extra."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Speculation(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    tokens: Annotated[Integer, Field(ge=0, description="most drafts per step for this request; 0: none; more than the"
                                                    " server makes: named in X-Stretto-Ignored")]


class LogitProcessorUse(BaseModel):
    """A logit processor that the server has, and what it is told."""

    model_config = ConfigDict(strict=True, extra="forbid")
    name: Annotated[str, Field(min_length=1)]
    params: dict[str, Any] | None = None


class SessionOptions(BaseModel):
    """How a call continues the session that `session_id` names."""

    model_config = ConfigDict(strict=True, extra="forbid")
    mode: Annotated[Literal["tag", "append"] | None, Field(
        description="tag: the call carries the whole history; append: only what is new")] = None
    create: Annotated[bool | None, Field(description="false: the session must be open")] = None
    branch_from: Annotated[str | None, Field(description="the new session starts with this one's history")] = None
    after: Annotated[str | None, Field(description="id of the earlier call that this one follows")] = None
    offset: Annotated[Integer | None, Field(description="tokens of the history that stay; negative: from its end")
                      ] = None
    replace: Annotated[bool | None, Field(description="forget the history, or with `after` what followed it")] = None
    drop_previous_output: Annotated[bool | None, Field(description="forget the last answer")] = None
    on_busy: Annotated[Literal["wait", "reject"] | None, Field(description="while another call is running")] = None
    on_disconnect: Annotated[Literal["rollback", "keep"] | None, Field(
        description="of a stream that is cut off: forget the turn, or keep what was sent")] = None


class SessionParams(BaseModel):
    """SGLang's."""

    model_config = ConfigDict(strict=True, extra="ignore")
    id: str | None = None
    rid: str | None = None
    offset: Integer | None = None
    replace: bool | None = None
    drop_previous_output: bool | None = None


class GenerationBody(Body):
    """What chat and text completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Integer | None = None
    max_completion_tokens: Integer | None = None  # OpenAI's newer name of it
    n: Integer | None = None
    seed: Seed | None = None
    stop: Stop = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: Integer | None = None
    stop_token_ids: TokenIds = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Integer | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: Annotated[Integer, AfterValidator(_truncation), Field(
        description="the prompt's last tokens that stay; -1: as many as there is room for")] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    priority: Annotated[Integer, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    request_id: str | None = None
    timeout: Annotated[Seconds | None, Field(description="seconds that the call may take; the server may allow less")
                       ] = None
    speculation: Speculation | None = None
    session_id: str | None = None
    session: SessionOptions | None = None
    session_params: SessionParams | None = None
    session_final: Annotated[bool | None, Field(description="the session closes after this call")] = None
    response_format: dict[str, Any] | None = None  # it and the next nine: serve/grammars.py
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: Any = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: Any = None
    bad_words: list[str] | None = None
    allowed_token_ids: AllowedIds = None
    logit_processors: list[LogitProcessorUse] | None = None
    custom_logit_processor: Annotated[str | None, Field(description="code, where the server allows it")] = None
    custom_params: Annotated[dict[str, Any] | None, Field(description="what that code is told")] = None
    user: str | None = None  # these four identify and describe; they ask for nothing
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class ContentPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    type: str
    text: str | None = None


_PARTS = TypeAdapter(list[ContentPart])


class Message(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _plain(cls, value: Any) -> Any:
        if value is not None and not isinstance(value, (str, list)):
            raise ValueError("must be a string or a list of content parts")
        return _PARTS.validate_python(value) if isinstance(value, list) else value  # names the part that is wrong


class ChatBody(Body):
    """What is rendered through the chat template; /tokenize takes it as well."""

    messages: Annotated[list[Message], Field(min_length=1)]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: TextOrObject = None
    parallel_tool_calls: bool | None = None


class ChatRequest(GenerationBody, ChatBody):
    """POST /v1/chat/completions"""

    separate_reasoning: bool | None = None  # False: reasoning stays in the content
    include_reasoning: bool | None = None  # False: reasoning is left out

    logprobs: bool | None = None
    top_logprobs: Integer | None = None


class CompletionRequest(GenerationBody):
    """POST /v1/completions"""

    prompt: Prompt
    echo: bool | None = None
    logprobs: Integer | None = None
    best_of: Integer | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


class EmbeddingBody(Body):
    """What embeddings, scores and rankings have in common."""

    model: str | None = None
    pooling: Annotated[Literal["last", "mean"] | None, Field(
        description="the last token's state, or the mean over all; default: as the checkpoint wants it")] = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[Integer, Field(ge=1)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    priority: Annotated[Integer, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    request_id: str | None = None
    timeout: Seconds | None = None
    user: str | None = None


Texts = Annotated[str | list[str], BeforeValidator(_texts), Field(min_length=1)]


class EmbeddingRequest(EmbeddingBody):
    """POST /v1/embeddings"""

    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[Integer | None, Field(ge=1, description="keep so many of the first numbers")] = None


class ScoreRequest(EmbeddingBody):
    """POST /v1/score: the cosine of two texts, of one text with several, or of several pairs."""

    text_1: Texts
    text_2: Texts


class RerankRequest(EmbeddingBody):
    """POST /v1/rerank: documents by their cosine with the query."""

    query: str
    documents: Annotated[list[str], Field(min_length=1)]
    top_n: Annotated[Integer | None, Field(ge=1)] = None
    return_documents: bool | None = None


class TokenizeRequest(Body):
    """POST /tokenize: a prompt, or messages as in a chat request."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """POST /detokenize"""

    model: str | None = None
    tokens: Annotated[list, BeforeValidator(_ids), WithJsonSchema(_IDS)]


class AbortBody(Body):
    """POST /abort_request: one request by id, those whose ids begin alike, or all of them."""

    rid: str | None = None
    request_id: str | None = None
    rid_prefix: str | None = None
    abort_all: bool | None = None


class ResponsesRequest(Body):
    """POST /v1/responses. Fields of chat completions that are not named here (top_k, seed, stop, speculation, ...)
    mean what they mean there."""

    model: str | None = None
    input: Annotated[TextOrObjects, Field(description="a text, or the items of a conversation")]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    max_output_tokens: Integer | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Integer | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: TextOrObject = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    truncation: str | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    max_tool_calls: Integer | None = None
    service_tier: str | None = None


class CountTokensRequest(Body):
    """POST /v1/messages/count_tokens"""

    model: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    system: TextOrObjectsOrNull = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages. Fields of chat completions that are not named here (min_p, seed, speculation, ...) mean what
    they mean there."""

    max_tokens: Annotated[Integer, Field(ge=1)]
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    metadata: dict[str, Any] | None = None


class TextOrIds(Body):
    """Prompts as SGLang's clients send them: one of the two."""

    text: PromptOrNull = None
    input_ids: PromptOrNull = None

    @field_validator("text")
    @classmethod
    def _texts(cls, value: Any) -> Any:
        if value is not None and not isinstance(value, str) and not isinstance(value[0], str):
            raise ValueError("must be a string or a list of strings; token ids go into input_ids")
        return value

    @field_validator("input_ids")
    @classmethod
    def _ids(cls, value: Any) -> Any:
        if value is not None and (isinstance(value, str) or isinstance(value[0], str)):
            raise ValueError("must be a list of token ids or a list of such lists; texts go into text")
        return value


class GenerateRequest(TextOrIds):
    """POST /generate: SGLang's names. `sampling_params` takes those of /v1/completions too."""

    sampling_params: dict[str, Any] | None = None
    model: str | None = None
    rid: str | None = None
    stream: bool | None = None
    incremental: Annotated[bool | None, Field(description="stream only what is new in each event")] = None
    priority: Integer | None = None
    return_logprob: bool | None = None
    logprob_start_len: Annotated[Integer, Field(
        ge=-1, description="from which of the prompt's tokens on; -1: of the answer only")] | None = None
    top_logprobs_num: Integer | None = None
    return_text_in_logprobs: bool | None = None


class EncodeRequest(TextOrIds, EmbeddingBody):
    """POST /encode: embeddings in SGLang's shape."""


class TraceBody(Body):
    """POST /start_profile"""

    num_steps: Annotated[Integer, Field(ge=1)] | None = None


class SessionBody(Body):
    """POST /v1/sessions"""

    session_id: str | None = None
    ttl: Annotated[Seconds | None, Field(description="seconds idle until it closes")] = None
    capacity: Annotated[Integer | None, Field(ge=2, description="most tokens of its history")] = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    model: Annotated[str | None, Field(description="the model or LoRA adapter that will answer its turns")] = None
    branch_from: Annotated[str | None, Field(description="an idle session with whose history it starts")] = None
    offset: Annotated[Integer | None, Field(ge=1, description="how many tokens of that history")] = None


class LoadAdapterBody(Body):
    """POST /v1/load_lora_adapter"""

    lora_name: Annotated[str, Field(min_length=1, max_length=256, description="by which requests name it as model")]
    lora_path: Annotated[str, Field(min_length=1, description="a folder on the server, in PEFT's layout")]


class UnloadAdapterBody(Body):
    """POST /v1/unload_lora_adapter"""

    lora_name: Annotated[str, Field(min_length=1, max_length=256)]


class RewindBody(Body):
    """POST /v1/sessions/{id}/rewind"""

    offset: Annotated[Integer, Field(ge=0, description="tokens of the history that stay")]


class OpenSessionBody(Body):
    """/open_session, as SGLang's clients send it."""

    capacity_of_str_len: Annotated[Integer | None, Field(ge=0)] = None
    session_id: str | None = None
    streaming: bool | None = None
    timeout: Seconds | None = None


class CloseSessionBody(Body):
    """/close_session"""

    session_id: str
