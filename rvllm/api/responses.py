"""OpenAI's Responses API: its bodies as chats, and its replies. Nothing is kept between two requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rvllm.api.errors import HttpError
from rvllm.api.requests import ChatBody, ModelBody
from rvllm.api.turns import Block, Json, TurnReply, typed_event
from rvllm.errors import BadRequest

_NOT_KEPT = "nothing is kept between requests"
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "previous_response_id": ((), _NOT_KEPT),
    "conversation": ((), _NOT_KEPT),
    "background": ((False,), _NOT_KEPT),
    "prompt": ((), _NOT_KEPT),
    "include": (([],), "there is nothing more to tell"),
    "truncation": (("disabled",), "no message is left out"),
    "service_tier": (("auto", "default"), "there is one tier"),
    "max_tool_calls": ((), "the server calls no tools"),
    "top_logprobs": ((0,), "log-probabilities are told by the other routes"),
}


class ResponsesBody(ModelBody, kw_only=True):
    """POST /v1/responses."""

    input: Any = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    # vLLM's.
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    structured_outputs: dict[str, Any] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    # Accepted: they change nothing here.
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    stream_options: dict[str, Any] | None = None
    # See REFUSED.
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None
    include: list[str] | None = None
    truncation: str | None = None
    service_tier: str | None = None
    max_tool_calls: int | None = None
    top_logprobs: int | None = None

    def chat(self) -> ChatBody:
        """The same as a chat. Raises BadRequest."""
        for name, (harmless, why) in REFUSED.items():
            value = getattr(self, name)
            if value is not None and value not in harmless:
                raise BadRequest(f"{name} is not supported here: {why}", param=name)
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise BadRequest(
                f"max_output_tokens is {self.max_output_tokens}, the least is 1", param="max_output_tokens"
            )
        same = {name: getattr(self, name) for name in _SAME}
        return ChatBody(
            messages=_messages(self.instructions, self.input),
            max_tokens=self.max_output_tokens,
            tools=_tools(self.tools),
            tool_choice=_tool_choice(self.tool_choice),
            response_format=_format(self.text),
            reasoning_effort=_effort(self.reasoning),
            **same,
        )


_SAME = (
    "model", "temperature", "top_p", "stream", "parallel_tool_calls", "top_k", "min_p", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "seed", "stop", "ignore_eos", "logit_bias", "structured_outputs",
    "priority", "cache_salt",
)  # fmt: skip


@dataclass(slots=True)
class ResponseReply(TurnReply):
    """A response and its events, numbered. `body` is what it answers."""

    body: ResponsesBody = field(default_factory=ResponsesBody)
    number: int = 0

    def opening(self) -> Iterator[Json]:
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._response("in_progress"))

    def begun(self, index: int, block: Block) -> Iterator[Json]:
        item = _item(Block(block.kind, block.id, "", block.call), "in_progress")
        if "content" in item:
            item["content"] = []
        yield self._event("response.output_item.added", output_index=index, item=item)
        if block.call is None:
            part = _part(Block(block.kind, block.id))
            yield self._inside("response.content_part.added", index, block, content_index=0, part=part)

    def grown(self, index: int, block: Block, text: str) -> Iterator[Json]:
        yield self._inside(f"response.{_STEMS[block.kind]}.delta", index, block, delta=text, **_place(block))

    def ended(self, index: int, block: Block) -> Iterator[Json]:
        stem = f"response.{_STEMS[block.kind]}.done"
        if block.call is not None:
            yield self._inside(stem, index, block, name=block.call.name, arguments=block.text)
        else:
            yield self._inside(stem, index, block, text=block.text, **_place(block))
            yield self._inside("response.content_part.done", index, block, content_index=0, part=_part(block))
        yield self._event("response.output_item.done", output_index=index, item=_item(block, "completed"))

    def closing(self) -> Iterator[Json]:
        whole = self.whole()
        yield self._event(f"response.{whole['status']}", response=whole)

    def whole(self) -> Json:
        return self._response("incomplete" if self.finish_reason == "length" else "completed")

    def error_shape(self, error: HttpError, in_stream: bool) -> bytes:
        """An error as the clients of this API read it."""
        if not in_stream:
            return error.body()
        told = {"code": error.code or error.kind, "message": error.message, "param": error.param}
        return typed_event(self._event("error", **told))

    def _event(self, kind: str, **more: Any) -> Json:
        self.number += 1
        return {"type": kind, "sequence_number": self.number - 1, **more}

    def _inside(self, kind: str, index: int, block: Block, **more: Any) -> Json:
        return self._event(kind, item_id=block.id, output_index=index, **more)

    def _response(self, status: str) -> Json:
        body, over = self.body, status != "in_progress"
        read, cached, written = self.tokens
        usage = {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": self.thought_tokens},
            "total_tokens": read + written,
        }
        (choice,) = self.generation.choices
        return {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": self.created_s,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.model,
            "output": [_item(block, "completed") for block in self.blocks] if over else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None} | (body.reasoning or {}),
            "service_tier": "default",
            "store": False,
            "temperature": choice.request.params.temperature,
            "text": {"format": {"type": "text"}} | (body.text or {}),
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": choice.request.params.top_p,
            "truncation": "disabled",
            "usage": usage if over else None,
            "user": body.user,
        }


_STEMS = {"text": "output_text", "thought": "reasoning_text", "call": "function_call_arguments"}


def _place(block: Block) -> Json:
    if block.kind == "call":
        return {}
    return {"content_index": 0} | ({"logprobs": []} if block.kind == "text" else {})


def _part(block: Block) -> Json:
    if block.kind == "thought":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _item(block: Block, status: str) -> Json:
    if block.call is not None:
        called = {"call_id": f"call_{block.id[3:]}", "name": block.call.name, "arguments": block.text}
        return {"id": block.id, "type": "function_call", "status": status, **called}
    content = [_part(block)]
    if block.kind == "thought":
        return {"id": block.id, "type": "reasoning", "summary": [], "content": content, "status": status}
    return {"id": block.id, "type": "message", "role": "assistant", "status": status, "content": content}


# --- Bodies


def _messages(instructions: str | None, given: Any) -> list[Json]:
    """Raises BadRequest."""
    found: list[Json] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(given, str):
        return [*found, {"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise BadRequest("input must be a text or a list of items, and not empty", param="input")
    for place, item in enumerate(given):
        if not isinstance(item, Mapping):
            raise BadRequest(f"input[{place}] must be an object", param="input")
        _add(found, f"input[{place}]", item)
    return found


def _add(found: list[Json], where: str, item: Mapping[str, Any]) -> None:
    """Put an item behind the messages; calls and thoughts belong to the assistant's message that they stand beside."""
    kind = item.get("type", "message")
    if kind == "message":
        message = {"role": item.get("role"), "content": item.get("content")}
        if message["role"] == "assistant" and _goes_on(found) and not found[-1]["content"]:
            found[-1]["content"] = message["content"]
        else:
            found.append(message)
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        _assistant(found).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        found.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        texts = [str(part.get("text", "")) for part in parts if isinstance(part, Mapping)]
        found.append({"role": "assistant", "content": "", "reasoning_content": "".join(texts)})
    else:
        raise BadRequest(f"{where} is of type {kind!r:.50}, which is not read", param="input")


