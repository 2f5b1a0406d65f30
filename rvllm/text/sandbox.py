"""Jinja for templates that nobody vouches for: no way out to Python, and a budget for work, size and time.

Jinja's own sandbox keeps attributes from leading out. Added here: every loop turn, call, filter, sum, repetition,
slice and written text spends from one budget per rendering, before the work where its result could be far larger
than what goes in. Not bounded beyond the clock between two of those: what one comparison of nested lists costs.
Knows Jinja; not what a chat is.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Collection, Mapping
from types import CodeType
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from rvllm.errors import BadRequest

# Budget units are about bytes: a character of text is one, an item of a list and a step are so many.
_ITEM = 16
_STEP = 64
_CALL = 256
_STEPS_PER_CLOCK = 64

# A longer count (a width, an indentation) only serves to make text that nobody sent.
_WIDEST = 10_000
_DEEPEST_INDENT = 16
_POWER_BITS = 512

# Their work is not bounded by what goes in and comes out, and no chat template has been seen to need them.
_REFUSED_FILTERS = ("pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr")
_REFUSED_METHODS = ("encode", "expandtabs", "format_map", "maketrans", "striptags", "translate", "unescape")
# Filters that look at one end of a list and not at all of it.
_CHEAP_FILTERS = ("count", "d", "default", "first", "last", "length")

_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(\*|\d{5})|\{[^{}]*:[^{}]*(\{|\d{5})")


class Budget:
    """What one rendering may still spend: `units`, about bytes handled, and `cpu_s` of this thread's time."""

    def __init__(self, units: int, cpu_s: float) -> None:
        self._units = units
        self._deadline_s = time.thread_time() + cpu_s
        self._steps = 0

    def spend(self, units: int) -> None:
        """Raises BadRequest, param "messages", when nothing is left."""
        self._units -= max(units, 0)  # some counts are the template's own
        self._steps += 1
        if self._units < 0 or (self._steps % _STEPS_PER_CLOCK == 0 and time.thread_time() > self._deadline_s):
            raise refused("it loops too often or builds too much text")

    def spend_on_all_of(self, value: object) -> None:
        """Spend what writing out `value` takes, however deep it is."""
        pending = [value]
        while pending:
            item = pending.pop()
            self.spend(_size(item))
            if isinstance(item, str | bytes | int | float | range) or item is None:
                continue
            self.spend(_STEP)
            if isinstance(item, Mapping):
                pending.extend(item.items())
            elif isinstance(item, Collection):
                pending.extend(item)
            elif isinstance(item, Namespace):
                raise refused("it writes out a namespace")


def refused(reason: str) -> BadRequest:
    return BadRequest(f"the chat template was stopped: {reason}", param="messages")


