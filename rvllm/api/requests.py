"""Request bodies: every field that is known, its type, and what becomes of it. Knows JSON; no tokenizer, no engine.

A field is honoured; or accepted because it changes nothing here; or refused by name, with the reason. null is as good
as leaving a field out, everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from rvllm.api.errors import HttpError
from rvllm.errors import BadRequest
from rvllm.sampling.params import SamplingParams
from rvllm.sampling.structured import StructuredOutputsParams
from rvllm.text.completion import Terms
from rvllm.text.stop import parse_stop

REREAD_BYTES = 1 << 20
"""Of a body that is looked through once more for whole numbers: a larger one would hold up others' tokens."""

Body = TypeVar("Body", bound="ModelBody")


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ModelBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What every body has. `model` None: the one that is served."""

    model: str | None = None


class SamplingBody(ModelBody, kw_only=True):
    """What completions and chats share."""

    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # The form of the text; see structured_outputs_of.
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # What vLLM tells beside OpenAI's.
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncation_side: str | None = None
    # Accepted: they change nothing here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # Accepted where they ask for nothing that we do not do; see REFUSED.
    best_of: int | None = None
    store: bool | None = None
    service_tier: str | None = None
    spaces_between_special_tokens: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    detokenize: bool | None = None
    prompt_embeds: Any = None
    logprob_token_ids: list[int] | None = None
    repetition_detection: Any = None
    vllm_xargs: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None

    def sampling(self, defaults: Mapping[str, Any], **more: Any) -> SamplingParams:
        """The parameters: what is given, else `defaults`, else SamplingParams' own. Raises BadRequest."""
        given = {name: getattr(self, name) for name in _SAMPLING_NAMES} | {"stop": parse_stop(self.stop)} | more
        given.setdefault("structured_outputs", structured_outputs_of(self))
        return SamplingParams(**{**defaults, **{name: value for name, value in given.items() if value is not None}})

    def terms(self) -> Terms:
        terms = Terms(self.priority or 0, self.cache_salt)
        terms.check()
        return terms

    def check(self, *, trusted: bool = False) -> None:
        """Raise BadRequest for what we do not do. trusted: it may bring a chat template."""
        for name, (harmless, why) in REFUSED.items():
            value = getattr(self, name, None)
            if value is not None and value not in harmless and not (trusted and name == "chat_template"):
                raise BadRequest(f"{name} is not supported here: {why}", param=name)
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise BadRequest(
                f"best_of is {self.best_of} and n is {self.n or 1}: more are not drawn than given back",
                param="best_of",
                hint="leave best_of out",
            )
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options are for stream: true", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise BadRequest("prompt_logprobs are for stream: false", param="prompt_logprobs")
        if self.truncation_side not in (None, "left", "right"):
            raise BadRequest("truncation_side is neither left nor right", param="truncation_side")


class CompletionBody(SamplingBody, kw_only=True):
    """POST /v1/completions. `prompt`: a text, a list of texts, token ids, or a list of lists of ids."""

    prompt: Any = None
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None
    suffix: str | None = None


class ChatBody(SamplingBody, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Any = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    # See REFUSED.
    chat_template: str | None = None
    functions: Any = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    web_search_options: Any = None


class TokenizeBody(ModelBody, kw_only=True):
    """POST /tokenize: a prompt, or the messages of a chat."""

    prompt: str | None = None
    messages: Any = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Any = None
    chat_template: str | None = None

    def check(self, *, trusted: bool = False) -> None:
        """Raise BadRequest for what we do not do. trusted: it may bring a chat template."""
        if self.chat_template is not None and not trusted:
            raise BadRequest(f"chat_template is not supported here: {_NO_TEMPLATE}", param="chat_template")
        if (self.prompt is None) == (self.messages is None):
            raise BadRequest("give either prompt or messages", param="prompt")


class DetokenizeBody(ModelBody, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]


_SAMPLING_NAMES = (
    "n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "stop_token_ids", "ignore_eos", "logit_bias", "allowed_token_ids", "bad_words",
    "include_stop_str_in_output", "skip_special_tokens",
)  # fmt: skip

_NO_TEMPLATE = "the template is the server's, where it is not started with --trust-request-chat-template"
_NO_FUNCTIONS = "it gave way to tools"
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "store": ((False,), "nothing is kept"),
    "service_tier": (("auto", "default"), "there is one tier"),
    "spaces_between_special_tokens": ((True,), "they are kept as the tokenizer writes them"),
    "use_beam_search": ((False,), "tokens are drawn one by one"),
    "length_penalty": ((1.0,), "it is for beams, and tokens are drawn one by one"),
    "detokenize": ((True,), "replies are text"),
    "prompt_embeds": ((), "prompts are text or token ids"),
    "logprob_token_ids": (([],), "log-probabilities are those of the likeliest"),
    "repetition_detection": ((), "repetition does not end a text"),
    "vllm_xargs": (({},), "there are no plugins"),
    "kv_transfer_params": (({},), "one engine reads prompts and writes"),
    "suffix": (("",), "text is only continued"),
    "chat_template": ((), _NO_TEMPLATE),
    "functions": (([],), _NO_FUNCTIONS),
    "function_call": (("none",), _NO_FUNCTIONS),
    "modalities": ((["text"],), "there is text only"),
    "audio": ((), "there is text only"),
    "web_search_options": ((), "nothing is searched"),
}
"""field -> (values that ask for nothing, why others are refused)"""


