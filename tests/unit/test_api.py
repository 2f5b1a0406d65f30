"""Bodies, errors and routes of the server, without a socket, a model or an engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest

from rvllm.api.cors import Cors
from rvllm.api.errors import HttpError
from rvllm.api.http import App, Exchange, Route, Routes, Rules, while_connected
from rvllm.api.log import Log
from rvllm.api.requests import ChatBody, CompletionBody, SamplingBody, parse
from rvllm.errors import BadRequest, EngineDied, PromptTooLong
from rvllm.sampling.params import SamplingParams
from rvllm.text.token_text import TokenTexts
from rvllm.text.tokenizer import Tokenizer
from tests.fixtures.tiny_tokenizers import tiny_tokenizer

Message = MutableMapping[str, Any]


def ask(
    routes: Routes,
    path: str = "/a",
    method: str = "POST",
    body: tuple[bytes, ...] = (b"{}",),
    headers: dict[str, str] = {},  # noqa: B006
    root_path: str = "",
    **how: Any,
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of what an App of these routes answers."""
    sent: list[Message] = []
    chunks = [{"type": "http.request", "body": part, "more_body": True} for part in body[:-1]]
    waiting = [*chunks, {"type": "http.request", "body": body[-1], "more_body": False}]

    async def receive() -> Message:
        return waiting.pop(0) if waiting else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    raw = [(key.encode(), value.encode()) for key, value in headers.items()]
    scope = {"type": "http", "path": path, "method": method, "headers": raw, "root_path": root_path}
    asyncio.run(App(routes, **how)(scope, receive, send))
    if not sent:
        return 0, {}, b""
    told = {key.decode(): value.decode() for key, value in sent[0]["headers"]}
    return sent[0]["status"], told, b"".join(message["body"] for message in sent[1:])


async def echo(exchange: Exchange) -> None:
    await exchange.reply(await exchange.body())


def failing(error: Exception, begun: bool = False) -> Routes:
    async def handler(exchange: Exchange) -> None:
        if begun:
            await exchange.begin_events()
            await exchange.events(b"data: 1\n\n")
        raise error

    return {"/a": {"POST": Route(handler)}}


ECHO: Routes = {"/a": {"POST": Route(echo)}, "/b/": {"GET": Route(echo)}}


def test_a_body_comes_in_parts() -> None:
    status, headers, body = ask(ECHO, body=(b"ab", b"", b"c"))
    assert (status, body, headers["content-type"], headers["content-length"]) == (200, b"abc", "application/json", "3")


@pytest.mark.parametrize(
    ("how", "status"),
    [
        ({"path": "/"}, 404),
        ({"path": "/a/"}, 404),
        ({"path": "/b/", "method": "GET"}, 404),
        ({"method": "GET"}, 405),
        ({"headers": {"content-type": "text/plain"}}, 415),
        ({"headers": {"content-length": str((32 << 20) + 1)}}, 413),
        ({"headers": {"content-length": "-1"}}, 413),
        ({"body": (b"a" * (1 << 20),) * 33}, 413),
    ],
)
def test_what_is_no_request_of_ours_has_its_status_and_an_error_object(how: dict[str, Any], status: int) -> None:
    given, headers, body = ask(ECHO, **how)
    assert given == status and headers["content-type"] == "application/json"
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    assert (headers.get("connection") == "close") == (status in (413, 415))


def test_a_client_that_leaves_within_its_body_is_told_nothing() -> None:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "path": "/a", "method": "POST", "headers": []}
    asyncio.run(App(ECHO)(scope, receive, send))
    assert not sent


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (BadRequest("bad", param="n"), 400, None),
        (PromptTooLong("long", param="prompt"), 400, "context_length_exceeded"),
        (EngineDied("dead"), 503, "engine_error"),
        (HttpError(404, "no", code="model_not_found"), 404, "model_not_found"),
    ],
)
def test_errors_have_their_status_and_code(error: Exception, status: int, code: str | None) -> None:
    given, _, body = ask(failing(error))
    assert (given, json.loads(body)["error"]["code"]) == (status, code)
    begun, _, events = ask(failing(error, begun=True))
    *_, last, end = events.split(b"\n\n")
    assert begun == 200 and end == b"" and json.loads(last.removeprefix(b"data: ")) == json.loads(body)


