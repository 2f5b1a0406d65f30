"""Calls of tools in what a model writes, as it comes: the machines that read them. Knows no family's format.

A machine goes by characters, never by how text was cut into pieces, so a stream and a whole text give the same. A call
comes out once its name is certain, and its arguments as they come, where they are written as JSON; else once it is
complete. What only looked like a call comes out as text, nothing is lost.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Schemas = Mapping[str, Mapping[str, Any]]
"""Each tool's parameters, by its name."""


@dataclass(frozen=True, slots=True)
class Call:
    """`arguments`: an object's JSON text, or its beginning, where More follows."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class More:
    """More of the arguments of the call before."""

    text: str


Part = str | Call | More


class CallReader(ABC):
    """Splits a text into what is text and what is calls. Blanks between a text and a call belong to neither.

    begins: what a call begins with; skips: what stands around calls and says nothing; at_start: characters that begin a
    call as the first of a text.
    """

    begins: tuple[str, ...] = ()
    skips: tuple[str, ...] = ()
    at_start = ""

    def __init__(self, schemas: Schemas) -> None:
        self._schemas = schemas
        self._markers = (*self.begins, *self.skips)
        self._firsts = frozenset(marker[0] for marker in self._markers)
        self._held = ""  # the beginning of a marker
        self._blank = ""  # blanks that are text if text follows
        self._inside: str | None = None  # what came of a call, from its marker on, but for
        self._more: list[str] = []  # its last characters: a text is copied for each that is added to it
        self._nothing = True  # whether only blanks came so far
        self._called = False

    @classmethod
    def markers(cls) -> tuple[str, ...]:
        """All that stands around calls and has to be seen."""
        return (*cls.begins, *cls.skips)

    def push(self, text: str) -> list[Part]:
        """What became certain with `text`."""
        parts: list[Part] = []
        for character in text:
            self._take(character, parts)
        return joined(parts)

    def finish(self) -> list[Part]:
        """The rest: what was held back is text."""
        parts: list[Part] = []
        if self._inside is not None:
            inside, self._inside = self._inside, None
            self._tell(self._last(inside + "".join(self._more)), parts)
        if self._held or not self._called:
            parts.append(self._blank + self._held)
        self._held = self._blank = ""
        return joined(parts)

    @abstractmethod
    def _begin(self, marker: str) -> None:
        """A call begins, with a marker or without."""

    @abstractmethod
    def _within(self, character: str, parts: list[Part]) -> None:
        """Take a character of a call, into `_inside` or `_more`. `_inside` is None once the call is over."""

    def _last(self, inside: str) -> str:
        """What is text of a call that came to no end."""
        return inside

    def _take(self, character: str, parts: list[Part]) -> None:
        if self._inside is not None:
            self._within(character, parts)
            return
        if not self._held and character not in self._firsts:
            self._outside(character, parts)
            return
        self._held += character
        if self._held in self._markers:
            marker, self._held = self._held, ""
            if marker in self.begins:
                self._inside, self._more = marker, []
                self._begin(marker)
            else:
                self._blank = ""
        elif not any(marker.startswith(self._held) for marker in self._markers):
            # Its first character begins no marker; what comes behind it may.
            first, rest, self._held = self._held[0], self._held[1:], ""
            self._outside(first, parts)
            for one in rest:
                self._take(one, parts)

    def _outside(self, character: str, parts: list[Part]) -> None:
        if character.isspace():
            self._blank += character
        elif self._nothing and character in self.at_start:
            self._inside, self._more = "", []
            self._begin("")
            self._take(character, parts)
        else:
            self._tell(character, parts)

    def _tell(self, part: Part, parts: list[Part]) -> None:
        if isinstance(part, Call):
            self._called = True
        elif part:
            parts.append(self._blank)
        else:
            return
        parts.append(part)
        self._blank, self._nothing = "", False


class Brackets:
    """Finds the end of a value that begins with a bracket, as JSON and Python write them; quotes hide brackets."""

    def __init__(self, quotes: str = '"') -> None:
        self._quotes, self.depth, self._quote, self._escaped = quotes, 0, "", False

    def ends(self, character: str) -> bool:
        """Whether the value ends with this one."""
        if self._quote:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == self._quote:
                self._quote = ""
            return False
        if character in self._quotes:
            self._quote = character
        elif character in "{[(":
            self.depth += 1
        elif character in "}])":
            self.depth -= 1
            return self.depth <= 0
        return False


_BEGUN = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*"(?:arguments|parameters)"\s*:\s*\{')
_LONGEST_HEAD = 1024  # characters before a call's arguments, and of a name
_BETWEEN = " \t\r\n,;]"


class JsonCalls(CallReader):
    """{"name": ..., "arguments": {...}}, several in a list or after another, behind a marker or as the whole text."""

    ends: tuple[str, ...] = ()
    """What stands behind calls; without one, there are more as long as objects follow."""

    doubtful: tuple[str, ...] = ("",)
    """Markers, "" without one, behind which an object may be anything: only tools that there are can be called."""

    @classmethod
    def markers(cls) -> tuple[str, ...]:
        return (*cls.begins, *cls.ends)

    def _begin(self, marker: str) -> None:
        self._marker = marker
        self._object = False  # whether an object has begun: it is in `_more`
        self._follows = False  # whether there was a call behind the marker
        self._value = Brackets()
        self._arguments: Brackets | None = None  # of a call that has come out
        self._over = False  # whether they are complete

    def _within(self, character: str, parts: list[Part]) -> None:
        inside = self._inside or ""
        if not self._object and character in _BETWEEN and not self._gap(inside):
            self._more.append(character)
            return
        if not self._object:
            inside = self._inside = inside + "".join(self._more)
            self._more = []
        if not self._object and character != "{":
            self._inside = inside + character
            self._between(self._inside, parts)
            return
        if not self._object:
            self._object, self._value = True, Brackets()
            self._arguments, self._over = None, False
        ends = self._value.ends(character)
        if self._arguments is None:
            self._more.append(character)
            if character == "{" and (name := self._name()):
                self._arguments = Brackets()
                self._tell(Call(name, ""), parts)
        if self._arguments is not None and not self._over:
            self._over = self._arguments.ends(character)
            parts.append(More(character))
        if ends:
            self._end_object(inside, parts)

    def _end_object(self, inside: str, parts: list[Part]) -> None:
        written = "".join(self._more)
        if self._arguments is None:
            call = call_of(json_of(written), self._schemas, known=self._marker in self.doubtful)
            self._tell(call or inside + written, parts)
            self._inside = None if call is None else ""
        else:
            self._inside = ""
        self._object, self._more, self._follows, self._arguments = False, [], True, None

    def _name(self) -> str | None:
        """The name of the call whose arguments begin with the last character of the object, if that is certain."""
        if self._value.depth != 2 or len(self._more) > _LONGEST_HEAD:
            return None
        found = _BEGUN.fullmatch("".join(self._more))
        name = None if found is None else json_of(found[1])
        sure = self._marker not in self.doubtful or name in self._schemas
        return name if isinstance(name, str) and sure else None

    def _between(self, inside: str, parts: list[Part]) -> None:
        """Between a marker, or a call, and the next object."""
        gap = self._gap(inside)
        if any(marker.startswith(gap) for marker in (*self.begins, *self.ends)):
            if gap in self.begins:
                self._tell("" if self._follows else inside.removesuffix(gap), parts)
                self._inside = gap
                self._begin(gap)
            elif gap in self.ends:
                self._inside = None
                self._tell("" if self._follows else inside, parts)
            return
        if gap.strip("[ \t\r\n") and not self._may_name(gap):
            self._inside = None
            if self._follows:
                self._push_back(gap, parts)
            else:
                self._tell(inside, parts)

    def _push_back(self, text: str, parts: list[Part]) -> None:
        """What stands behind a call and is none; a marker may begin in it."""
        for character in text:
            self._take(character, parts)

    def _gap(self, inside: str) -> str:
        return (inside if self._follows else inside.removeprefix(self._marker)).lstrip(_BETWEEN)

    def _may_name(self, gap: str) -> bool:
        """Whether this may be a call's name, before its arguments."""
        return False

    def _last(self, inside: str) -> str:
        if self._arguments is not None:
            return ""
        if not self._follows:
            return inside
        gap = self._gap(inside)
        return "" if any(marker.startswith(gap) for marker in (*self.begins, *self.ends)) else gap


