"""The part of YAML that files of options are written in. Knows no option.

A reader of our own, since the files need a hundredth of YAML, and PyYAML would be a seventh dependency in the one file.
It reads one mapping of scalars, lists and mappings, in blocks or in brackets on one line, and comments; scalars are
what PyYAML (YAML 1.1) makes of them. Whatever else YAML has is refused with its line, and so are scalars that look like
text and are numbers there, such as 0123, 1_000 or 12:30: nothing is read otherwise than a YAML library would read it.
"""

from __future__ import annotations

import json
import re
from typing import Any

_COMMENT = re.compile(r"\s+(?:#.*)?")
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_FLOAT = re.compile(r"(?:[-+]?[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+][0-9]+)?")
_TREACHEROUS = re.compile(
    r"[-+]?(?:0[0-9xXob_].*|[0-9][0-9_.]*_[0-9_.eE+-]*|[0-9][0-9_]*(?::[0-9.]+)+|\.(?:[0-9]|inf|Inf|INF|nan|NaN|NAN).*)"
    r"|[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}.*|=|<<"
)
_CONSTANTS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **{form: True for word in ("true", "yes", "on") for form in (word, word.title(), word.upper())},
    **{form: False for word in ("false", "no", "off") for form in (word, word.title(), word.upper())},
}
_NO_PLAIN = (*",[]{}#&*!|>'\"%@`", "---", "...")
"""What a scalar without quotes cannot begin with."""

_ESCAPES = re.compile(r'\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4})')