@pytest.mark.parametrize("stacks", [False, True])
@pytest.mark.parametrize("as_json", [False, True])
def test_a_fault_of_ours_shows_its_words_only_in_a_log_that_may(
    capsys: pytest.CaptureFixture[str], stacks: bool, as_json: bool
) -> None:
    log = Log(print, as_json=as_json, stacks=stacks)
    status, _, body = ask(failing(ValueError("/secret/path")), fault=log.fault, headers={"x-request-id": "r7"})
    assert status == 500 and b"secret" not in body and b"ValueError" in body
    said = capsys.readouterr().err
    assert ("/secret/path" in said) == ("Traceback" in said) == stacks
    assert "ValueError at test_api.py:" in said and "r7" in said
    if as_json:
        assert {"time", "level", "message"} <= set(json.loads(said))


def test_a_key_is_asked_for_before_anything_is_told() -> None:
    for path in ("/a", "/nope", "/b/x"):
        assert ask(ECHO, path, keys=["K"])[0] == 401
    assert ask(ECHO, keys=["J", "K"], headers={"authorization": "Bearer K"})[0] == 200
    assert ask(ECHO, keys=["K"], open_routes=["/a"])[0] == 200


def test_work_is_cancelled_when_its_client_goes_away() -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(1)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async def handler(exchange: Exchange) -> None:
        await exchange.body()
        await while_connected(exchange, work())

    assert ask({"/a": {"POST": Route(handler)}}) == (0, {}, b"") and ended == ["cancelled"]


def test_an_error_of_the_work_is_the_answer_while_the_client_is_there() -> None:
    async def work() -> None:
        raise BadRequest("bad")

    async def wait() -> Message:
        await asyncio.sleep(60)
        raise AssertionError

    async def run() -> None:
        await while_connected(Exchange({"headers": [], "path": "/"}, wait, _nothing, Rules()), work())

    with pytest.raises(BadRequest):
        asyncio.run(run())


def test_work_that_takes_too_long_ends_with_an_error_of_its_own() -> None:
    async def wait() -> Message:
        await asyncio.sleep(60)
        raise AssertionError

    async def run() -> None:
        rules = Rules(request_s=0.05)
        await while_connected(Exchange({"headers": [], "path": "/"}, wait, _nothing, rules), asyncio.sleep(60))

    with pytest.raises(HttpError) as late:
        asyncio.run(run())
    assert (late.value.status, late.value.code) == (504, "timeout")


async def _nothing(message: Message) -> None: ...


# --- Pages of other origins

PREFLIGHT = {
    "origin": "https://a.example",
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, Content-Type",
}


def test_a_preflight_needs_no_key_and_the_reply_without_one_can_be_read() -> None:
    how: dict[str, Any] = {"keys": ["K"], "rules": Rules(cors=Cors(("https://a.example",)))}
    status, headers, body = ask(ECHO, method="OPTIONS", headers=PREFLIGHT, **how)
    assert (status, body) == (200, b"")
    assert headers["access-control-allow-origin"] == "https://a.example" and headers["vary"] == "origin"
    assert "POST" in headers["access-control-allow-methods"].split(", ")
    assert headers["access-control-allow-headers"].split(", ") == ["authorization", "content-type"]
    status, headers, _ = ask(ECHO, headers={"origin": "https://a.example"}, **how)
    assert status == 401 and headers["access-control-allow-origin"] == "https://a.example"