class Bare(JsonCalls):
    """A list of objects, or one, and nothing else: what a grammar holds a model to that has to call."""

    at_start = "[{"


class Regions(CallReader):
    """A marker, anything, and a marker that ends it."""

    end = ""

    @classmethod
    def markers(cls) -> tuple[str, ...]:
        return (*cls.begins, *cls.skips, cls.end)

    def _begin(self, marker: str) -> None:
        self._marker = marker

    def _within(self, character: str, parts: list[Part]) -> None:
        self._more.append(character)
        if character == self.end[-1] and "".join(self._more[-len(self.end) :]) == self.end:
            inside = (self._inside or "") + "".join(self._more)
            self._inside = None
            for part in self._calls(inside) or (inside,):
                self._tell(part, parts)

    def _calls(self, inside: str) -> list[Call]:
        """The calls between two markers; none where it is something else."""
        call = self._call(inside)
        return [] if call is None else [call]

    def _call(self, inside: str) -> Call | None:
        """The one that there is, in formats that have no more."""
        return None


def call_of(value: Any, schemas: Schemas, *, known: bool) -> Call | None:
    """A call written as an object; None for any other. known: only of a tool that there is."""
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str):
        return None
    if known and name not in schemas:
        return None
    arguments: Any = next((value[key] for key in ("arguments", "parameters") if value.get(key) is not None), {})
    if isinstance(arguments, str):
        arguments = json_of(arguments)
    return Call(name, arguments_of(arguments)) if isinstance(arguments, dict) else None


def calls_in(parts: Iterable[object]) -> list[Call]:
    """The calls among parts, each whole."""
    found: list[Call] = []
    for part in parts:
        if isinstance(part, Call):
            found.append(part)
        elif isinstance(part, More):
            found[-1] = Call(found[-1].name, found[-1].arguments + part.text)
    return found


def json_of(text: str) -> Any:
    """A value of JSON; None for what is no JSON."""
    try:
        return json.loads(text, strict=False, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return None


def _no_number(name: str) -> None:
    raise ValueError(name)


def arguments_of(value: Any) -> str:
    """An object as a call has it."""
    return json.dumps(value, ensure_ascii=False)


def joined(parts: Iterable[Part]) -> list[Part]:
    """Neighbouring texts as one, none empty, and neighbouring arguments."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, str) and isinstance(last, str):
            found[-1] = last + part
        elif isinstance(part, More) and isinstance(last, More):
            found[-1] = More(last.text + part.text)
        elif part:
            found.append(part)
    return found
