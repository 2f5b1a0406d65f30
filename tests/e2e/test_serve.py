"""`rvllm serve` asked by OpenAI's own client, and by plain HTTP where that would not let us err."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.fixtures.commands import LIMIT_S, alive, children, rvllm
from tests.fixtures.engines import at_rest, until
from tests.fixtures.models import EOS, IM_END, Options, TinyModel, chain_model, loop_model, random_model
from tests.fixtures.servers import PROGRAM, Answer, Server, serving, starting

CHILLI = "\N{HOT PEPPER}"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """After x, and in a chat: a character of four tokens, " ok", end. After Q: a, b, c, ... for ever."""
    folder = tmp_path_factory.mktemp("model")
    return chain_model(folder, [CHILLI.encode(), " ok", EOS], also={"Q": list("abcdefgh")})


@pytest.fixture(scope="module")
def server(model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    names = ("--served-model-name", "m1", "--served-model-name", "m2")
    with serving(model.folder, *names, "--max-model-len", "128", folder=tmp_path_factory.mktemp("server")) as started:
        yield started
        assert at_rest(started.stats())


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as made:
        yield made


def chat(server: Server, **more: Any) -> Answer:
    return server.post("/v1/chat/completions", messages=USER, **more)


def texts(events: list[Any]) -> str:
    return "".join(event["choices"][0]["text"] for event in events if event["choices"])


# --- OpenAI's client


def test_a_chat_is_answered(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="m2", messages=USER, temperature=0)  # type: ignore[arg-type]
    (choice,) = reply.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", f"{CHILLI} ok", "stop")
    assert (reply.model, reply.object) == ("m2", "chat.completion")
    assert reply.usage and reply.usage.completion_tokens == 6
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 6


def test_a_streamed_chat_is_the_same_with_one_role_one_end_and_one_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="m1",
        messages=USER,
        stream=True,
        stream_options={"include_usage": True},
        n=2,  # type: ignore[arg-type]
    )
    chunks = list(stream)
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    *others, last = chunks
    assert not last.choices and last.usage and all(chunk.usage is None for chunk in others)
    whole = client.chat.completions.create(model="m1", messages=USER, n=2)  # type: ignore[arg-type]
    assert whole.usage and last.usage.completion_tokens == whole.usage.completion_tokens == 12
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    for index in (0, 1):
        mine = [chunk.choices[0] for chunk in others if chunk.choices[0].index == index]
        assert [choice.delta.role for choice in mine] == ["assistant"] + [None] * (len(mine) - 1)
        assert "".join(choice.delta.content or "" for choice in mine) == f"{CHILLI} ok"
        assert [choice.finish_reason for choice in mine] == [None] * (len(mine) - 1) + ["stop"]
        assert mine[-1].delta.model_dump(exclude_none=True) == {}


def test_a_completion_is_answered_and_streamed_alike(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="m1", prompt="Q", temperature=0, max_tokens=5)
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == ("abcde", "length")
    stream = client.completions.create(model="m1", prompt="Q", temperature=0, max_tokens=5, stream=True)
    pieces = [chunk.choices[0] for chunk in stream]
    assert "".join(piece.text for piece in pieces) == "abcde"
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["length"]


def test_models_are_listed_and_one_is_shown(client: openai.OpenAI) -> None:
    assert [one.id for one in client.models.list()] == ["m1", "m2"]
    assert client.models.retrieve("m2").id == "m2"
    with pytest.raises(openai.NotFoundError, match="m1, m2"):
        client.models.retrieve("nope")


def test_the_client_knows_our_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="nope", prompt="x")
    assert unknown.value.code == "model_not_found" and "m1, m2" in unknown.value.message
    with pytest.raises(openai.BadRequestError) as hot:
        client.completions.create(model="m1", prompt="x", temperature=-1)
    assert hot.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="m1", prompt="x" * 200, stream=True)
    assert long.value.code == "context_length_exceeded" and "128" in long.value.message


# --- What is asked for is done


def test_logprobs_of_a_chat_have_bytes_of_parts_of_characters(server: Server) -> None:
    content = chat(server, logprobs=True, top_logprobs=2).json["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(one["bytes"]) for one in content[:5]) == f"{CHILLI} ok".encode()
    for one in content:
        assert [len(one["top_logprobs"]), one["top_logprobs"][0]["token"]] == [2, one["token"]]
        assert one["top_logprobs"][0]["logprob"] == one["logprob"] > one["top_logprobs"][1]["logprob"]
    for plain in ({"logprobs": True}, {"logprobs": True, "top_logprobs": 0}):
        scored = chat(server, **plain).json["choices"][0]["logprobs"]["content"]
        assert [one["top_logprobs"] for one in scored] == [[]] * 6
    for wrong in ({"top_logprobs": 3}, {"logprobs": True, "top_logprobs": 21}):
        refused = chat(server, **wrong)
        assert (refused.status, refused.error["param"]) == (400, "top_logprobs")
    streamed = chat(server, logprobs=True, top_logprobs=2, stream=True).events
    assert [
        one for event in streamed for one in (event["choices"][0]["logprobs"] or {"content": []})["content"]
    ] == content


def test_a_prompt_is_scored_without_a_token(server: Server) -> None:
    ask = {"prompt": "Qab", "echo": True, "logprobs": 1, "max_tokens": 0}
    reply = server.post("/v1/completions", **ask).json
    (choice,) = reply["choices"]
    assert (choice["text"], choice["finish_reason"], reply["usage"]["completion_tokens"]) == ("Qab", "length", 0)
    assert choice["logprobs"]["tokens"] == ["Q", "a", "b"] and choice["logprobs"]["text_offset"] == [0, 1, 2]
    assert choice["logprobs"]["token_logprobs"] == [None, 0.0, 0.0]
    assert choice["logprobs"]["top_logprobs"][1] == {"a": 0.0}
    (event,) = server.post("/v1/completions", **ask, stream=True).events
    assert event["choices"] == [choice]


def test_a_character_cut_off_by_the_limit_is_told_as_broken(server: Server) -> None:
    for tokens, text in ((3, "\N{REPLACEMENT CHARACTER}"), (4, CHILLI)):
        ask = {"prompt": "x", "max_tokens": tokens}
        reply = server.post("/v1/completions", **ask).json
        assert (reply["choices"][0]["text"], reply["choices"][0]["finish_reason"]) == (text, "length")
        assert reply["usage"]["completion_tokens"] == tokens
        assert texts(server.post("/v1/completions", **ask, stream=True).events) == text


def test_words_keep_the_blank_before_them_with_a_sentencepiece_tokenizer(tmp_path: Path) -> None:
    made = chain_model(
        tmp_path / "model", ["\u2581Hello", "\u2581world", "!", EOS], Options(tokenizer="spm"), prompt_end="a"
    )
    with serving(made.folder, folder=tmp_path / "server") as spm:
        for echo, text in ((False, " Hello world!"), (True, "a Hello world!")):
            ask = {"prompt": "a", "echo": echo}
            assert spm.post("/v1/completions", **ask).json["choices"][0]["text"] == text
            assert texts(spm.post("/v1/completions", **ask, stream=True).events) == text
        scored = spm.post("/v1/completions", prompt="a", logprobs=0).json["choices"][0]["logprobs"]
        assert scored["tokens"][:3] == [" Hello", " world", "!"]


def test_cached_tokens_are_told_and_shared_by_salt_alone(server: Server) -> None:
    def cached(**more: Any) -> int:
        reply = server.post("/v1/completions", prompt="salted " * 12 + "Q", max_tokens=1, **more).json
        found: int = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    salts = [{"cache_salt": "A"}, {"cache_salt": "A"}, {"cache_salt": "B"}, {}, {}]
    assert [cached(**salt) > 0 for salt in salts] == [False, True, False, False, True]
    for wrong in ("", 5):
        refused = server.post("/v1/completions", prompt="Q", cache_salt=wrong)
        assert (refused.status, refused.error["param"]) == (400, "cache_salt")


def test_a_stream_is_neither_kept_nor_held_back_on_its_way(server: Server) -> None:
    """Every write is whole events, and nothing else is between them."""
    answer = server.post("/v1/completions", prompt="Q", max_tokens=100, stream=True)
    headers = answer.headers
    assert headers["cache-control"] == "no-cache" and headers["x-accel-buffering"] == "no"
    assert headers["content-type"].startswith("text/event-stream") and "content-length" not in headers
    data = json.dumps({"prompt": "Q", "max_tokens": 100, "stream": True}).encode()
    with socket.create_connection(("127.0.0.1", server.port), LIMIT_S) as link:
        ask = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"
        link.sendall(ask % (len(data), data))
        rest = b"".join(iter(lambda: link.recv(1 << 16), b"")).partition(b"\r\n\r\n")[2]
    writes = []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        writes.append(rest[: int(size, 16)])
        assert rest[int(size, 16) :].startswith(b"\r\n")
        rest = rest[int(size, 16) + 2 :]
    assert writes.pop() == b"" and len(writes) > 3
    for write in writes:
        *events, nothing = write.split(b"\n\n")
        assert events and not nothing and all(event.startswith(b"data: ") and b"\n" not in event for event in events)
    assert b"".join(writes).count(b'"text":') == 100


def test_a_stop_string_ends_across_tokens_and_nothing_of_it_is_shown(server: Server) -> None:
    for stop in ("cde", ["zzz", "cde"]):
        ask = {"prompt": "Q", "stop": stop, "max_tokens": 8}
        (choice,) = server.post("/v1/completions", **ask).json["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", "cde")
        events = server.post("/v1/completions", **ask, stream=True).events
        assert texts(events) == "ab" and events[-1]["choices"][0]["finish_reason"] == "stop"
    shown = server.post("/v1/completions", prompt="Q", stop="cde", max_tokens=8, include_stop_str_in_output=True).json
    assert shown["choices"][0]["text"] == "abcde" and shown["usage"]["completion_tokens"] == 5
    held = server.post("/v1/completions", prompt="Q", stop="bcx", max_tokens=3, stream=True).events
    assert texts(held) == "abc"


def test_stop_strings_end_alike_in_both_apis_streamed_or_not(tmp_path: Path) -> None:
    chains = {
        "M": (["DEF", "G", "HI", "J", "K"], "DEFGHIJ", ""),
        "N": ([" alpha", " be", "ta gam", "ma", " delta"], "beta gamma", " alpha "),
        "P": (["Mars", "?\n", "X"], "\n", "Mars?"),
        "S": (["so", IM_END, "Z"], IM_END, "so"),
    }
    made = chain_model(tmp_path / "model", [EOS], also={end: script for end, (script, _, _) in chains.items()})
    with serving(made.folder, folder=tmp_path / "server") as stopping:
        for end, (_, stop, text) in chains.items():
            raw = {"prompt": end, "stop": [stop], "max_tokens": 20}
            said = [*USER, {"role": "assistant", "content": end}]
            talk = {"messages": said, "stop": stop, "continue_final_message": True, "max_tokens": 20}
            (plain,) = stopping.post("/v1/completions", **raw).json["choices"]
            (whole,) = stopping.post("/v1/chat/completions", **talk).json["choices"]
            pieces = [event["choices"][0] for event in stopping.post("/v1/completions", **raw, stream=True).events]
            deltas = [
                event["choices"][0] for event in stopping.post("/v1/chat/completions", **talk, stream=True).events
            ]
            found = [plain["text"], whole["message"]["content"], "".join(piece["text"] for piece in pieces)]
            assert found == [text] * 3
            assert "".join(delta["delta"].get("content", "") for delta in deltas) == text
            for choice in (plain, whole, pieces[-1], deltas[-1]):
                assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        hidden = stopping.post("/v1/completions", prompt="S", stop=IM_END, max_tokens=20).json
        assert hidden["usage"]["completion_tokens"] == 2


def test_a_long_stop_string_holds_nothing_back_that_could_not_begin_it(server: Server) -> None:
    ask = {"prompt": "Q", "stop": "<|a_very_long_stop_marker_of_40_characters|>", "max_tokens": 6, "stream": True}
    pieces = [event["choices"][0]["text"] for event in server.post("/v1/completions", **ask).events]
    assert pieces == list("abcdef")


def test_every_end_of_the_generation_config_ends_and_ignore_eos_covers_all(tmp_path: Path) -> None:
    script = ["hi", IM_END, "a", "b", "c"]
    made = chain_model(tmp_path / "model", script, Options(eos=(EOS, IM_END)))
    with serving(made.folder, folder=tmp_path / "server") as ending:

        def ended(**more: Any) -> tuple[str, str, int]:
            reply = ending.post("/v1/completions", prompt="x", **more).json
            (choice,) = reply["choices"]
            return choice["text"], choice["finish_reason"], reply["usage"]["completion_tokens"]

        assert ended(max_tokens=20) == ("hi", "stop", 2)
        assert ended(max_tokens=5, ignore_eos=True) == ("hiabc", "length", 5)
        assert ended(max_tokens=5, ignore_eos=True, stop=["b"]) == ("hia", "stop", 4)


def test_a_server_that_was_asked_for_ids_that_are_not_there_goes_on(server: Server) -> None:
    for ids in ([9999999], [-1], [server.post("/tokenize", prompt="x").json["max_model_len"] * 100], [2**63]):
        refused = chat(server, max_tokens=4, min_tokens=1, stop_token_ids=ids)
        assert (refused.status, refused.error["param"]) == (400, "stop_token_ids")
    assert chat(server).json["choices"][0]["message"]["content"] == f"{CHILLI} ok"


def test_parameters_reach_the_sampler(server: Server, model: TinyModel) -> None:
    ask = {"prompt": "Q", "max_tokens": 3, "temperature": 0}
    a, b = model.id("a"), model.id("b")

    def text(**more: Any) -> str:
        found: str = server.post("/v1/completions", **ask, **more).json["choices"][0]["text"]
        return found

    assert text(logit_bias={str(b): 100}) == "bbb"
    assert text(allowed_token_ids=[a]) == "aaa"
    assert text(stop_token_ids=[b]) == "a"
    assert text(bad_words=["a"]) != "abc"
    assert (
        server.post("/v1/completions", prompt="x", max_tokens=9, ignore_eos=True).json["usage"]["completion_tokens"]
        == 9
    )
    assert (
        server.post("/v1/completions", prompt="x", max_tokens=9, min_tokens=8).json["usage"]["completion_tokens"] >= 8
    )


def test_prompts_come_as_texts_or_ids_one_or_many(server: Server, model: TinyModel) -> None:
    q, x = model.id("Q"), model.id("x")
    for prompt, count in (([q], 1), ([[q], [x, q]], 2), (["Q", "xQ"], 2)):
        reply = server.post("/v1/completions", prompt=prompt, max_tokens=2, n=2).json
        assert [one["text"] for one in reply["choices"]] == ["ab"] * 2 * count
        assert [one["index"] for one in reply["choices"]] == list(range(2 * count))
        assert reply["usage"]["prompt_tokens"] == (1 if count == 1 else 3)
    cut = server.post("/v1/completions", prompt="x" * 300 + "Q", max_tokens=2, truncate_prompt_tokens=3).json
    assert cut["usage"]["prompt_tokens"] == 3 and cut["choices"][0]["text"] == "ab"


@pytest.mark.parametrize(
    "prompt",
    [[-1], [99999], [5279552648203111001], [1.5], [True], [[1, 2], [999999]], [["a"], [1]], [], [[]], "", None],
)
def test_a_prompt_that_is_none_is_refused(server: Server, prompt: Any) -> None:
    refused = server.post("/v1/completions", prompt=prompt)
    assert (refused.status, refused.error["param"]) == (400, "prompt")


def test_max_tokens_is_a_cap_and_has_the_defaults_of_both_apis(server: Server) -> None:
    for more in ({}, {"max_tokens": None}, {"max_tokens": 65535}, {"max_completion_tokens": 65535}):
        reply = chat(server, ignore_eos=True, **more).json
        assert (reply["usage"]["total_tokens"], reply["choices"][0]["finish_reason"]) == (128, "length")
    assert server.post("/v1/completions", prompt="Q").json["usage"]["completion_tokens"] == 16


def test_a_last_message_is_continued(server: Server) -> None:
    messages = [*USER, {"role": "assistant", "content": "Q"}]
    reply = server.post("/v1/chat/completions", messages=messages, continue_final_message=True, max_tokens=3).json
    assert reply["choices"][0]["message"]["content"] == "abc"


def test_special_tokens_text_of_a_user_stays_text(server: Server, model: TinyModel) -> None:
    sly = [{"role": "user", "content": f"x{IM_END}y"}]
    ids = server.post("/tokenize", messages=sly).json["tokens"]
    assert ids.count(model.id(IM_END)) == 1
    assert server.post("/detokenize", tokens=ids).json["prompt"].count(IM_END) == 2


def test_tokens_are_told_and_read_back(server: Server, model: TinyModel) -> None:
    reply = server.post("/tokenize", prompt="x ok", return_token_strs=True).json
    assert reply["tokens"] == model.encode("x ok") and reply["count"] == len(reply["token_strs"]) == len(
        reply["tokens"]
    )
    assert reply["max_model_len"] == 128
    assert server.post("/detokenize", tokens=reply["tokens"]).json == {"prompt": "x ok"}
    assert server.post("/detokenize", tokens=[99999]).error["param"] == "tokens"


def test_a_seed_draws_the_same_again_and_n_draws_differ(tmp_path: Path) -> None:
    made = random_model(tmp_path / "model")
    with serving(made.folder, folder=tmp_path / "server") as drawing:
        ask = {"prompt": "hello", "max_tokens": 12, "ignore_eos": True, "seed": 7, "n": 2, "logprobs": 0}

        def drawn() -> list[Any]:
            reply = drawing.post("/v1/completions", **ask).json
            return [choice["logprobs"]["tokens"] for choice in reply["choices"]]

        first = drawn()
        assert drawn() == first and first[0] != first[1]


# --- What is wrong is refused


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": -0.1}, "min_p"),
        ({"seed": 2**64}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 10**9}, "n"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"logit_bias": {"9999999": 5}}, "logit_bias"),
        ({"logit_bias": {"abc": 5}}, "logit_bias"),
        ({"logit_bias": {"65": "x"}}, "logit_bias"),
        ({"stop_token_ids": [99999]}, "stop_token_ids"),
        ({"messages": {}}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "alien", "content": ""}]}, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),  # the template writes no calls
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": 5}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"chat_template": "x"}, "chat_template"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {"odd": True}, "stream": True}, "stream_options"),
        ({"unheard_of": 1}, "unheard_of"),
        ({"best_of": 3}, "best_of"),
        ({"priority": 2**70}, "priority"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ],
)
def test_a_wrong_field_is_named_streaming_or_not(server: Server, body: dict[str, Any], param: str) -> None:
    for stream in ({}, {"stream": True}):
        refused = server.post("/v1/chat/completions", **{"messages": USER, **stream, **body})
        if param == "stream_options" and "odd" not in str(body) and stream:
            continue
        assert (refused.status, refused.error["param"]) == (400, param), refused


@pytest.mark.parametrize(
    "data",
    [b"", b"not json", b"\0", b"[1]", b'"x', '{"prompt": "\N{LATIN SMALL LETTER Y WITH DIAERESIS}"}'.encode("latin-1"),
     '{"prompt": "x"}'.encode("utf-16"), b'{"temperature": NaN}', b'{"temperature": 1e999}', b'{"a":' + b"[" * 100_000],
)  # fmt: skip
def test_a_body_that_is_no_json_is_told_so_and_the_connection_goes_on(server: Server, data: bytes) -> None:
    connection = server.connect()
    for _ in range(2):
        connection.request("POST", "/v1/completions", data, {"content-type": "application/json"})
        reply = connection.getresponse()
        refused = Answer(reply.status, {"content-type": reply.getheader("content-type", "")}, reply.read())
        assert refused.status == 400 and refused.error
    connection.close()


def test_paths_methods_and_content_types_are_refused_by_their_status(server: Server) -> None:
    assert server.send("GET", "/v1/nope").error["code"] == "not_found"
    wrong = server.send("GET", "/v1/chat/completions")
    assert (wrong.status, wrong.headers["allow"]) == (405, "POST") and wrong.error
    form = server.send("POST", "/v1/completions", b"{}", {"content-type": "text/plain"})
    assert form.status == 415 and form.error
    assert server.send("GET", "/version").json["version"]


def test_a_body_that_is_too_large_is_refused_before_it_is_read(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), LIMIT_S) as link:
        link.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000\r\n\r\n")
        assert b" 413 " in link.recv(100)
    with socket.create_connection(("127.0.0.1", server.port), LIMIT_S) as link:
        link.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        chunk = b"%x\r\n" % (1 << 20) + b"a" * (1 << 20) + b"\r\n"
        try:
            for _ in range(200):
                link.sendall(chunk)
        except (BrokenPipeError, ConnectionResetError):
            return  # it was closed on us, as it may be
        assert b" 413 " in link.recv(100)
    with socket.create_connection(("127.0.0.1", server.port), LIMIT_S) as link:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 1000000000\r\n\r\n"
        link.sendall(head)
        assert link.recv(100).startswith(b"HTTP/1.1 413 ")  # and not 100: nothing more is to be sent


def test_a_very_long_prompt_is_refused_in_time_and_holds_up_nobody(server: Server) -> None:
    status = Path(f"/proc/{server.process.pid}/status")

    def resident_mib() -> float:
        return int(status.read_text().split("VmRSS:")[1].split()[0]) / 1024

    before, started_s = resident_mib(), time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.post, "/v1/completions", prompt="a" * (8 << 20))
        while not asked.done():
            polled_s = time.monotonic()
            assert server.send("GET", "/health").status == 200 and time.monotonic() - polled_s < 1
            time.sleep(0.02)
        refused = asked.result()
    assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
    assert time.monotonic() - started_s < 5 and resident_mib() - before < 10 * 8


def test_a_template_that_refuses_or_attacks_is_a_wrong_request_in_time(model: TinyModel, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    attacks = {
        "globals": "{{ lipsum.__globals__['os'].popen('touch " + str(touched) + "').read() }}",
        "cycler": "{{ cycler.__init__.__globals__.os.system('touch " + str(touched) + "') }}",
        "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "append": "{{ messages.append(1) }}",
        "loop": "{% for i in range(10**9) %}x{% endfor %}",
        "refuse": "{{ raise_exception('System role not supported') }}",
        "parts": "{{ raise_exception('PROBE:' ~ messages[1].content) }}",
    }
    cases = "".join("{% elif said == '" + name + "' %}" + text for name, text in attacks.items())
    template = "{% set said = messages[0]['content'] %}{% if false %}" + cases + "{% else %}x{% endif %}"
    parts = [{"type": "text", "text": "AAA"}, {"type": "text", "text": "BBB"}]
    with serving(model.folder, "--chat-template", template, folder=tmp_path / "server") as guarded:
        for name in attacks:
            messages = [{"role": "user", "content": name}, {"role": "user", "content": parts}]
            for stream in (True, False):
                started_s = time.monotonic()
                refused = guarded.post("/v1/chat/completions", messages=messages, stream=stream)
                assert (refused.status, refused.error["param"]) == (400, "messages"), name
                assert time.monotonic() - started_s < 2
                if name == "refuse":
                    assert "System role not supported" in refused.error["message"]
                if name == "parts":
                    assert "PROBE:AAA\nBBB" in refused.error["message"]
        assert guarded.post("/v1/chat/completions", messages=USER).json["choices"][0]["message"]["content"]
        image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
        assert "images are not supported" in guarded.post("/v1/chat/completions", messages=image).error["message"]
    assert not touched.exists()


def test_a_long_chat_is_refused_and_holds_up_nobody(server: Server) -> None:
    long = [{"role": "user", "content": "hello, how are you? " * 100_000}]
    with ThreadPoolExecutor(1) as pool:
        refused = pool.submit(server.post, "/v1/chat/completions", messages=long)
        waited_s = []
        while not refused.done():
            started_s = time.monotonic()
            assert server.send("GET", "/health").status == 200
            waited_s.append(time.monotonic() - started_s)
            time.sleep(0.02)
    answer = refused.result()
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "context_length_exceeded", "messages")
    assert max(waited_s) < 1


# --- Keys


def test_a_key_opens_all_but_what_shows_that_the_server_lives(model: TinyModel, tmp_path: Path) -> None:
    with serving(model.folder, "--api-key", "K1", "--api-key", "K2", folder=tmp_path / "server") as locked:
        assert [locked.send("GET", path).status for path in ("/health", "/ping")] == [200, 200]
        for path in ("/version", "/v1/models", "//v1/models", "/v1/./models", "/x/../v1/models", "/V1/models",
                     "/v1/models/", "/v1%2fmodels", "/health/", "/nope"):  # fmt: skip
            refused = locked.send("GET", path)
            assert (refused.status, refused.error["code"]) == (401, "invalid_api_key"), path
        for key in ("", "Bearer", "Bearer ", "Basic K1", "Bearer K1 ", "Bearer k1", "Bearer K1K2", "K1"):
            assert locked.send("GET", "/v1/models", headers={"authorization": key}).status == 401 or key == "Bearer K1 "
        for key in ("Bearer K1", "bearer K2"):
            assert locked.send("GET", "/v1/models", headers={"authorization": key}).status == 200
        assert not any("K1" in line for line in locked.said)


@pytest.mark.parametrize("variable", ["RVLLM_API_KEY", "VLLM_API_KEY"])
def test_keys_can_come_by_the_environment(model: TinyModel, tmp_path: Path, variable: str) -> None:
    with starting(model.folder, folder=tmp_path / "server", **{variable: "K1 K2"}) as locked:
        assert locked.send("GET", "/version").status == 401
        for key in ("K1", "K2"):
            assert locked.send("GET", "/version", headers={"authorization": f"Bearer {key}"}).status == 200


# --- Coming and going


def test_a_client_that_goes_away_frees_what_its_request_held(tmp_path: Path) -> None:
    made = loop_model(tmp_path / "model", options=Options(max_positions=100_000))
    with serving(made.folder, folder=tmp_path / "server") as looping:
        for stream in (True, False):
            connection = looping.connect()
            body = json.dumps({"prompt": "x", "max_tokens": 90_000, "n": 2, "stream": stream})
            connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            until(lambda: looping.stats().load.running == 2, LIMIT_S)
            if stream:
                assert connection.getresponse().read(10)
            connection.sock.close()
            connection.close()
            until(lambda: at_rest(looping.stats()), 3.0)
        assert looping.post("/v1/completions", prompt="x", max_tokens=2).json["choices"][0]["text"] == "aa"


def test_clients_that_leave_at_any_moment_leave_nothing(tmp_path: Path) -> None:
    made = loop_model(tmp_path / "model", options=Options(max_positions=100_000))
    chance = random.Random(0)
    with serving(made.folder, folder=tmp_path / "server") as looping:
        descriptors = Path(f"/proc/{looping.process.pid}/fd")
        looping.post("/v1/completions", prompt="x", max_tokens=1)
        before = len(list(descriptors.iterdir()))

        def come_and_go(number: int) -> None:
            body = json.dumps(
                {"prompt": "x" * 40, "max_tokens": 50_000, "n": 1 + number % 3, "stream": number % 2 == 0}
            )
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            sent = (head + body).encode()
            with socket.create_connection(("127.0.0.1", looping.port), LIMIT_S) as link:
                link.sendall(sent[: chance.choice((10, len(head), len(sent) - 1, len(sent), len(sent)))])
                time.sleep(chance.random() / 10)

        with ThreadPoolExecutor(12) as pool:
            list(pool.map(come_and_go, range(96)))
        until(lambda: at_rest(looping.stats()), 3.0)
        until(lambda: len(list(descriptors.iterdir())) <= before, 3.0)
        assert len(looping.said) == 2 and looping.send("GET", "/health").status == 200


def test_what_a_stop_string_ends_is_not_generated_on(tmp_path: Path) -> None:
    made = loop_model(tmp_path / "model", options=Options(max_positions=100_000))
    with serving(made.folder, folder=tmp_path / "server") as looping:
        for stream in (True, False):
            ask = {"prompt": "x", "max_tokens": 90_000, "stop": "aaa", "n": 2, "stream": stream}
            assert looping.post("/v1/completions", **ask).status == 200
            until(lambda: at_rest(looping.stats()), 3.0)


def test_many_streams_at_once_each_end_as_they_should(server: Server, model: TinyModel) -> None:
    kinds: list[tuple[dict[str, Any], str, str]] = [
        ({"prompt": "x", "max_tokens": 50}, f"{CHILLI} ok", "stop"),
        ({"prompt": "Q", "max_tokens": 50, "stop": "de"}, "abc", "stop"),
        ({"prompt": "Q", "max_tokens": 4}, "abcd", "length"),
        ({"prompt": [model.id(" ok")], "max_tokens": 4}, "", "stop"),
    ]

    def one(number: int) -> None:
        ask, text, reason = kinds[number % len(kinds)]
        events = server.post("/v1/completions", **ask, stream=True).events
        assert texts(events) == text
        assert [end for event in events if (end := event["choices"][0]["finish_reason"])] == [reason]

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, range(200)))


def test_it_is_there_before_the_model_and_says_so(model: TinyModel, tmp_path: Path) -> None:
    """From the first moment on every path says so, each goes over to 200 once, and none comes back from there."""
    asked = [("GET", "/metrics", None), ("GET", "/v1/models", None), ("POST", "/v1/completions", {"prompt": "x"}), ("GET", "/health", None)]  # fmt: skip
    with starting(model.folder, folder=tmp_path / "server") as early:
        early.told("listening")
        rounds: list[list[int]] = []
        while rounds[-3:] != [[200] * 4] * 3:  # however slow the machine is, some see it load
            answers = [early.send(*one) for one in asked]
            for answer in answers:
                if answer.status != 200:
                    assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (503, "loading", "1")
            rounds.append([answer.status for answer in answers])
        seen = [status for one in rounds for status in one]
        assert seen == sorted(seen, reverse=True), rounds
        early.told("ready: ")


def test_all_that_needs_the_model_says_come_again_until_it_is_loaded(model: TinyModel, tmp_path: Path) -> None:
    """However long that takes: the engine's process stands still here."""
    asked = [("GET", "/health", None), ("GET", "/ping", None), ("GET", "/v1/models", None)]
    texts = [("POST", "/v1/completions", {"prompt": "x"}), ("POST", "/v1/chat/completions", {"messages": USER, "stream": True})]  # fmt: skip
    with starting(model.folder, folder=tmp_path / "server") as loading:
        loading.told("listening")
        until(lambda: bool(children(loading.process.pid)), LIMIT_S)
        (engine,) = children(loading.process.pid)
        os.kill(engine, signal.SIGSTOP)
        try:
            for method, path, body in [*asked, *texts] * 3:
                answer = loading.send(method, path, body)
                assert (answer.status, answer.headers["retry-after"], answer.error["code"]) == (503, "1", "loading")
        finally:  # a process that is stopped would outlive the server
            os.kill(engine, signal.SIGCONT)
        loading.told("ready: ")
        assert [loading.send(method, path, body).status for method, path, body in [*asked, *texts]] == [200] * 5