@pytest.mark.parametrize(
    ("cors", "change"),
    [
        (Cors(("https://a.example",)), {"origin": "https://b.example"}),
        (Cors(("*",), methods=("GET",)), {}),
        (Cors(("*",), headers=("Content-Type",)), {}),
    ],
)
def test_a_preflight_for_what_is_not_allowed_is_refused(cors: Cors, change: dict[str, str]) -> None:
    status, headers, body = ask(ECHO, method="OPTIONS", headers=PREFLIGHT | change, rules=Rules(cors=cors))
    assert status == 400 and json.loads(body)["error"]["code"] == "cors"
    if change:
        assert "access-control-allow-origin" not in headers


def test_any_page_may_ask_where_all_may_and_none_by_default() -> None:
    anyone = ask(ECHO, headers={"origin": "https://b.example"}, rules=Rules(cors=Cors(("*",))))[1]
    assert anyone["access-control-allow-origin"] == "*" and "vary" not in anyone
    cookies = Rules(cors=Cors(("*",), credentials=True))
    named = ask(ECHO, headers={"origin": "https://b.example"}, rules=cookies)[1]
    assert named["access-control-allow-origin"] == "https://b.example" and named["vary"] == "origin"
    assert named["access-control-allow-credentials"] == "true"
    assert ask(ECHO, method="OPTIONS", headers=PREFLIGHT)[0] == 405
    closed = ask(ECHO, headers={"origin": "https://b.example"})[1]
    assert not [name for name in closed if name.startswith("access-control")]


# --- Names of requests


@pytest.mark.parametrize(("given", "kept"), [("abc-1", True), ("", False), ("a b", False), ("x" * 129, False)])
def test_a_request_has_the_id_it_brought_where_that_can_be_told(given: str, kept: bool) -> None:
    found = ask(ECHO, headers={"x-request-id": given})[1]["x-request-id"]
    assert (found == given) == kept and found
    assert ask({}, headers={"x-request-id": given})[1]["x-request-id"]  # errors too


@pytest.mark.parametrize(("path", "status"), [("/x/a", 200), ("/x/x/a", 200), ("/a", 200), ("/x/x/x/a", 404)])
def test_what_it_is_mounted_at_is_no_part_of_the_path(path: str, status: int) -> None:
    """uvicorn puts --root-path before every path; a proxy may have left it there."""
    assert ask(ECHO, path, root_path="/x")[0] == status


# --- Bodies


@pytest.mark.parametrize(
    ("data", "param", "said"),
    [
        (b'{"n": "x"}', "n", "expected `int | null`, got `str`"),
        (b'{"n": true}', "n", "got `bool`"),
        (b'{"stop_token_ids": [1, "x"]}', "stop_token_ids", "got `str`"),
        (b'{"logit_bias": {"1": "x"}}', "logit_bias", "got `str`"),
        (b'{"temperature": 1e999}', "temperature", "out of range"),
        (b'{"max_tokenz": 1}', "max_tokenz", "unknown field 'max_tokenz'"),
        (b'{"stream_options": {"x": 1}}', "stream_options", "stream_options has an unknown field 'x'"),
        (b"[]", None, "expected `object`, got `array`"),
        (b"{", None, "not valid JSON"),
        (b'{"temperature": NaN}', None, "not valid JSON"),
        (b'{"user": "\xff"}', None, "not valid JSON"),
        (b'{"user": "\\ud800"}', None, "not valid JSON"),
        (b'{"metadata": ' + b'{"a":' * 100_000, None, "nested"),
    ],
)
def test_a_wrong_body_is_told_by_its_field(data: bytes, param: str | None, said: str) -> None:
    with pytest.raises(HttpError) as wrong:
        parse(data, CompletionBody)
    assert (wrong.value.status, wrong.value.param) == (400, param) and said in wrong.value.message


def test_null_is_as_good_as_nothing() -> None:
    for kind in (CompletionBody, ChatBody):
        names = kind.__struct_fields__
        body = parse(json.dumps(dict.fromkeys(names)).encode(), kind)
        body.check()
        assert body.sampling({}) == SamplingParams()


