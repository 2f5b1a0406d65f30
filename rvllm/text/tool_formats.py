"""How families of models write calls of tools, by vLLM's names, and who reads what a model's own template writes."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from rvllm.text.tool_calls import (
    Brackets,
    Call,
    CallReader,
    JsonCalls,
    Part,
    Regions,
    Schemas,
    arguments_of,
    calls_in,
    json_of,
)


class Hermes(JsonCalls):
    begins, ends = ("<tool_call>",), ("</tool_call>",)


class Llama(JsonCalls):
    begins, at_start = ("<|python_tag|>",), "{"


class Mistral(JsonCalls):
    """A list of objects, or NAME{...}, or NAME[ARGS]{...}, behind each marker."""

    begins = ("[TOOL_CALLS]",)
    _NAME = re.compile(r"([\w.-]+)(\[CALL_ID\]\w+)?(\[ARGS\])?")
    _BEGINNING = re.compile(r"[\w.-]{1,256}(\[[A-Z_]{1,16}\]\w{0,256}){0,2}(\[[A-Z_]{0,16})?")

    def _may_name(self, gap: str) -> bool:
        return self._BEGINNING.fullmatch(gap) is not None

    def _name(self) -> str | None:
        named = self._NAME.fullmatch(self._gap(self._inside or "").strip())
        return super()._name() if named is None else named[1]


class Granite(JsonCalls):
    begins = ("<|tool_call|>", "<tool_call>")
    ends = ("</tool_call>",)


class Phi(JsonCalls):
    begins = ("functools",)


class Jamba(JsonCalls):
    begins, ends = ("<tool_calls>",), ("</tool_calls>",)


class Internlm(JsonCalls):
    begins, ends = ("<|action_start|><|plugin|>",), ("<|action_end|>",)


class Xlam(JsonCalls):
    """A list as the whole text or behind thoughts, or in one of three frames. What is thought stays text."""

    begins, ends, at_start = ("[TOOL_CALLS]", "<tool_call>", "```json"), ("</tool_call>", "```"), "[{"
    doubtful = ("", "```json")
    _THOUGHT = "</think>"

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._told = ""  # the end of what is text

    def _tell(self, part: Part, parts: list[Part]) -> None:
        super()._tell(part, parts)
        self._told = (self._told + part)[-len(self._THOUGHT) :] if isinstance(part, str) else ""
        self._nothing = self._nothing or self._told == self._THOUGHT


class QwenCoder(Regions):
    """<function=NAME><parameter=KEY>VALUE</parameter></function>; values are what the tool's parameters say."""

    begins, skips, end = ("<function=",), ("<tool_call>", "</tool_call>"), "</function>"

    def _call(self, inside: str) -> Call | None:
        head, _, body = inside.removeprefix("<function=").partition(">")
        name = head.strip().strip("\"'")
        if not name:
            return None
        pieces = (piece.partition("<parameter=")[2].partition(">") for piece in body.split("</parameter>")[:-1])
        return _typed_call(name, ((key, value) for key, _, value in pieces), self._schemas)


class SeedOss(QwenCoder):
    skips = ("<seed:tool_call>", "</seed:tool_call>")


class Minimax(Regions):
    """<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>"""

    begins, skips = ("<invoke name=",), ("<minimax:tool_call>", "</minimax:tool_call>")
    end = "</invoke>"

    def _call(self, inside: str) -> Call | None:
        head, _, body = inside.removeprefix("<invoke name=").partition(">")
        name = head.strip().strip("\"'")
        if not name:
            return None
        pieces = (piece.partition("<parameter name=")[2].partition(">") for piece in body.split("</parameter>")[:-1])
        return _typed_call(name, ((key.strip("\"'"), value) for key, _, value in pieces), self._schemas)


