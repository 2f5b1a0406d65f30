"""The server's document as JSON and as a page to read, made here: no script, and nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from rvllm.api.fields import Json, fields
from rvllm.api.front import Front
from rvllm.api.http import Exchange, Routes
from rvllm.api.openapi import JSON, document
from rvllm.version import VERSION

STYLE = """
body { max-width: 60em; margin: 2em auto; padding: 0 1em; font: 16px/1.5 system-ui, sans-serif }
:root { color-scheme: light dark }
summary { cursor: pointer; padding: .4em 0 }
pre { overflow-x: auto; padding: .8em; border: 1px solid #8884 }
td { vertical-align: top; padding: .2em 1.5em .2em 0; border-top: 1px solid #8884 }
.kind { opacity: .7 }
"""
_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
HEADERS = {
    "content-type": "text/html; charset=utf-8",
    "content-security-policy": f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_HOST = re.compile(r"[\w.\[\]:-]+", re.ASCII)


class Documents:
    """Handlers of a front's documents; `table` are all its routes, also those that it is still to have."""

    def __init__(self, front: Front, table: Routes, open_routes: Sequence[str]) -> None:
        self._front, self._table, self._open = front, table, open_routes
        self._made: dict[tuple[bool, str], Json] = {}
        """By whether the model was known, and the root: to make one takes 11 ms, in which nobody gets a token."""

    def _document(self, exchange: Exchange) -> Json:
        root = exchange.scope.get("root_path", "")
        key = self._front.served is not None, root
        if key not in self._made:
            self._made[key] = self._make(root)
        return self._made[key]

    def _make(self, root: str) -> Json:
        front = self._front
        facts = None if front.served is None else front.served.facts
        told = fields(front.names, facts, trusted=front.habits.trust_request_chat_template)
        open_routes = self._open if front.habits.api_key else tuple(self._table)
        return document(self._table, open_routes, told, front.names, root)

    async def schema(self, exchange: Exchange) -> None:
        await exchange.reply_json(self._document(exchange))

    async def page(self, exchange: Exchange) -> None:
        host = exchange.headers.get("host", "")
        where = f"{exchange.scope.get('scheme', 'http')}://{host if _HOST.fullmatch(host) else 'localhost:8000'}"
        html = page(self._document(exchange), where)
        await exchange.reply(html.encode(), headers=HEADERS)


def page(told: Json, where: str) -> str:
    """The document as HTML. where: scheme and host that examples speak to."""
    root = told["servers"][0]["url"].rstrip("/")
    parts = [
        _section(method, path, operation, told["components"]["schemas"], f"{where}{root}")
        for path, methods in told["paths"].items()
        for method, operation in methods.items()
    ]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>rvllm {escape(VERSION)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style>'
        f"<h1>rvllm {escape(VERSION)}</h1><p>{escape(told['info']['description'])} "
        f'For programs: <a href="openapi.json">openapi.json</a>.</p>{"".join(parts)}</html>'
    )


def _section(method: str, path: str, operation: Json, schemas: Json, where: str) -> str:
    body = operation.get("requestBody", {}).get("content", {}).get(JSON)
    rows = "" if body is None else "".join(_rows(schemas[body["schema"]["$ref"].rpartition("/")[2]]))
    statuses = "".join(
        f"<tr><td>{escape(status)}<td>{escape(answer['description'])}"
        f"<td class=kind>{escape(', '.join(answer.get('content', ())))}"
        for status, answer in operation["responses"].items()
    )
    given = None if body is None else body["example"]
    example = _example(method, path, given, where, key=bool(operation["security"]))
    return (
        f"<details><summary><code>{method.upper()} {escape(path)}</code> {escape(operation['summary'])}</summary>"
        f"<pre>{escape(example)}</pre>"
        + (f"<table><tbody>{rows}</table>" if rows else "")
        + f"<h4>Replies</h4><table><tbody>{statuses}</table></details>"
    )


def _rows(schema: Json) -> Iterator[str]:
    required = schema.get("required", ())
    for name, found in schema["properties"].items():
        must = " (required)" if name in required else ""
        yield (
            f"<tr><td><code>{escape(name)}</code>{must}<td class=kind>{escape(kind_of(found))}"
            f"<td>{escape(found.get('description', ''))}"
        )


def kind_of(schema: Mapping[str, object]) -> str:
    """A schema in a few words, without null."""
    if "$ref" in schema:
        return "object"
    if "const" in schema:
        return json.dumps(schema["const"])
    values = schema.get("enum")
    if isinstance(values, list):
        return " | ".join(json.dumps(value) for value in values if value is not None) or "null"
    several = schema.get("anyOf")
    if isinstance(several, list):
        return " | ".join(dict.fromkeys(kind for one in several if (kind := kind_of(one)) != "null"))
    types = schema.get("type", "any")
    kind = " | ".join(one for one in types if one != "null") if isinstance(types, list) else str(types)
    items = schema.get("items")
    if isinstance(items, dict):
        return f"list of {kind_of(items)}"
    low, high = schema.get("minimum"), schema.get("maximum")
    # Beyond that it is the edge of what a number can be, which says nothing.
    shown = [f"{word} {value:,}" for word, value in (("from", low), ("to", high)) if _telling(value)]
    return " ".join([kind, *shown])


def _telling(value: object) -> bool:
    return isinstance(value, int | float) and (value == 0 or 1e-9 < abs(value) < 1e15)


def _example(method: str, path: str, body: object, where: str, *, key: bool) -> str:
    words = [f"curl {where}{path}"] if method == "get" else [f"curl -X POST {where}{path}"]
    if key:
        words.append('-H "authorization: Bearer $KEY"')
    if body is not None:
        words += ["-H 'content-type: application/json'", f"-d '{json.dumps(body)}'"]
    return " \\\n     ".join(words)