def read(text: str) -> dict[str, Any]:
    """The mapping in `text`: str, int, float, bool, None, lists and dicts of them. Raises ValueError with the line."""
    lines: list[_Line] = []
    for number, line in enumerate(text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n"), 1):
        if not line.isprintable():
            odd = next(character for character in line if not character.isprintable())
            raise ValueError(
                f"line {number}: the character {odd!r} is not read here, write spaces, or it in quotes as \\u"
            )
        bare = line.lstrip(" ")
        if bare.strip() and not bare.startswith("#") and not (line.rstrip() == "---" and not lines):
            lines.append(_Line(number, len(line) - len(bare), bare.rstrip()))
    reader = _Blocks(lines)
    value = reader.mapping(0) if lines else {}
    if reader.place < len(lines):
        raise reader.wrong("this does not belong to the mapping before it: is its indentation right?")
    return value


class _Line:
    """One line that is not empty: its number, how far it is indented, and the rest."""

    def __init__(self, number: int, indent: int, text: str) -> None:
        self.number, self.indent, self.text = number, indent, text


class _Blocks:
    """Reads lines from `place` on; `place` is behind what was read."""

    def __init__(self, lines: list[_Line]) -> None:
        self._lines = lines
        self.place = 0

    def wrong(self, what: str) -> ValueError:
        return ValueError(f"line {self._lines[self.place].number}: {what}")

    def _next(self) -> _Line | None:
        return self._lines[self.place] if self.place < len(self._lines) else None

    def mapping(self, indent: int) -> dict[str, Any]:
        """The keys that are indented by `indent`, with their values."""
        found: dict[str, Any] = {}
        while (line := self._next()) and line.indent == indent and not _is_item(line.text):
            try:
                reader = _Scalars(line.text)
                key = reader.key()
                if key in found:
                    raise ValueError(f"{key!r} is there twice")
                rest = reader.rest()
                value = None if rest is None else _whole(rest)
            except ValueError as cause:
                raise self.wrong(str(cause)) from None
            self.place += 1
            found[key] = self._below(indent) if rest is None else value
        return found

    def _below(self, indent: int) -> Any:
        """What stands under a key without a value on its line: a list, a mapping, or nothing."""
        line = self._next()
        if line and line.indent >= indent and _is_item(line.text):
            return self._items(line.indent)
        return self.mapping(line.indent) if line and line.indent > indent else None

    def _items(self, indent: int) -> list[Any]:
        found = []
        while (line := self._next()) and line.indent == indent and _is_item(line.text):
            try:
                found.append(_whole(line.text[1:].strip()))
            except ValueError as cause:
                raise self.wrong(str(cause)) from None
            self.place += 1
        return found


def _is_item(text: str) -> bool:
    return text == "-" or text.startswith("- ")


def _whole(text: str) -> Any:
    """The value that takes all of the text, but for a comment."""
    reader = _Scalars(text)
    value = reader.value(flow=False)
    left = reader.left()
    if left and not _COMMENT.fullmatch(left):
        raise ValueError(f"there is {left.strip()!r} behind the value")
    return value


class _Scalars:
    """Reads the text of one line from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def left(self) -> str:
        return self._text[self._at :]

    def key(self) -> str:
        """A mapping's key; behind it is what follows the colon."""
        if self._text.startswith(("'", '"')):
            key = self._quoted()
            match = re.compile(r"\s*:(?=\s|$)").match(self._text, self._at)
        else:
            match = re.compile(r"(.*?)\s*:(?=\s|$)").match(self._text)
            key = match[1] if match else ""
            if match and (key.startswith((*_NO_PLAIN, "? ")) or " #" in key or not isinstance(scalar(key), str)):
                raise ValueError(f"{key!r} is no name of an option")
        if not match:
            raise ValueError(f"{self._text!r} is not `option: value`")
        self._at = match.end()
        return key

    def rest(self) -> str | None:
        """What stands behind a key, None where there is nothing but a comment."""
        rest = self.left().strip()
        return None if not rest or rest.startswith("#") else rest

    def value(self, *, flow: bool) -> Any:
        """One value; `flow`: inside brackets, where a comma ends it."""
        head = self._text[self._at : self._at + 1]
        if head in ("'", '"') and head:
            return self._quoted()
        if head == "[":
            return self._sequence()
        if head == "{":
            return self._pairs()
        return self._plain(flow)

    def _plain(self, flow: bool) -> Any:
        end = re.compile(r"[,\[\]{}]|:(?=[\s,\]}]|$)|\s#" if flow else r"\s#").search(self._text, self._at)
        stop = end.start() if end else len(self._text)
        word = self._text[self._at : stop].strip()
        self._at = stop
        if flow and not word:
            raise ValueError("a value is missing between brackets")
        if word.startswith(("|", ">")):
            raise ValueError("text of several lines is not read: put it into a file, or in quotes with \\n")
        strange = r"[-?:](?:\s|$)" if flow else r"[-?:](?:\s|$)|.*:(?:\s|$)"
        if word.startswith(_NO_PLAIN) or re.match(strange, word) or (flow and "?" in word):
            raise ValueError(f"{word!r} is YAML that is not read here: put it in quotes if it is text")
        return scalar(word)

    def _quoted(self) -> str:
        quote = self._text[self._at]
        pattern = r"'((?:[^']|'')*)'" if quote == "'" else r'"((?:[^"\\]|\\.)*)"'
        match = re.compile(pattern).match(self._text, self._at)
        if not match:
            raise ValueError("a quotation does not end on its line")
        self._at = match.end()
        if quote == "'":
            return match[1].replace("''", "'")
        if escape := _ESCAPES.search(match[0]):
            raise ValueError(f"{match[0][escape.start() : escape.start() + 2]} is no escape that is read here")
        value = json.loads(match[0], strict=False)
        assert isinstance(value, str), value
        return value

    def _sequence(self) -> list[Any]:
        found: list[Any] = []
        while self._more("]", first=not found):
            found.append(self.value(flow=True))
        return found

    def _pairs(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while self._more("}", first=not found):
            key = self.value(flow=True)
            colon = re.compile(r"\s*:\s*").match(self._text, self._at)
            if not colon or not isinstance(key, str) or key in found:
                raise ValueError(f"{key!r} in braces has no value, is there twice, or is no text")
            self._at = colon.end()
            found[key] = self.value(flow=True)
        return found

    def _more(self, closing: str, *, first: bool) -> bool:
        """Whether an element follows; behind the bracket, comma and spaces before it, or behind the closing bracket."""
        opening = r"[\[{]\s*" if first else rf"\s*(?:,\s*|(?=\{closing}))"
        match = re.compile(opening).match(self._text, self._at)
        if not match:
            raise ValueError(f"a comma or {closing} is missing: what begins with a bracket has to end on its line")
        self._at = match.end()
        if self._text.startswith(closing, self._at):
            self._at += 1
            return False
        if self._at == len(self._text):
            raise ValueError(f"{closing} is missing: what begins with a bracket has to end on its line")
        return True


def scalar(word: str) -> str | int | float | bool | None:
    """What YAML 1.1 makes of a word without quotes. Raises ValueError where that would be a surprise."""
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    if _INT.fullmatch(word):
        return int(word)
    if _FLOAT.fullmatch(word):
        return float(word)
    if _TREACHEROUS.fullmatch(word):
        raise ValueError(f"{word} is not what it looks like in YAML: put it in quotes if it is text")
    return word