class Glm(Regions):
    """NAME, then <arg_key>KEY</arg_key><arg_value>VALUE</arg_value> for each, in <tool_call>."""

    begins, end = ("<tool_call>",), "</tool_call>"

    def _call(self, inside: str) -> Call | None:
        body = inside.removeprefix(self.begins[0]).removesuffix(self.end)
        name, _, rest = body.partition("<arg_key>")
        if not re.fullmatch(r"[\w.-]{1,256}", name.strip()):
            return None
        pieces = (piece.partition("</arg_key>") for piece in rest.split("<arg_key>") if rest)
        found = ((key, value.partition("<arg_value>")[2].partition("</arg_value>")[0]) for key, _, value in pieces)
        return _typed_call(name.strip(), found, self._schemas)


class Kimi(Regions):
    """functions.NAME:NUMBER and its arguments behind a separator."""

    begins, end = ("<|tool_call_begin|>",), "<|tool_call_end|>"
    skips = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")

    def _call(self, inside: str) -> Call | None:
        body = inside.removeprefix(self.begins[0]).removesuffix(self.end)
        first, _, text = body.partition("<|tool_call_argument_begin|>")
        name, arguments = first.strip().removeprefix("functions.").rpartition(":")[0], json_of(text)
        return Call(name, arguments_of(arguments)) if name and isinstance(arguments, dict) else None


class Deepseek(Regions):
    """NAME and its arguments behind a separator, fenced as code in V3 and bare in V3.1."""

    begins, end = ("<｜tool▁call▁begin｜>",), "<｜tool▁call▁end｜>"
    skips = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")

    def _call(self, inside: str) -> Call | None:
        body = inside.removeprefix(self.begins[0]).removesuffix(self.end)
        first, _, rest = body.partition("<｜tool▁sep｜>")
        fenced = re.fullmatch(r"\s*([^\n]+)\n```json\n(.*)\n```\s*", rest, re.DOTALL)
        name, text = (fenced[1], fenced[2]) if fenced else (first, rest)
        arguments = json_of(text)
        return Call(name.strip(), arguments_of(arguments)) if name.strip() and isinstance(arguments, dict) else None


class FunctionGemma(Regions):
    """call:NAME{KEY:VALUE, ...}: as JSON, but for bare keys, and <escape> around texts in place of quotes."""

    begins, end = ("<start_function_call>",), "<end_function_call>"
    _QUOTE = "<escape>"
    _CALL = re.compile(r"\s*call:([\w.-]{1,256})(\{.*\})\s*", re.DOTALL)
    _KEY = re.compile(r"([{,]|^)\s*([\w.-]+)\s*:")

    def _call(self, inside: str) -> Call | None:
        found = self._CALL.fullmatch(inside.removeprefix(self.begins[0]).removesuffix(self.end))
        if found is None:
            return None
        pieces = found[2].split(self._QUOTE)
        pieces[::2] = [self._KEY.sub(self._quoted, piece) for piece in pieces[::2]]
        pieces[1::2] = map(json.dumps, pieces[1::2])
        values = json_of("".join(pieces))
        if not isinstance(values, dict) or not len(pieces) % 2:
            return None
        types = self._schemas.get(found[1], {}).get("properties", {})
        typed = {key: _typed(one, types.get(key)) if isinstance(one, str) else one for key, one in values.items()}
        return Call(found[1], arguments_of(typed))

    @staticmethod
    def _quoted(key: re.Match[str]) -> str:
        return f'{key[1] or ","}"{key[2]}":'  # a comma behind a text may be missing


class Pythonic(CallReader):
    """[NAME(KEY=VALUE, ...), ...], the whole text."""

    at_start = "["

    def _begin(self, marker: str) -> None:
        self._marker, self._value = marker, Brackets("\"'")

    def _within(self, character: str, parts: list[Part]) -> None:
        self._more.append(character)
        if self._value.ends(character):
            inside = (self._inside or "") + "".join(self._more)
            self._inside = None
            for part in python_calls(inside.removeprefix(self._marker).strip()) or (inside,):
                self._tell(part, parts)


class Olmo(Regions):
    """Calls in Python's syntax, each in a line of its own."""

    begins, end = ("<function_calls>",), "</function_calls>"

    def _calls(self, inside: str) -> list[Call]:
        lines = inside.removeprefix(self.begins[0]).removesuffix(self.end).strip().split("\n")
        found = [python_calls(f"[{line}]") for line in lines if line.strip()]
        return [] if None in found else [call for calls in found for call in calls or ()]