def test_two_interrupts_while_it_loads_end_in_few_words_too(model: TinyModel, tmp_path: Path) -> None:
    with starting(model.folder, folder=tmp_path / "server") as ending:
        until(lambda: bool(children(ending.process.pid)), LIMIT_S)
        engines = children(ending.process.pid)
        for _ in range(2):
            ending.process.send_signal(signal.SIGINT)
        assert ending.process.wait(5) in (130, -signal.SIGINT)
        until(lambda: not any(map(alive, engines)), 5.0)
        assert len(ending.said) <= 3 and not any("Traceback" in line for line in ending.said), ending.said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_requests_run_out_and_leaves_nothing_behind(
    model: TinyModel, tmp_path: Path, number: signal.Signals
) -> None:
    folder = tmp_path / "server"
    made = loop_model(tmp_path / "model", options=Options(max_positions=100_000))
    with serving(made.folder, "--shutdown-timeout", "20", folder=folder) as ending:
        connection = ending.connect()
        body = json.dumps({"prompt": "x", "max_tokens": 400, "stream": True})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        reply = connection.getresponse()
        first = reply.read(10)
        ending.process.send_signal(number)
        rest = reply.read()
        assert (first + rest).endswith(b"data: [DONE]\n\n") and (first + rest).count(b'"text":"a"') == 400
        assert ending.ended() == 0
        connection.close()
    assert not list(folder.iterdir())


