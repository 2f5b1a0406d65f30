"""OpenAPI's document of the server, from the routes and the types that they decode. Pure; knows no request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import msgspec

from rvllm.api.fields import EXAMPLES, NULL, ONE_OF, REQUIRED, Field, Json
from rvllm.api.http import Route, Routes, openai_error
from rvllm.api.reply_types import AnthropicError, Error
from rvllm.version import VERSION

JSON = "application/json"
REFERENCE = "#/components/schemas/{name}"
EVERY = (408, 431, 500)
"""Statuses of errors that any request may have."""

MEANINGS = {
    400: "The request is wrong",
    401: "The key is missing or wrong",
    404: "There is no such model",
    408: "The request did not come in",
    413: "The body is too large",
    415: "The body is not said to be JSON",
    429: "There is too much to do",
    431: "The head is too large",
    500: "A fault of the server",
    503: "The model is being loaded, or the server is ending",
    504: "It took too long",
}
REQUEST_ID: Json = {
    "name": "X-Request-Id",
    "in": "header",
    "required": False,
    "description": "The reply's, and in its id; another one is made where it is not 1 to 128 visible ASCII characters.",
    "schema": {"type": "string"},
}

EVENT: Json = {
    "description": "An event: a chunk of the reply, or an error. OpenAI's older routes end with [DONE].",
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}


def document(
    routes: Routes, open_routes: Sequence[str], told: Mapping[str, Field], names: Sequence[str], root: str = ""
) -> Json:
    """OpenAPI 3.1. open_routes: those that need no key. told: what fields mean, see `fields`. names: the model's.

    root: what the server is mounted at.
    """
    every = [route for methods in routes.values() for route in methods.values()]
    bodies = [route.body for route in every if route.body is not None]
    replies = [route.reply for route in every if isinstance(route.reply, type)]
    types = list(dict.fromkeys([*bodies, *replies, Error, AnthropicError]))
    _, components = msgspec.json.schema_components(types, ref_template=REFERENCE)
    for body in dict.fromkeys(bodies):
        _describe(components[body.__name__], body.__name__, told)
    paths = {}
    for path, methods in routes.items():
        shown = f"{path}{{model}}" if path.endswith("/") and path != "/" else path
        paths[shown] = {
            method.lower(): _operation(method, shown, route, path in open_routes, names)
            for method, route in methods.items()
        }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "rvllm",
            "version": VERSION,
            "description": "An LLM by the APIs of OpenAI and Anthropic. null is as good as leaving a field out; "
            "a field that nobody knows is refused.",
        },
        "servers": [{"url": root or "/"}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _describe(schema: Json, body: str, told: Mapping[str, Field]) -> None:
    """Put what fields mean and what they may hold into a body's schema."""
    required = dict.fromkeys((*schema.get("required", ()), *REQUIRED.get(body, ())))
    for name, found in schema["properties"].items():
        meaning, own = told.get(f"{body}.{name}") or told[name]
        default = {} if name in required else {"default": None}
        if own is not None and name not in required and not ("enum" in own and None in own["enum"]):
            own = {"anyOf": [*(own["anyOf"] if set(own) == {"anyOf"} else [own]), NULL]}
        schema["properties"][name] = {"description": meaning, **(found if own is None else own), **default}
    if required:
        schema["required"] = list(required)
    if body in ONE_OF:
        schema["oneOf"] = [{"required": [name], "properties": {name: {"not": NULL}}} for name in ONE_OF[body]]


def _operation(method: str, path: str, route: Route, is_open: bool, names: Sequence[str]) -> Json:
    error = _json_of(Error if route.shape is openai_error else AnthropicError)
    statuses = sorted({*route.errors, *EVERY, *(() if is_open else (401,))})
    answers: Json = {str(status): {"description": MEANINGS[status], "content": error} for status in statuses}
    if route.reply is not NoReturn:
        answers = {"200": _answer(route), **answers}
    parameters = [REQUEST_ID]
    if path.endswith("{model}"):
        named: Json = {"type": "string", "enum": list(names)}
        parameters = [{"name": "model", "in": "path", "required": True, "schema": named}, REQUEST_ID]
    found: Json = {
        "operationId": f"{method.lower()}{path.replace('/', '_').replace('{model}', 'model')}",
        "summary": route.summary,
        "parameters": parameters,
        "responses": answers,
        "security": [] if is_open else [{"bearer": []}, {"key": []}],
    }
    if route.body is not None:
        content = _json_of(route.body)
        content[JSON]["example"] = EXAMPLES[route.body.__name__]
        found["requestBody"] = {"required": True, "content": content}
    return found


def _answer(route: Route) -> Json:
    header = {"X-Request-Id": {"schema": {"type": "string"}}}
    if route.reply is None:
        return {"description": "Done", "headers": header}
    if isinstance(route.reply, tuple):
        content: Json = {kind: {"schema": {} if kind == JSON else {"type": "string"}} for kind in route.reply}
    else:
        content = _json_of(route.reply)
    if route.streams:
        content["text/event-stream"] = {"schema": EVENT}
    return {"description": "Done", "headers": header, "content": content}


def _json_of(kind: Any) -> Json:
    return {JSON: {"schema": {"$ref": REFERENCE.format(name=kind.__name__)}}}