class Llama4(Pythonic):
    begins, skips = ("<|python_start|>",), ("<|python_end|>",)


READERS: Mapping[str, type[CallReader]] = {
    "deepseek_v3": Deepseek,
    "deepseek_v31": Deepseek,
    "functiongemma": FunctionGemma,
    "glm45": Glm,
    "glm47": Glm,
    "granite": Granite,
    "granite4": Hermes,
    "hermes": Hermes,
    "internlm": Internlm,
    "jamba": Jamba,
    "kimi_k2": Kimi,
    "llama3_json": Llama,
    "llama4_json": Llama,
    "llama4_pythonic": Llama4,
    "minimax_m2": Minimax,
    "mistral": Mistral,
    "olmo3": Olmo,
    "phi4_mini_json": Phi,
    "pythonic": Pythonic,
    "qwen3_coder": QwenCoder,
    "qwen3_xml": QwenCoder,
    "seed_oss": SeedOss,
    "xlam": Xlam,
}
"""vLLM's names."""

_SAMPLE = Call("get_weather", '{"city": "Paris"}')
SAMPLE_TOOL = {
    "type": "function",
    "function": {
        "name": _SAMPLE.name,
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SAMPLE_CALL = {
    "id": "call00001",  # nine, as Mistral's templates want it
    "type": "function",
    "function": {"name": _SAMPLE.name, "arguments": json.loads(_SAMPLE.arguments)},
}


def reader_for(written: str) -> type[CallReader] | None:
    """Who reads `written`, in which a model's own template calls SAMPLE_TOOL, and leaves the least of it as text."""
    schemas: Schemas = {_SAMPLE.name: SAMPLE_TOOL["function"]["parameters"]}  # type: ignore[index]
    kinds = (QwenCoder, SeedOss, Hermes, Mistral, Deepseek, Kimi, Minimax, Glm)
    found: dict[type[CallReader], int] = {}
    for kind in (*kinds, Llama, Pythonic, Llama4, Granite, Jamba, Internlm, Phi, FunctionGemma, Olmo, Xlam):
        reader = kind(schemas)
        parts = reader.push(written) + reader.finish()
        calls = [(call.name, json_of(call.arguments)) for call in calls_in(parts)]
        if calls == [(_SAMPLE.name, json_of(_SAMPLE.arguments))]:
            found[kind] = sum(len(part) for part in parts if isinstance(part, str))
    return min(found, key=found.__getitem__, default=None)


def python_calls(text: str) -> list[Call] | None:
    """The calls of a list in Python's syntax, whose arguments are named and plain values; None for anything else."""
    try:
        tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            return None
        return [_python_call(node) for node in tree.elts]
    except (SyntaxError, ValueError, RecursionError, MemoryError, TypeError):
        return None


def _python_call(node: ast.expr) -> Call:
    """Raises ValueError for what is no call."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call")
    given = {}
    for argument in node.keywords:
        if argument.arg is None:
            raise ValueError("no name")
        given[argument.arg] = ast.literal_eval(_Constants().visit(argument.value))
    return Call(ast.unparse(node.func), arguments_of(given))


class _Constants(ast.NodeTransformer):
    """JSON's words for Python's."""

    _WORDS: Mapping[str, Any] = {"true": True, "false": False, "null": None}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self._WORDS[node.id]) if node.id in self._WORDS else node


def _typed_call(name: str, given: Iterable[tuple[str, str]], schemas: Schemas) -> Call:
    """A call whose values are written without their types: they are what the tool's parameters say."""
    types = schemas.get(name, {}).get("properties", {})
    values = {
        key.strip(): _typed(value.removeprefix("\n").removesuffix("\n"), types.get(key.strip()))
        for key, value in given
        if key.strip()
    }
    return Call(name, arguments_of(values))


def _typed(text: str, schema: Any) -> Any:
    """A value written without its type."""
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if kinds == ["string"]:
        return text
    value = json_of(text)
    if value is None and text.strip() != "null":
        return text
    return text if isinstance(value, str) or ("string" in kinds and value is not None) else value
