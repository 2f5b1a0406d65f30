"""Structural tags: text that is free until something triggers a tag, whose inside then has a form. Data only.

Two spellings are read, both of them xgrammar's, which vLLM hands on: `structures` with `triggers`, and a `format` of
the type `triggered_tags`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MOST_TAGS = 512
KIND = "structural_tag"


@dataclass(frozen=True, slots=True)
class Tag:
    """`begin`, which begins with `trigger`; JSON by `schema`; `end`."""

    trigger: str
    begin: str
    schema: dict[str, Any]
    end: str


@dataclass(frozen=True, slots=True)
class Tags:
    """once: the text ends with the first of them."""

    tags: tuple[Tag, ...]
    once: bool = False

    def text(self) -> str:
        """As JSON in the second spelling, by which equal ones are found equal."""
        tags = [
            {"begin": tag.begin, "content": {"type": "json_schema", "json_schema": tag.schema}, "end": tag.end}
            for tag in self.tags
        ]
        triggers = list(dict.fromkeys(tag.trigger for tag in self.tags))
        told = {"type": "triggered_tags", "triggers": triggers, "tags": tags, "stop_after_first": self.once}
        return json.dumps({"type": KIND, "format": told})

    @classmethod
    def parse(cls, given: Any) -> Tags:
        """From an object of JSON, or the text of one. Raises ValueError with the reason."""
        try:
            value = json.loads(given) if isinstance(given, str | bytes) else given
        except RecursionError:
            raise ValueError("it is too deep") from None
        if isinstance(value, Mapping) and value.get("type", KIND) != KIND:
            raise ValueError(f"its type is {value['type']!r:.100}, it has to be {KIND}")
        if isinstance(value, Mapping) and "format" in value:
            _only(value, ("type", "format"))
            return cls._triggered(value["format"])
        value = _only(value, ("type", "structures", "triggers"))
        read = [_only(one, ("begin", "schema", "end")) for one in _list(value, "structures")]
        parts = [(one.get("begin"), one.get("schema"), one.get("end")) for one in read]
        return cls(_tags(_list(value, "triggers"), parts))

    @classmethod
    def _triggered(cls, given: Any) -> Tags:
        kind = given.get("type") if isinstance(given, Mapping) else None
        if kind != "triggered_tags":
            raise ValueError(f"its format is of the type {kind!r:.100}, only triggered_tags are done")
        value = _only(given, ("type", "triggers", "tags", "at_least_one", "stop_after_first"))
        if value.get("at_least_one", False) is not False:
            raise ValueError("at_least_one is not done")
        if not isinstance(once := value.get("stop_after_first", False), bool):
            raise ValueError("stop_after_first has to be true or false")
        read = []
        for one in _list(value, "tags"):
            tag = _only(one, ("type", "begin", "content", "end"))
            content = tag.get("content")
            if tag.get("type", "tag") != "tag":
                raise ValueError(f"there is a {tag['type']!r:.100} where a tag has to be")
            if not isinstance(content, Mapping) or content.get("type") != "json_schema":
                raise ValueError("a tag's content has to be of the type json_schema")
            read.append((tag.get("begin"), _only(content, ("type", "json_schema")).get("json_schema"), tag.get("end")))
        return cls(_tags(_list(value, "triggers"), read), once)


def _tags(triggers: list[Any], read: list[tuple[Any, Any, Any]]) -> tuple[Tag, ...]:
    if not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise ValueError("triggers have to be texts, none empty")
    if len(read) > MOST_TAGS:
        raise ValueError(f"it has {len(read):,} tags, the limit is {MOST_TAGS}")
    found = []
    for begin, schema, end in read:
        if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(schema, Mapping):
            raise ValueError("a tag has to have a begin and an end, which are texts, and a schema, which is an object")
        fitting = [trigger for trigger in triggers if begin.startswith(trigger)]
        if not fitting:
            raise ValueError(f"no trigger begins {begin!r:.100}")
        found.append(Tag(min(fitting, key=len), begin, dict(schema), end))
    return tuple(found)


def _list(given: Mapping[str, Any], name: str) -> list[Any]:
    value = given.get(name)
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name} has to be a list that is not empty")
    return value


def _only(given: Any, names: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise ValueError(f"an object is missing, with {', '.join(names)}")
    for name in given:
        if name not in names:
            raise ValueError(f"it has {name!r:.100}, which is not done")
    return given
