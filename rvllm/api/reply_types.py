"""The JSON of replies as types, for OpenAPI's document. Replies are not made of them: tests hold one to the other."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType


class Shape(msgspec.Struct, forbid_unknown_fields=True):
    """A field that may be absent is UNSET."""


class ErrorObject(Shape):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(Shape):
    """What went wrong, as OpenAI's clients read it. `param`: the field at fault."""

    error: ErrorObject


class AnthropicErrorObject(Shape):
    type: str
    message: str


class AnthropicError(Shape):
    """What went wrong, as Anthropic's clients read it."""

    type: Literal["error"]
    error: AnthropicErrorObject


class Version(Shape):
    version: str


class Load(Shape):
    server_load: int


class Model(Shape):
    """A name of the model. `max_model_len`: the context, in tokens."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class Models(Shape):
    object: Literal["list"]
    data: list[Model]


class Tokens(Shape):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class Text(Shape):
    prompt: str


class AddedToken(Shape):
    content: str
    special: bool


class TokenizerInfo(Shape):
    tokenizer_class: str
    model_max_length: int
    vocab_size: int
    add_bos_token: bool
    added_tokens_decoder: dict[str, AddedToken]
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None


class TokenCount(Shape):
    input_tokens: int


# --- Completions and chats


class CachedTokens(Shape):
    cached_tokens: int


class Usage(Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class Times(Shape):
    """How long a request took, with --enable-per-request-metrics."""

    time_to_first_token_ms: float | None
    generation_time_ms: float | None
    queue_time_ms: float | None
    mean_itl_ms: float | None
    tokens_per_second: float | None


class PromptLogprob(Shape):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
Reason = Literal["stop", "length", "tool_calls"]


class TextLogprobs(Shape):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TextChoice(Shape):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Reason
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class TextCompletion(Shape):
    """A text's continuations, `n` of each prompt."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage
    system_fingerprint: str | None
    metrics: Times | UnsetType = UNSET


class CalledFunction(Shape):
    name: str
    arguments: str


class ToolCall(Shape):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Shape):
    role: str
    content: str | None
    refusal: None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class TokenLogprob(Shape):
    token: str
    logprob: float
    bytes: list[int]


class ScoredToken(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Shape):
    content: list[ScoredToken]
    refusal: None


class ChatChoice(Shape):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Reason
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Shape):
    """Answers to a chat, `n` of them."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None
    metrics: Times | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


# --- Responses and messages


class ReasoningTokens(Shape):
    reasoning_tokens: int


class ResponseUsage(Shape):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class Incomplete(Shape):
    reason: str


class Response(Shape):
    """An answer as items: `message`, `reasoning`, `function_call`."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    background: bool
    error: None
    incomplete_details: Incomplete | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, Any]
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[Any]
    top_p: float
    truncation: str
    usage: ResponseUsage
    user: str | None


class MessageUsage(Shape):
    input_tokens: int
    output_tokens: int


class Message(Shape):
    """An answer as blocks: `text`, `thinking`, `tool_use`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage
