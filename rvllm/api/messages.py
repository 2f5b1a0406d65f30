"""Anthropic's Messages API: its bodies as chats, and its replies. Knows shapes of JSON; no model and no socket."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from rvllm.api.errors import HttpError
from rvllm.api.requests import ChatBody, ModelBody
from rvllm.api.turns import Block, Json, TurnReply, typed_event
from rvllm.errors import BadRequest

_KINDS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
          413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}  # fmt: skip
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class CountBody(ModelBody, kw_only=True):
    """POST /v1/messages/count_tokens."""

    messages: Any = None
    system: Any = None
    tools: Any = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None

    def chat(self) -> ChatBody:
        """The same as a chat. Raises BadRequest."""
        choice, parallel = _tool_choice(self.tool_choice)
        kind = None if self.thinking is None else self.thinking.get("type")
        if kind not in (None, "enabled", "disabled", "adaptive"):
            raise BadRequest("thinking.type has to be enabled, disabled or adaptive", param="thinking")
        wanted = {"enabled": True, "disabled": False}.get(kind or "")
        return ChatBody(
            model=self.model,
            messages=_messages(self.system, self.messages),
            tools=_tools(self.tools),
            tool_choice=choice,
            parallel_tool_calls=parallel,
            chat_template_kwargs=None if wanted is None else {"enable_thinking": wanted},
        )


class MessagesBody(CountBody, kw_only=True):
    """POST /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    # Accepted: they change nothing here.
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None

    def chat(self) -> ChatBody:
        found = CountBody.chat(self)
        if self.max_tokens < 1:
            raise BadRequest(f"max_tokens is {self.max_tokens}, the least is 1", param="max_tokens")
        return msgspec.structs.replace(
            found,
            max_tokens=self.max_tokens,
            stop=self.stop_sequences or None,
            stream=self.stream,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
        )


def error_shape(error: HttpError, in_stream: bool) -> bytes:
    """An error as Anthropic's clients read it."""
    told: Json = {
        "type": "error",
        "error": {"type": _KINDS.get(error.status, "api_error"), "message": error.message},
    }
    return typed_event(told) if in_stream else msgspec.json.encode(told)


@dataclass(slots=True)
class MessageReply(TurnReply):
    """A message and its events."""

    def opening(self) -> Iterator[Json]:
        yield {"type": "message_start", "message": self._message()}

    def begun(self, index: int, block: Block) -> Iterator[Json]:
        empty = Block(block.kind, block.id, "{}" if block.call else "", block.call)
        yield {"type": "content_block_start", "index": index, "content_block": _shown(empty)}

    def grown(self, index: int, block: Block, text: str) -> Iterator[Json]:
        name, key = {
            "text": ("text_delta", "text"),
            "thought": ("thinking_delta", "thinking"),
            "call": ("input_json_delta", "partial_json"),
        }[block.kind]
        yield {"type": "content_block_delta", "index": index, "delta": {"type": name, key: text}}

    def ended(self, index: int, block: Block) -> Iterator[Json]:
        yield {"type": "content_block_stop", "index": index}

    def closing(self) -> Iterator[Json]:
        message = self.whole()
        delta = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": delta, "usage": message["usage"]}
        yield {"type": "message_stop"}

    def whole(self) -> Json:
        return self._message() | {"content": [_shown(block) for block in self.blocks], **self._end_reason()}

    def _message(self) -> Json:
        read, _, written = self.tokens
        return {
            "id": f"msg_{self.id}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": read, "output_tokens": written},
        }

    def _end_reason(self) -> Json:
        if self.finish_reason == "length":
            return {"stop_reason": "max_tokens"}
        if isinstance(self.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": self.stop_reason}
        return {"stop_reason": "tool_use" if self.reader.calls else "end_turn"}


def _shown(block: Block) -> Json:
    if block.call is not None:
        # Arguments that were cut off are no object.
        try:
            given = msgspec.json.decode(block.text)
        except msgspec.DecodeError:
            given = {}
        return {"type": "tool_use", "id": f"toolu_{block.id[3:]}", "name": block.call.name, "input": given}
    if block.kind == "thought":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "text", "text": block.text}


# --- Bodies


def _messages(system: Any, given: Any) -> list[Json]:
    """Raises BadRequest."""
    if not isinstance(given, list):
        raise BadRequest("messages must be a list", param="messages")
    found: list[Json] = []
    if system is not None and system != "":
        found.append({"role": "system", "content": _texts("system", system)})
    for place, message in enumerate(given):
        if not isinstance(message, Mapping) or message.get("role") not in ("user", "assistant", "system"):
            raise BadRequest(f"messages[{place}] must be an object with role user or assistant", param="messages")
        where, content = f"messages[{place}].content", message.get("content")
        if isinstance(content, str) or message["role"] == "system":
            found.append({"role": message["role"], "content": _texts(where, content)})
        elif message["role"] == "user":
            found += _user(where, content)
        else:
            found.append(_assistant(where, content))
    return found


def _user(where: str, content: Any) -> Iterator[Json]:
    texts = []
    for block in _blocks(where, content):
        if block.get("type") == "tool_result":
            given = block.get("content")
            result = _texts(f"{where}: a tool_result's content", "" if given is None else given)
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result}
        else:
            texts.append(_text(where, block))
    if texts:
        yield {"role": "user", "content": [{"type": "text", "text": text} for text in texts]}


def _assistant(where: str, content: Any) -> Json:
    texts, thoughts, calls = [], [], []
    for block in _blocks(where, content):
        kind = block.get("type")
        if kind == "tool_use":
            given = block.get("input")
            if not isinstance(given, Mapping | None):
                raise BadRequest(f"{where}: a tool_use's input must be an object", param="messages")
            function = {"name": block.get("name"), "arguments": given or {}}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif kind != "redacted_thinking":
            texts.append(_text(where, block))
    message: Json = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return message | ({"tool_calls": calls} if calls else {})


def _blocks(where: str, content: Any) -> list[Mapping[str, Any]]:
    if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
        raise BadRequest(f"{where} must be a text or a list of blocks", param="messages")
    return content


def _text(where: str, block: Mapping[str, Any]) -> str:
    if block.get("type") != "text" or not isinstance(block.get("text"), str):
        raise BadRequest(f"{where} has a block of type {block.get('type')!r:.50}, which is not read", param="messages")
    text: str = block["text"]
    return text


def _texts(where: str, content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(_text(where, block) for block in _blocks(where, content))


def _tools(given: Any) -> list[Json] | None:
    if given is None:
        return None
    if not isinstance(given, list) or not all(isinstance(tool, Mapping) for tool in given):
        raise BadRequest("tools must be a list of objects", param="tools")
    found = []
    for place, tool in enumerate(given):
        if tool.get("type", "custom") != "custom":
            raise BadRequest(f"tools[{place}] is of type {tool['type']!r:.50}, the server runs none", param="tools")
        function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
        if tool.get("description") is not None:
            function["description"] = tool["description"]
        found.append({"type": "function", "function": function})
    return found


def _tool_choice(given: dict[str, Any] | None) -> tuple[Any, bool | None]:
    """OpenAI's tool_choice and parallel_tool_calls."""
    if given is None:
        return None, None
    kind, parallel = given.get("type"), not given.get("disable_parallel_tool_use")
    if kind == "tool":
        return {"type": "function", "function": {"name": given.get("name")}}, parallel
    if not isinstance(kind, str) or kind not in _TOOL_CHOICES:
        raise BadRequest("tool_choice.type has to be auto, any, tool or none", param="tool_choice")
    return _TOOL_CHOICES[kind], parallel
