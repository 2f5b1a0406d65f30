"""The form that a text must have: a JSON schema, an expression, a choice or a grammar. Data, checked for shape.

Names are vLLM's. Whether a schema or a grammar can be followed is the engine's question, which compiles it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from rvllm.errors import BadRequest
from rvllm.sampling.tags import Tags

MOST_CHARACTERS = 4 << 20
"""Of a schema or a grammar."""

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """Exactly one of the first six; raises BadRequest naming the one that is wrong.

    json            a JSON schema, also given as an object; kept as JSON text
    regex           a regular expression of Rust's syntax, which all of the text has to match
    choice          texts, of which it has to be one
    grammar         Lark's syntax as llguidance reads it, or llama.cpp's GBNF
    json_object     true: any JSON object
    structural_tag  free text in which tags have JSON between begin and end (tags.py), also given as an object
    disable_any_whitespace          with JSON: none but in strings
    whitespace_pattern              with JSON: an expression for what may stand between its parts, any number of times;
                                    by default a blank, a tab or an end of line
    after           text that ends what comes before and has no form, such as "</think>"
    disable_additional_properties   with json: an object has no properties but those that its schema names
    """

    json: str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    after: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "json", _schema(self.json))
        object.__setattr__(self, "choice", _choice(self.choice))
        object.__setattr__(self, "structural_tag", _tags(self.structural_tag))
        for name in ("regex", "grammar", "whitespace_pattern", "after"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise _wrong(f"{name} has to be a text that is not empty")
        for name in ("json_object", "disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool | None):
                raise _wrong(f"{name} has to be true or false")
        object.__setattr__(self, "json_object", self.json_object or None)
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise _wrong(f"exactly one of {', '.join(KINDS)} has to be given, there is {' and '.join(given) or 'none'}")
        if self.size > MOST_CHARACTERS:
            raise _wrong(f"{given[0]} has {self.size:,} characters, the limit is {MOST_CHARACTERS:,}")

    @property
    def size(self) -> int:
        """Characters of the schema or the grammar."""
        texts = (self.json, self.regex, self.grammar, self.structural_tag, *(self.choice or ()))
        return sum(len(text) for text in texts if text)

    @classmethod
    def parse(cls, given: object) -> StructuredOutputsParams:
        """From an object of JSON. Raises BadRequest."""
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise _wrong("it has to be an object")
        known = {field.name for field in fields(cls)}
        for name in given:
            if name not in known:
                raise _wrong(f"it has {name!r:.100}, which is not done", hint=f"it may have {', '.join(sorted(known))}")
        return cls(**{name: value for name, value in given.items() if value is not None})


def _schema(given: Any) -> str | None:
    if given is None:
        return None
    try:
        value = json.loads(given) if isinstance(given, str | bytes) else given
        if not isinstance(value, Mapping):
            raise _wrong("json has to be a schema: an object, or the JSON text of one")
        return json.dumps(value)
    except (ValueError, RecursionError, TypeError) as cause:
        raise _wrong(f"json is no schema: {cause}") from None


def _tags(given: Any) -> str | None:
    if given is None:
        return None
    try:
        return Tags.parse(given).text()
    except (ValueError, TypeError, RecursionError) as cause:
        raise _wrong(f"structural_tag is none: {cause}") from None


def _choice(given: Any) -> tuple[str, ...] | None:
    if given is None:
        return None
    items = () if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)
    if not items or not all(isinstance(item, str) and item for item in items):
        raise _wrong("choice has to be a list of texts, none empty")
    return items


def _wrong(what: str, *, hint: str | None = None) -> BadRequest:
    return BadRequest(f"structured_outputs: {what}", param="structured_outputs", hint=hint)