def structured_outputs_of(body: SamplingBody) -> StructuredOutputsParams | None:
    """The form that a body wants its text to have, in one of three spellings. Raises BadRequest."""
    guided = {name: getattr(body, f"guided_{name}") for name in ("json", "regex", "choice", "grammar")}
    guided = {name: value for name, value in guided.items() if value is not None}
    found = [StructuredOutputsParams.parse(given) for given in (body.structured_outputs, guided) if given]
    if (formatted := _response_format(body.response_format)) is not None:
        found.append(formatted)
    if len(found) > 1:
        raise BadRequest(
            "response_format, structured_outputs and guided_... each say what form the text shall have",
            param="response_format" if formatted else "structured_outputs",
            hint="give one of them",
        )
    return found[0] if found else None


def _response_format(given: dict[str, Any] | None) -> StructuredOutputsParams | None:
    """OpenAI's spelling. `strict` or not, the schema is followed."""
    kind = None if given is None else given.get("type")
    if given is None or kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind not in ("json_schema", "structural_tag"):
        raise BadRequest(
            f"response_format.type is {kind!r:.100}, it has to be text, json_object, json_schema or structural_tag",
            param="response_format",
        )
    named = given.get("json_schema")
    schema = named.get("schema") if isinstance(named, dict) else None
    if kind == "json_schema" and not isinstance(schema, dict):
        raise BadRequest(
            "response_format.json_schema.schema is missing, it has to be an object", param="response_format"
        )
    try:
        if kind == "structural_tag":
            return StructuredOutputsParams(structural_tag=given)  # type: ignore[arg-type]
        return StructuredOutputsParams(json=schema)
    except BadRequest as cause:
        raise BadRequest(cause.message, param="response_format", hint=cause.hint) from None


_PLACE = re.compile(r"(.*) - at `\$\.?(\w*)[^`]*`", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`", re.DOTALL)


def parse(data: bytes, kind: type[Body]) -> Body:
    """A body as its struct. Raises HttpError, 400, whose `param` is the field at fault."""
    try:
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.ValidationError as cause:
            if "got `float`" not in str(cause) or len(data) > REREAD_BYTES:
                raise
            # To JSON, and to JSON Schema, 1.0 is as whole as 1.
            return msgspec.convert(_with_whole_numbers(msgspec.json.decode(data)), kind)
    except msgspec.ValidationError as cause:
        raise _wrong_field(str(cause)) from None
    except msgspec.DecodeError as cause:
        reason = str(cause).removeprefix("JSON is malformed: ")
        raise HttpError(400, f"the body is not valid JSON: {reason}", code="invalid_json") from None
    except RecursionError:
        raise HttpError(400, "the body is nested too deeply", code="invalid_json") from None


def _with_whole_numbers(value: Any) -> Any:
    """JSON with integers for the numbers that are whole."""
    if isinstance(value, dict):
        return {name: _with_whole_numbers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_whole_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**63 else value


def _wrong_field(said: str) -> HttpError:
    place = _PLACE.fullmatch(said)
    reason, name = (place[1], place[2]) if place else (said, "")
    if unknown := _UNKNOWN.fullmatch(reason):
        inside = f"{name} has" if name else "there is"
        return HttpError(400, f"{inside} an unknown field {unknown[1][:100]!r}", param=name or unknown[1][:100])
    if missing := _MISSING.fullmatch(reason):
        return HttpError(400, f"{missing[1]} is missing", param=name or missing[1])
    reason = reason[:1].lower() + reason[1:]
    return HttpError(400, f"{name or 'the body'}: {reason}", param=name or None)
