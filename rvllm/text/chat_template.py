"""Chat templates: messages to the prompt text that a model was trained on. Knows Jinja and messages; no token ids.

What a template sees is what Hugging Face's `apply_chat_template` shows it (transformers, chat_template_utils).
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from jinja2 import Template, TemplateError, Undefined, nodes

from rvllm.errors import BadRequest, TokenizerError
from rvllm.text.messages import (
    Message,
    append_to_content,
    check_tools,
    join_parts,
    normalise,
    split_texts,
    strings_in,
    unused_character,
)
from rvllm.text.sandbox import Budget, Sandbox, compile_template

_RENDER_CPU_S = 1.0
# About bytes handled. Real templates spend far less: a few units a character and some hundred a message.
_RENDER_UNITS = 16 << 20
_RENDER_UNITS_PER_MESSAGE = 4096
_RENDER_UNITS_PER_CHARACTER = 16
_LONGEST_SOURCE = 1 << 20
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now")
_TYPE_TESTS = {"string", "iterable", "sequence", "mapping"}


class ChatTemplate:
    """A compiled template. `origin` says where it is from; `tokens` are bos_token and the like, as text.

    `loops_over_content`: it takes lists of parts; otherwise parts reach it joined by newlines.
    Raises TokenizerError, naming `origin`, for a template that does not parse.
    """

    def __init__(
        self,
        source: str,
        *,
        origin: str = "the chat template",
        tokens: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        if len(source) > _LONGEST_SOURCE:
            raise TokenizerError(f"{origin} has {len(source):,} characters, the limit is {_LONGEST_SOURCE:,}")
        try:
            tree, self._code = compile_template(source)
        except (TemplateError, SyntaxError, RecursionError, MemoryError) as cause:
            line = getattr(cause, "lineno", None)
            place = f"{origin}, line {line}" if line else origin
            raise TokenizerError(
                f"{place}: the chat template does not parse: {cause}",
                hint="repair it, or give another one with --chat-template",
            ) from None
        self.source = source
        self.origin = origin
        self._tokens = dict(tokens)
        self.loops_over_content = _loops_over_content(tree)
        self._tests_content_type = any(test.name in _TYPE_TESTS for test in tree.find_all(nodes.Test))

    def render(
        self,
        messages: object,
        *,
        tools: object = None,
        documents: object = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        content_format: str = "auto",
        kwargs: Mapping[str, object] = MappingProxyType({}),
    ) -> str:
        """The prompt for `messages`, a list in OpenAI's format; `kwargs` are further names for the template.

        content_format: the template sees contents as a "string", as lists of parts ("openai"), or as it seems to want.
        continue_final_message: the prompt ends with the last message's text as it was sent, blanks at its end
        included even where the template trims, and nothing after it.
        A role `developer` that the template never names is shown to it as `system`.
        Raises BadRequest, param "messages", for messages in a wrong shape, and where the template refuses them,
        fails, or does more than a bounded amount of work.
        """
        if add_generation_prompt and continue_final_message:
            raise BadRequest(
                "add_generation_prompt and continue_final_message are both true",
                param="continue_final_message",
                hint="set add_generation_prompt to false to continue the last message",
            )
        if clash := sorted(set(kwargs).intersection(_RESERVED)):
            raise BadRequest(f"chat_template_kwargs must not set {clash[0]}", param="chat_template_kwargs")
        shaped = self._shape(normalise(messages), content_format)
        names = self._tokens | dict(kwargs)
        names["tools"] = _given("tools", check_tools(tools))
        names["documents"] = _given("documents", documents)
        if not continue_final_message:
            return self._run(shaped, names | {"add_generation_prompt": add_generation_prompt})
        end = unused_character(shaped, self.source)
        shaped[-1] = append_to_content(shaped[-1], end)
        text = self._run(shaped, names | {"add_generation_prompt": False})
        if end not in text:
            raise BadRequest(
                "continue_final_message: the chat template leaves the last message's text out",
                param="continue_final_message",
            )
        return text[: text.rindex(end)].replace(end, "")

    def _shape(self, messages: Sequence[Message], content_format: str) -> list[Message]:
        if "developer" not in self.source:
            messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
        if content_format == "openai":
            return split_texts(messages)
        if content_format == "string" or not self.loops_over_content:
            return join_parts(messages)
        return list(messages) if self._tests_content_type else split_texts(messages)

    def _run(self, messages: Sequence[Message], names: dict[str, object]) -> str:
        characters = sum(len(text) for text in strings_in([messages, names.get("tools"), names.get("documents")]))
        units = _RENDER_UNITS + _RENDER_UNITS_PER_MESSAGE * len(messages) + _RENDER_UNITS_PER_CHARACTER * characters
        sandbox = Sandbox(Budget(units, _RENDER_CPU_S))
        sandbox.tests["none"] = _is_none
        sandbox.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        try:
            template = Template.from_code(sandbox, self._code, sandbox.make_globals(None))
            return template.render(names | {"messages": messages})
        except BadRequest:
            raise
        except RecursionError:
            raise BadRequest("the chat template was stopped: it calls itself too often", param="messages") from None
        except Exception as cause:  # whatever a stranger's template may run into
            reason = str(cause) if isinstance(cause, TemplateError) else f"{type(cause).__name__}: {cause}"
            raise BadRequest(f"the chat template failed on these messages: {reason}", param="messages") from None


class _NotGiven(Undefined):
    """What `tools` is when there are none: not defined, and yet none, for templates ask either way."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, Undefined)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(None)


def _given(name: str, value: object) -> object:
    return _NotGiven(name=name) if value is None else value


def _is_none(value: object) -> bool:
    return value is None or isinstance(value, _NotGiven)


def _raise_exception(message: object) -> None:
    raise BadRequest(str(message), param="messages")


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)


def _loops_over_content(tree: nodes.Template) -> bool:
    """Whether some loop runs over a message's content, also through a variable or a macro's parameter."""
    names = {"content"} if any(_has_parameter(macro, "content") for macro in tree.find_all(nodes.Macro)) else set()
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, names):
            names.add(assign.target.name)
    return any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def _has_parameter(macro: nodes.Macro, name: str) -> bool:
    return any(argument.name == name for argument in macro.args)


def _is_content(node: nodes.Node | None, names: set[str]) -> bool:
    while isinstance(node, nodes.Filter):
        node = node.node
    if isinstance(node, nodes.CondExpr):
        return _is_content(node.expr1, names) or _is_content(node.expr2, names)
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name in names