def compile_template(source: str) -> tuple[nodes.Template, CodeType]:
    """The syntax tree and the code of `source`. Raises jinja2.TemplateSyntaxError, or RecursionError for depth."""
    sandbox = Sandbox(Budget(1 << 20, 1.0))
    metered = _Meter().visit(sandbox.parse(source))
    metered.set_environment(sandbox)
    code = sandbox.compile(metered)
    assert isinstance(code, CodeType)
    return sandbox.parse(source), code


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment for one rendering of code from `compile_template`; `budget` is that rendering's."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, budget: Budget) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            # Folding constants would run a template's operators while it is being compiled.
            optimized=False,
            finalize=self._write,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        self.budget = budget
        del self.globals["lipsum"]
        self.globals["range"] = self._range
        self.filters["tojson"] = _to_json
        allowed = {name: each for name, each in self.filters.items() if name not in _REFUSED_FILTERS}
        self.filters = {name: self._limited(name, each) for name, each in allowed.items()}
        self.filters |= {" step": _step, " text": _text, " whole": _whole, " sized": _sized}

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, int | float | bytes) or (isinstance(obj, str) and attr in _REFUSED_METHODS):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        # Named as in Jinja, so that a template's keyword `self` or `context` stays possible.
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            args = __self._foresee_method(owner, getattr(__obj, "__name__", ""), args, kwargs)
        elif not isinstance(__obj, Macro):
            __self.budget.spend(sum(_size(arg) for arg in args))
        __self.budget.spend(_CALL)
        result = super().call(__context, __obj, *args, **kwargs)
        __self.budget.spend(_size(result))
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.budget.spend(_STEP)
        if operator == "+":
            self.budget.spend(_size(left) + _size(right))
        elif operator == "*":
            self._foresee_product(left, right)
        elif operator == "**":
            self._foresee_power(left, right)
        elif isinstance(left, str):
            self._foresee_format(left, right)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None

        def limited(*args: Any, **kwargs: Any) -> str:
            self._foresee_format(value.__self__, [args, kwargs])
            return formatted(*args, **kwargs)

        return limited

    def _limited(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, a filter, spending for what goes in and what comes out."""
        hidden = 1 if getattr(function, "jinja_pass_arg", None) is not None else 0

        @functools.wraps(function)
        def limited(*args: Any, **kwargs: Any) -> Any:
            self.budget.spend(_STEP)
            if name not in _CHEAP_FILTERS:
                self.budget.spend(sum(_size(arg) for arg in args[hidden:]))
                args = args[:hidden] + self._foresee_filter(name, args[hidden:], kwargs)
            result = function(*args, **kwargs)
            if name not in _CHEAP_FILTERS:
                self.budget.spend(_size(result))
            return result

        return limited

    def _foresee_method(
        self, owner: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """Spend on `owner.name(*args)` beforehand. Returns the arguments, iterators made lists."""
        self.budget.spend(_size(owner) + sum(_size(arg) for arg in args))
        if name == "join" and args:
            items, _ = self._foresee_filter("join", (args[0], owner), kwargs)
            return (items,)
        return self._foresee_filter(name, (owner, *args), kwargs)[1:]

    def _foresee_filter(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Spend on `args[0] | name(*args[1:])` beforehand. Returns the arguments, iterators made lists."""
        subject, rest = (args[0], args[1:]) if args else ("", ())
        options = [*rest, *kwargs.values()]
        if isinstance(subject, str) and any(isinstance(o, int) and abs(o) > _WIDEST for o in options):
            raise refused(f"it calls {name} with a number above {_WIDEST:,}")
        if name == "join":
            subject = subject if isinstance(subject, str) else list(subject)
            self.budget.spend(len(subject) * _longest(options))
            self.budget.spend_on_all_of(subject)
        elif name == "replace":
            old = kwargs.get("old", rest[0] if rest else "")
            self.budget.spend(str(subject).count(str(old)) * _longest(options))
        elif name == "indent":
            width = kwargs.get("width", rest[0] if rest else 4)
            self.budget.spend(str(subject).count("\n") * (width if isinstance(width, int) else len(str(width))))
        elif name == "format":
            self._foresee_format(str(subject), options)
        elif name == "tojson":
            indent = kwargs.get("indent")
            if isinstance(indent, int) and indent > _DEEPEST_INDENT:
                raise refused(f"tojson's indent is above {_DEEPEST_INDENT}")
            self.budget.spend_on_all_of(subject)
        elif name == "sum" and any(isinstance(option, Collection) for option in [*rest[1:], kwargs.get("start")]):
            raise refused("it sums lists")
        elif name in ("string", "escape", "e", "forceescape"):
            self.budget.spend_on_all_of(subject)
        return (subject, *rest) if args else ()

    def _foresee_product(self, left: Any, right: Any) -> None:
        if isinstance(left, int) and isinstance(right, int):
            if left.bit_length() + right.bit_length() > _POWER_BITS:
                raise refused(f"it multiplies to a number of more than {_POWER_BITS} bits")
            return
        for many, times in ((left, right), (right, left)):
            if isinstance(times, int):
                self.budget.spend(_size(many) * max(times, 0))

    def _foresee_power(self, base: Any, exponent: Any) -> None:
        whole = isinstance(base, int) and isinstance(exponent, int)
        if whole and base.bit_length() * abs(exponent) > _POWER_BITS:
            raise refused(f"it raises to a number of more than {_POWER_BITS} bits")

    def _foresee_format(self, text: str, values: object) -> None:
        if _WIDE_FORMAT.search(text):
            raise refused("it formats text with a width that is computed or above 9,999")
        # One value may be shown at every placeholder.
        for _ in range(text.count("%") + text.count("{") + 1):
            self.budget.spend_on_all_of(values)

    def _range(self, *bounds: int) -> range:
        found = range(*bounds)
        # len(range) overflows beyond 63 bits.
        if abs(found.stop - found.start) // abs(found.step) > 100_000:
            raise refused("it asks for a range of more than 100,000 numbers")
        return found

    def _write(self, value: object) -> str:
        """What becomes of an expression's value where a template writes it."""
        self.budget.spend_on_all_of(value)
        return str(value)


class _Meter(NodeTransformer):
    """Puts spending into a syntax tree where Jinja has no hook. The filters' names are none of a template's."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_filter(" step", nodes.Const(None), node), lineno=node.lineno))
        if node.test is not None:
            node.test = nodes.And(_filter(" step", nodes.Const(None), node), node.test, lineno=node.lineno)
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Output:  # noqa: N802
        self.generic_visit(node)
        literal = sum(len(child.data) for child in node.nodes if isinstance(child, nodes.TemplateData))
        if literal:
            node.nodes.append(_filter(" text", nodes.Const(literal), node))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Concat:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [_filter(" whole", child, node) for child in node.nodes]
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _filter(" sized", node, node) if isinstance(node.arg, nodes.Slice) else node


def _filter(name: str, value: nodes.Expr, near: nodes.Node) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=near.lineno)


def _budget_of(context: Context) -> Budget:
    assert isinstance(context.environment, Sandbox)
    return context.environment.budget


@pass_context
def _step(context: Context, _: object) -> bool:
    _budget_of(context).spend(_STEP)
    return True


@pass_context
def _text(context: Context, length: int) -> str:
    _budget_of(context).spend(length)
    return ""


@pass_context
def _whole(context: Context, value: object) -> object:
    _budget_of(context).spend_on_all_of(value)
    return value


@pass_context
def _sized(context: Context, value: object) -> object:
    _budget_of(context).spend(_size(value))
    return value


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks what training learns from; here it only groups."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As Hugging Face defines it for chat templates: plain JSON, without Jinja's escapes for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_null_or_refuse,
    )


def _null_or_refuse(value: object) -> None:
    """Names that were not given and yet equal none, as Hugging Face's are, are null."""
    if value != None:  # noqa: E711  (equal, not identical)
        raise TypeError(f"{type(value).__name__} is not JSON")


def _size(value: object) -> int:
    """Budget units that copying `value`, but not what is in it, takes."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, int | float) or value is None:
        return _ITEM
    return _ITEM * (1 + len(value)) if isinstance(value, Collection) else _ITEM


def _longest(values: list[Any]) -> int:
    return max((len(value) for value in values if isinstance(value, str)), default=0)