def test_what_is_given_beats_the_defaults_and_nothing_is_lost() -> None:
    given = {
        "n": 2, "max_tokens": 5, "min_tokens": 1, "temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.1,
        "presence_penalty": 1, "frequency_penalty": 1, "repetition_penalty": 1.5, "seed": 4, "stop": ["a"],
        "stop_token_ids": [1], "ignore_eos": True, "logit_bias": {"3": 1}, "allowed_token_ids": [3], "bad_words": ["b"],
        "include_stop_str_in_output": True, "skip_special_tokens": False,
    }  # fmt: skip
    params = parse(json.dumps(given).encode(), SamplingBody).sampling({"temperature": 9, "max_tokens": 9}, logprobs=2)
    assert params == SamplingParams(**given, logprobs=2)  # type: ignore[arg-type]
    assert parse(b"{}", SamplingBody).sampling({"temperature": 0.3}).temperature == 0.3


# --- Single tokens


@pytest.mark.parametrize("kind", ["bytelevel", "spm"])
def test_bytes_of_tokens_joined_are_the_texts_bytes(kind: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(tiny_tokenizer(kind, ("Hello", " world")).json, encoding="utf-8")
    tokenizer = Tokenizer.from_pretrained(str(tmp_path))
    texts = TokenTexts(tokenizer)
    text = "Hello world \N{HOT PEPPER}!"
    ids = tokenizer.encode(text)
    data = b"".join(texts.of(token)[1] for token in ids)
    assert data.removeprefix(b" " if kind == "spm" else b"") == text.encode()
    assert all(bytes(texts.of(token)[0], "utf-8") == texts.of(token)[1] for token in ids if len(texts.of(token)[1]) > 1)


@pytest.mark.parametrize("kind", ["bytelevel", "spm"])
def test_a_vocabulary_has_every_tokens_bytes_as_it_stands_in_a_text(kind: str, tmp_path: Path) -> None:
    words = ("Hello", " world", "  two", "   ", "x  ", '{"a', "<think>")
    made = tiny_tokenizer(kind, words)
    (tmp_path / "tokenizer.json").write_text(made.json, encoding="utf-8")
    tokenizer = Tokenizer.from_pretrained(str(tmp_path))
    vocabulary = TokenTexts(tokenizer).vocabulary(tokenizer.vocab_size + 3, plain=("<|im_end|>",))
    assert [vocabulary.tokens[made.id(word)].decode() for word in words] == list(words)
    assert [vocabulary.tokens[made.first_byte + byte] for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert vocabulary.tokens[tokenizer.vocab_size :] == (b"", b"", b"")
    assert vocabulary.tokens[made.id("<|eos|>")] == b"<|eos|>"
    assert {"<|eos|>", "<|im_start|>"} <= {vocabulary.tokens[token].decode() for token in vocabulary.special_ids}
    assert made.id("<|im_end|>") not in vocabulary.special_ids


def test_a_whole_number_may_be_written_as_a_fraction() -> None:
    """To JSON Schema 1.0 is an integer, and some languages write it so."""
    body = parse(
        b'{"prompt": "x", "max_tokens": 3.0, "stop_token_ids": [1.0, 2], "temperature": 2, "n": 1e0}', CompletionBody
    )
    assert (body.max_tokens, body.stop_token_ids, body.temperature, body.n) == (3, [1, 2], 2.0, 1)
    for wrong in (
        b'{"max_tokens": 3.5}',
        b'{"max_tokens": 1e300}',
        b'{"max_tokens": 3.0, "x": 1}',
        b'{"n": 1.0, "echo": 1.0}',
    ):
        with pytest.raises(HttpError) as refused:
            parse(wrong, CompletionBody)
        assert refused.value.status == 400 and refused.value.param in ("max_tokens", "x", "echo")
    with pytest.raises(HttpError, match="nested too deeply"):
        parse(b'{"n": 1.5, "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", CompletionBody)