def _goes_on(found: list[Json]) -> bool:
    return bool(found) and found[-1]["role"] == "assistant"


def _assistant(found: list[Json]) -> Json:
    if not _goes_on(found):
        found.append({"role": "assistant", "content": ""})
    return found[-1]


def _tools(given: Any) -> list[Json] | None:
    if given is None:
        return None
    if not isinstance(given, list) or not all(isinstance(tool, Mapping) for tool in given):
        raise BadRequest("tools must be a list of objects", param="tools")
    found = []
    for place, tool in enumerate(given):
        if tool.get("type") != "function":
            raise BadRequest(
                f"tools[{place}] is of type {tool.get('type')!r:.50}, there are functions only", param="tools"
            )
        names = ("name", "description", "parameters", "strict")
        found.append(
            {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}
        )
    return found


def _tool_choice(given: Any) -> Any:
    if isinstance(given, Mapping) and given.get("type") == "function":
        return {"type": "function", "function": {"name": given.get("name")}}
    return given


def _effort(reasoning: dict[str, Any] | None) -> str | None:
    """Raises BadRequest."""
    effort = (reasoning or {}).get("effort")
    if effort is not None and not isinstance(effort, str):
        raise BadRequest("reasoning.effort must be a text", param="reasoning")
    return effort


def _format(text: dict[str, Any] | None) -> dict[str, Any] | None:
    """The format as chats have it. Raises BadRequest."""
    given = (text or {}).get("format")
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise BadRequest("text.format must be an object", param="text")
    if given.get("type") != "json_schema":
        return dict(given)
    return {"type": "json_schema", "json_schema": {"name": given.get("name"), "schema": given.get("schema")}}
