"""Which tools a request has, which of them must be called, and the form that this gives the text. Knows no reply.

Where a call is up to the model, it is written and read as the model's family does. A call that has to be is held to a
grammar: a list of objects with `name` and `arguments`, or, of one tool that is named, its arguments alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rvllm.errors import BadRequest
from rvllm.sampling.structured import StructuredOutputsParams
from rvllm.text.answer import AnswerReader, Families, NamedCall
from rvllm.text.reasoning import ThoughtReader
from rvllm.text.tool_calls import Bare, CallReader

MOST_TOOLS = 512
_ANY = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request, and `choice`: "none", "auto", "required", or the name of the one to call."""

    given: Sequence[Mapping[str, Any]] = ()
    choice: str = "none"
    named: bool = False
    parallel: bool = True

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """Each tool's parameters."""
        functions = (tool["function"] for tool in self.given)
        return {function["name"]: function.get("parameters") or _ANY for function in functions}

    @property
    def form(self) -> StructuredOutputsParams | None:
        """What the text must be where a call has to be; None where anything may come."""
        if self.named:
            return StructuredOutputsParams(json=dict(self.schemas[self.choice]))  # type: ignore[arg-type]
        if self.choice != "required":
            return None
        more = ' (", " call)*' if self.parallel else ""
        names = list(self.schemas)
        rules = [f'start: "[" call{more} "]"', "call: " + " | ".join(f"call_{place}" for place in range(len(names)))]
        for place, (name, schema) in enumerate(self.schemas.items()):
            head = json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ')
            rules += [f'call_{place}: {head} arguments_{place} "}}"', f"arguments_{place}: %json {json.dumps(schema)}"]
        return StructuredOutputsParams(grammar="\n".join(rules) + "\n")

    def reader(self, families: Families) -> CallReader | NamedCall | None:
        """Who reads the calls of one completion."""
        if self.named:
            return NamedCall(self.choice)
        if self.choice == "required":
            return Bare(self.schemas)
        return families.calls(self.schemas) if self.choice == "auto" and families.calls is not None else None


def tools_of(given: Any, choice: Any, parallel: bool | None, families: Families) -> Tools:
    """From OpenAI's `tools`, `tool_choice` and `parallel_tool_calls`. Raises BadRequest."""
    if given is None or given == []:
        if choice not in (None, "none", "auto"):
            raise BadRequest("tool_choice asks for a call, but there are no tools", param="tool_choice")
        return Tools()
    if not isinstance(given, list) or len(given) > MOST_TOOLS:
        raise BadRequest(f"tools has to be a list of at most {MOST_TOOLS}", param="tools")
    tools = [_tool(place, tool) for place, tool in enumerate(given)]
    named = None
    if isinstance(choice, Mapping):
        function = choice.get("function")
        named = function.get("name") if isinstance(function, Mapping) else choice.get("name")
        if choice.get("type", "function") != "function" or not isinstance(named, str):
            raise BadRequest(
                'tool_choice has to be {"type": "function", "function": {"name": ...}}', param="tool_choice"
            )
        if named not in {tool["function"]["name"] for tool in tools}:
            raise BadRequest(f"tool_choice names {named[:100]!r}, which is none of the tools", param="tool_choice")
    elif choice not in (None, "none", "auto", "required"):
        raise BadRequest(
            f"tool_choice is {choice!r:.100}, it has to be none, auto, required or a function", param="tool_choice"
        )
    found = Tools(tools, named or choice or "auto", named is not None, parallel is not False)
    if found.choice == "auto" and not found.named and families.calls is None:
        raise BadRequest(
            "it is not known how this model writes calls of tools: its chat template writes none that can be read",
            param="tools",
            hint='start with --tool-call-parser, or send tool_choice "required"',
        )
    return found


def reader_for(families: Families, tools: Tools, prompt_end: str) -> AnswerReader:
    """Who reads one completion of a prompt."""
    thinking = families.thinking
    thoughts = None if thinking is None else ThoughtReader(thinking, thinking.open_after(prompt_end))
    return AnswerReader(thoughts, tools.reader(families), None if tools.parallel else 1)


def _tool(place: int, tool: Any) -> Mapping[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
        raise BadRequest(f'tools[{place}] has to be {{"type": "function", "function": {{...}}}}', param="tools")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not name:
        raise BadRequest(f"tools[{place}].function.name has to be a text that is not empty", param="tools")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise BadRequest(f"tools[{place}].function.parameters has to be an object", param="tools")
    return dict(tool)
