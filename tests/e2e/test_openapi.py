"""Whether OpenAPI's document tells the truth: Schemathesis asks a server what it says may be asked, and what may not."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from rvllm.api.fields import fields
from rvllm.api.front import Front
from rvllm.api.http import App, Routes
from rvllm.api.routes import routes
from rvllm.config import ServerConfig
from tests.e2e.test_tools import HERMES
from tests.fixtures.commands import environment
from tests.fixtures.models import EOS, Options, chain_model
from tests.fixtures.servers import JSON, Server, serving

KEY = {"authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = chain_model(tmp_path_factory.mktemp("model"), [" ok", EOS], Options(template=HERMES))
    flags = ("--served-model-name", "m", "--max-model-len", "128", "--api-key", "secret")
    flags += ("--enable-tokenizer-info-endpoint", "--enable-per-request-metrics", "--trust-request-chat-template")
    with serving(model.folder, *flags, folder=tmp_path_factory.mktemp("server")) as started:
        yield started


@pytest.fixture(scope="module")
def document(server: Server) -> dict[str, Any]:
    told: dict[str, Any] = server.send("GET", "/openapi.json", headers=KEY).json
    return told


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="Schemathesis needs Python 3.11")
def test_the_server_does_as_its_document_says(server: Server, document: dict[str, Any], tmp_path: Path) -> None:
    """Some 4,000 requests: valid bodies, bodies at and beyond each limit, and wrong ones, the same ones every time."""
    file = tmp_path / "openapi.json"
    file.write_text(json.dumps(document), encoding="utf-8")
    command = [
        sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", "run", file, "--url", f"http://127.0.0.1:{server.port}",
        "--header", "Authorization: Bearer secret", "--phases", "examples,coverage,fuzzing", "--max-examples", "12",
        "--generation-deterministic", "--continue-on-failure", "--output-sanitize", "false",
        # Which valid bodies are refused all the same is what our own check is about.
        "--checks", "all", "--exclude-checks", "positive_data_acceptance",
    ]  # fmt: skip
    hooks = environment(SCHEMATHESIS_HOOKS="tests.fixtures.openapi_checks", NO_COLOR="1")
    done = subprocess.run(command, cwd=tmp_path, env=hooks, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr
    assert server.process.poll() is None and not any("unexpected" in line for line in server.said)


def table(**habits: Any) -> Routes:
    return routes(Front(["m"], "m", 0, habits=ServerConfig(enable_tokenizer_info_endpoint=True, **habits)))


def test_every_field_is_told_of_and_nothing_that_is_no_field() -> None:
    bodies = {route.body for methods in table().values() for route in methods.values() if route.body is not None}
    assert len(bodies) == 7
    told, used = fields(["m"], None), set()
    for body in bodies:
        for name in body.__struct_fields__:
            own = f"{body.__name__}.{name}"
            used.add(own if own in told else name)
    assert used == set(told)


def test_every_route_is_told_of_with_its_key(document: dict[str, Any]) -> None:
    shown = {path.replace("{model}", "") for path in document["paths"]}
    assert shown == set(table())
    assert [path for path, methods in document["paths"].items() if not next(iter(methods.values()))["security"]] == [
        "/health",
        "/ping",
        "/",
    ]


def test_its_schemas_are_schemas(document: dict[str, Any]) -> None:
    assert document["openapi"] == "3.1.0"
    for schema in document["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


def test_limits_are_those_of_the_model(document: dict[str, Any]) -> None:
    body = document["components"]["schemas"]["ChatBody"]["properties"]
    assert body["model"]["anyOf"] == [{"enum": ["m"]}, {"type": "null"}]
    assert body["top_logprobs"]["anyOf"][0]["maximum"] == 20
    assert body["truncate_prompt_tokens"]["anyOf"][1]["maximum"] == 127
    assert body["temperature"]["anyOf"][0]["minimum"] == 0


def test_examples_are_answered(server: Server, document: dict[str, Any]) -> None:
    for path, methods in document["paths"].items():
        if (body := methods.get("post", {}).get("requestBody")) is not None:
            answer = server.send("POST", path, body["content"]["application/json"]["example"], {**JSON, **KEY})
            assert answer.status == 200, answer


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
def test_the_page_needs_nothing_from_elsewhere(server: Server, path: str) -> None:
    answer = server.send("GET", path, headers={**KEY, "host": "llm.example:8000"})
    page = answer.body.decode()
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-security-policy"].startswith("default-src 'none'; style-src 'sha256-")
    assert "<script" not in page and "src=" not in page
    assert re.findall(r'href="([^"]*)"', page) == ["openapi.json"]
    for said in ("POST /v1/chat/completions", "repetition_penalty", "curl -X POST http://llm.example:8000/v1/messages"):
        assert said in page
    odd = server.send("GET", path, headers={**KEY, "host": "<script>$(rm)"}).body.decode()
    assert "$(rm)" not in odd and "curl http://localhost:8000/version" in odd


def test_the_document_needs_a_key_like_all_else(server: Server) -> None:
    for path in ("/docs", "/redoc", "/openapi.json"):
        assert server.send("GET", path).status == 401


def test_where_there_is_no_key_none_is_asked_for() -> None:
    told: list[bytes] = []

    async def send(message: Any) -> None:
        told.append(message.get("body", b""))

    scope = {"type": "http", "method": "GET", "path": "/llm/openapi.json", "headers": [], "root_path": "/llm"}
    asyncio.run(App(table())(scope, send, send))
    document = json.loads(b"".join(told))
    assert document["servers"] == [{"url": "/llm"}]
    for methods in document["paths"].values():
        for operation in methods.values():
            assert operation["security"] == [] and "401" not in operation["responses"]
    # Nor are limits told that are not known before the model is.
    assert "maximum" not in document["components"]["schemas"]["DetokenizeBody"]["properties"]["tokens"]["items"]


def test_there_may_be_no_document() -> None:
    assert set(table()) - set(table(disable_fastapi_docs=True)) == {"/docs", "/redoc", "/openapi.json"}


def test_a_missing_key_is_told_in_the_form_of_the_route(server: Server) -> None:
    refused = server.send("POST", "/v1/messages", {})
    assert (refused.status, refused.json["type"], refused.json["error"]["type"]) == (
        401,
        "error",
        "authentication_error",
    )
    assert server.send("POST", "/v1/chat/completions", {}).error["code"] == "invalid_api_key"
