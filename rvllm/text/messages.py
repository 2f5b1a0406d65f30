"""The messages of a chat, checked and brought into one shape. Knows OpenAI's wire format; not any model's template."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence

from rvllm.errors import BadRequest

Message = dict[str, object]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def normalise(messages: object) -> list[Message]:
    """Copies of `messages` that any template can take; normalising twice changes nothing more.

    Afterwards `content` is a text or a list of {"type": "text", "text": ...}; `tool_calls` is absent or not empty,
    and its functions' arguments are objects, no longer JSON text; other keys are as they were.
    Raises BadRequest, param "messages".
    """
    if not isinstance(messages, list | tuple):
        raise _wrong(f"messages must be a list, it is {_kind(messages)}")
    if not messages:
        raise _wrong("messages is empty", hint="give at least one message")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def check_tools(tools: object) -> list[Mapping[str, object]] | None:
    """`tools` as a list of objects, None when there are none. Raises BadRequest, param "tools"."""
    if tools is None:
        return None
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise BadRequest(f"tools must be a list of objects, it is {_kind(tools)}", param="tools")
    return list(tools) or None


def join_parts(messages: Sequence[Message]) -> list[Message]:
    """Every list of text parts as one text, parts on lines of their own: for templates that print `content`."""
    return [
        message | {"content": "\n".join(_part_texts(message["content"]))}
        if isinstance(message["content"], list)
        else message
        for message in messages
    ]


def split_texts(messages: Sequence[Message]) -> list[Message]:
    """Every text as a list of one part: for templates that loop over `content` whatever it is."""
    return [
        message | {"content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message["content"], str)
        else message
        for message in messages
    ]


def append_to_content(message: Message, tail: str) -> Message:
    """`message` with `tail` after its text, or after the text of its last part."""
    content = message["content"]
    if isinstance(content, str):
        return message | {"content": content + tail}
    texts = _part_texts(content) or [""]
    texts[-1] += tail
    return message | {"content": [{"type": "text", "text": text} for text in texts]}


def map_strings(value: object, change: Callable[[str], str]) -> object:
    """JSON-like `value` with `change` applied to every text in it, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {map_strings(key, change): map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_strings(item, change) for item in value]
    return value


def strings_in(value: object) -> Iterator[str]:
    """Every text in JSON-like `value`, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from strings_in(key)
            yield from strings_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings_in(item)


def unused_character(*values: object) -> str:
    """A character that no text in `values` has, neither itself nor escaped as JSON does. Raises BadRequest: none left.

    It is one that passes through templates as it is: a rare ideograph (CJK extension B), printable, without case,
    without another normal form.
    """
    texts = list(strings_in(values))
    used = set().union(*texts)
    for code in range(0x20000, 0x20100):
        if chr(code) not in used and not any(json_escape(chr(code)) in text for text in texts):
            return chr(code)
    raise BadRequest("the text has all of the rare characters U+20000 to U+200FF in it", param="messages")


def json_escape(character: str) -> str:
    """`character` as JSON that is limited to ASCII writes it."""
    return json.dumps(character)[1:-1]


def _message(place: str, message: object) -> Message:
    if not isinstance(message, Mapping):
        raise _wrong(f"{place} must be an object, it is {_kind(message)}")
    role = message.get("role")
    if role not in ROLES:
        raise _wrong(f"{place}.role must be one of {', '.join(ROLES)}, it is {_shown(role)}")
    found = dict(message)
    calls = found.pop("tool_calls", None)
    if calls is not None and not isinstance(calls, list | tuple):
        raise _wrong(f"{place}.tool_calls must be a list, it is {_kind(calls)}")
    if calls:
        found["tool_calls"] = [_tool_call(f"{place}.tool_calls[{n}]", call) for n, call in enumerate(calls)]
    may_be_empty = role == "assistant" and bool(calls or found.get("function_call"))
    found["content"] = _content(f"{place}.content", found.get("content"), may_be_empty)
    return found


def _content(place: str, content: object, may_be_empty: bool) -> str | list[Message]:
    if isinstance(content, str):
        return content
    if content is None:
        if may_be_empty:
            return ""
        raise _wrong(f"{place} is missing", hint="only an assistant's message with tool_calls needs none")
    if not isinstance(content, list | tuple):
        raise _wrong(f"{place} must be a text or a list of parts, it is {_kind(content)}")
    return [_part(f"{place}[{index}]", part) for index, part in enumerate(content)]


def _part(place: str, part: object) -> Message:
    if not isinstance(part, Mapping):
        raise _wrong(f"{place} must be an object, it is {_kind(part)}")
    kind = part.get("type")
    key = "refusal" if kind == "refusal" else "text"
    if isinstance(kind, str) and "image" in kind:
        raise _wrong(f"{place} is of type {_shown(kind)}: images are not supported", hint="this model reads text only")
    if kind not in ("text", "input_text", "output_text", "refusal"):
        raise _wrong(f"{place}.type is {_shown(kind)}, only text parts are supported")
    text = part.get(key)
    if not isinstance(text, str):
        raise _wrong(f"{place}.{key} must be a text, it is {_kind(text)}")
    return {"type": "text", "text": text}


def _tool_call(place: str, call: object) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise _wrong(f'{place} must be an object with a "function" in it')
    if not isinstance(function.get("name"), str):
        raise _wrong(f"{place}.function.name must be a text, it is {_kind(function.get('name'))}")
    arguments = _arguments(f"{place}.function.arguments", function.get("arguments"))
    return dict(call) | {"function": dict(function) | {"arguments": arguments}}


def _arguments(place: str, arguments: object) -> Mapping[str, object]:
    """Templates iterate over arguments, while the wire format has them as JSON text; absent or "" means none."""
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as cause:
            raise _wrong(f"{place} is not valid JSON: {cause}") from None
    if isinstance(arguments, str) or arguments is None:
        return {}
    if not isinstance(arguments, Mapping):
        raise _wrong(f"{place} must hold a JSON object, it holds {_kind(arguments)}")
    return arguments


def _part_texts(content: object) -> list[str]:
    assert isinstance(content, list), content
    return [str(part["text"]) for part in content]


_KINDS: dict[type, str] = {
    str: "a text", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object",
    type(None): "null",
}  # fmt: skip


def _kind(value: object) -> str:
    return _KINDS.get(type(value), f"a {type(value).__name__}")


def _shown(value: object) -> str:
    return repr(value)[:60] if isinstance(value, str) else _kind(value)


def _wrong(message: str, *, hint: str | None = None) -> BadRequest:
    return BadRequest(message, param="messages", hint=hint)