def test_requests_end_with_an_error_when_the_time_is_over(tmp_path: Path) -> None:
    made = loop_model(tmp_path / "model", options=Options(max_positions=100_000))
    with serving(made.folder, "--shutdown-timeout", "1", folder=tmp_path / "server") as ending:
        connections = [ending.connect() for _ in range(10)]
        body = json.dumps({"prompt": "x", "max_tokens": 90_000, "stream": True})
        for connection in connections:
            connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        replies = [connection.getresponse() for connection in connections]
        for reply in replies:
            reply.read(10)
        started_s = time.monotonic()
        ending.process.terminate()
        for reply in replies:
            *_, last, end = reply.read().split(b"\n\n")
            assert json.loads(last.removeprefix(b"data: "))["error"]["type"] == "service_unavailable" and not end
        assert ending.ended() == 0
        assert 1 <= time.monotonic() - started_s < 4
        for connection in connections:
            connection.close()


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    made = loop_model(tmp_path / "model", options=Options(max_positions=100_000))
    path = tmp_path / "socket"
    with serving(made.folder, "--uds", str(path), folder=tmp_path / "server") as ending:
        link = socket.socket(socket.AF_UNIX)
        link.connect(str(path))
        body = b'{"prompt": "x", "max_tokens": 90000}'
        link.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        until(lambda: ending.stats().load.running == 1, LIMIT_S)
        ending.process.terminate()
        ending.told("stopping")
        ending.process.terminate()
        assert ending.ended() == 128 + signal.SIGTERM
        link.close()
    assert not path.exists() and not list((tmp_path / "server").iterdir())


def test_the_death_of_the_engine_ends_requests_and_the_server(tmp_path: Path) -> None:
    made = loop_model(tmp_path / "model", options=Options(max_positions=100_000))
    with serving(made.folder, folder=tmp_path / "server") as dying:
        connection = dying.connect()
        body = json.dumps({"prompt": "x", "max_tokens": 90_000, "stream": True})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        reply = connection.getresponse()
        reply.read(10)
        children = Path(f"/proc/{dying.process.pid}/task/{dying.process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
        last = reply.read().split(b"\n\n")[-2]
        assert "killed by SIGKILL" in json.loads(last.removeprefix(b"data: "))["error"]["message"]
        assert dying.ended() == 1
        assert dying.told("error: .*killed by SIGKILL")
        connection.close()


@pytest.mark.parametrize("arguments", [("/nowhere/at/all",), ("MODEL", "--dtype", "bfloat16")])
def test_a_refused_start_is_told_in_a_few_lines(model: TinyModel, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    named = [str(model.folder) if argument == "MODEL" else argument for argument in arguments]
    with starting(*named, folder=tmp_path / "server") as refused:
        assert refused.ended() == 1
        assert refused.told("^error: ") and len(refused.said) <= 10
        assert not any("Traceback" in line for line in refused.said)
    assert not list((tmp_path / "server").iterdir())


def test_an_interrupt_while_it_loads_ends_in_one_word(model: TinyModel, tmp_path: Path) -> None:
    with starting(model.folder, folder=tmp_path / "server") as loading:
        early = loading.send("GET", "/health").status == 503  # else the machine was quicker than we
        loading.process.send_signal(signal.SIGINT)
        assert loading.ended() == (130 if early else 0)
        assert not any("Traceback" in line for line in loading.said)
    assert not list((tmp_path / "server").iterdir())


def test_a_unix_socket_is_ours_alone_and_replaces_only_one_that_is_dead(model: TinyModel, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with starting(model.folder, "--uds", str(path), folder=tmp_path / "server") as first:
        first.told("listening at unix socket")
        assert path.stat().st_mode & 0o777 == 0o660
        with starting(model.folder, "--uds", str(path), folder=tmp_path / "second") as second:
            assert second.ended() == 1 and second.told("Address already in use")
        assert path.exists()
        first.told("ready: ")
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(LIMIT_S)
            link.connect(str(path))
            link.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert link.recv(100).startswith(b"HTTP/1.1 200 ")
        opened = set()
        for one in Path(f"/proc/{first.process.pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # our own connection may be closed meanwhile
                opened.add(str(one.readlink()))
        tcp = [line.split()[9] for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()]
        assert not any(f"socket:[{inode}]" in opened for inode in tcp)
        first.process.terminate()
        assert first.ended() == 0 and not path.exists()
    path.write_text("precious")
    with starting(model.folder, "--uds", str(path), folder=tmp_path / "server") as third:
        assert third.ended() == 1 and path.read_text() == "precious"


@pytest.mark.parametrize(("taken", "host"), [("0.0.0.0", "0.0.0.0"), ("0.0.0.0", "127.0.0.1"), ("127.0.0.1", "127.0.0.1"), ("::1", "::1")])  # fmt: skip
def test_a_port_in_use_is_told_before_the_model_is_looked_at(taken: str, host: str, tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET6 if ":" in taken else socket.AF_INET) as other:
        try:
            other.bind((taken, 0))
        except OSError:
            pytest.skip(f"there is no {taken} here")
        other.listen()
        port = str(other.getsockname()[1])
        with starting("/nowhere/at/all", "--host", host, "--port", port, folder=tmp_path / "server") as refused:
            assert refused.ended() == 1 and len(refused.said) <= 3
            assert refused.told(f"^error: {host}:{port}: Address already in use")


def test_a_port_for_root_alone_is_told_so(tmp_path: Path) -> None:
    if int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text()) > 80:
        barred = ("setpriv", "--bounding-set=-net_bind_service") if os.geteuid() == 0 else ()
        with starting("/nowhere/at/all", "--port", "80", folder=tmp_path, program=(*barred, *PROGRAM)) as refused:
            assert refused.ended() == 1 and len(refused.said) <= 3
            assert refused.told("^error: 127.0.0.1:80: Permission denied") and refused.told("from 1024 on")
    else:
        pytest.skip("all may listen at all ports here")


@pytest.mark.parametrize("port", ["70000", "-1", "http"])
def test_a_port_that_is_none_is_wrong_usage(port: str) -> None:
    done = rvllm("serve", "m", "--port", port)
    assert done.returncode == 2 and "--port" in done.stderr


def test_a_model_without_a_template_completes_and_refuses_chats(tmp_path: Path) -> None:
    made = chain_model(tmp_path / "model", ["a", EOS], Options(template=None))
    with serving(made.folder, folder=tmp_path / "server") as bare:
        refused = bare.post("/v1/chat/completions", messages=USER)
        assert refused.status == 400 and "--chat-template" in refused.error["message"]
        assert bare.post("/v1/completions", prompt="x").json["choices"][0]["text"] == "a"
        assert bare.told("no chat template")
