"""Requests at the edge of what makes sense, over HTTP: broken characters, values at their bounds, templates' odd inputs.

Whoever sends one gets what he asked for or a 400 with the field's name, and the server answers the next one as ever.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.engines import at_rest, until
from tests.fixtures.models import (
    BOS,
    CHATML,
    EOS,
    IM_END,
    Options,
    TinyModel,
    chain_model,
    edit_json,
    probe,
    random_model,
    two_model,
)
from tests.fixtures.servers import JSON, Answer, Server, serving

USER = [{"role": "user", "content": "hi"}]
BROKEN = "\N{REPLACEMENT CHARACTER}"
CONTEXT = 128


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """In a chat and after x: hi, end. Logits of rows that are no tokens beat all others."""
    also = {
        b"\x8c": [b"\xb6", "!", EOS],
        "i": [b"\xe5\x8f", "A", b"\xc3", "B", " end", EOS],
        "s": [b"\xe4\x8e", " A", b"\xc4", " B", EOS],
        "Q": list("abcdefgh"),
        "E": ["one", IM_END],
        "N": ["no", BOS],
    }
    options = Options(eos=(EOS, IM_END, BOS), padded_rows=20)
    return chain_model(tmp_path_factory.mktemp("model"), ["hi", EOS], options, also=also)


@pytest.fixture(scope="module")
def server(model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    how = ("--served-model-name", "m1", "m2", "--max-model-len", str(CONTEXT), "--trust-request-chat-template")
    with serving(model.folder, *how, folder=tmp_path_factory.mktemp("server")) as started:
        yield started
        until(lambda: at_rest(started.stats()), 3.0)
        assert len(started.said) == 2, started.said


@pytest.fixture(scope="module")
def drawing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model of random weights, with rows that are no tokens."""
    made = random_model(tmp_path_factory.mktemp("random"), options=Options(padded_rows=30))
    with serving(made.folder, folder=tmp_path_factory.mktemp("drawing")) as started:
        yield started
        until(lambda: at_rest(started.stats()), 3.0)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TinyModel, Server]]:
    """After Q, X is a little likelier than Y. Texts begin with a BOS, and so does the template."""
    options = Options(add_bos=True, template="{{ bos_token }}" + CHATML)
    made = two_model(tmp_path_factory.mktemp("two"), options=options)
    with serving(made.folder, folder=tmp_path_factory.mktemp("choosing")) as started:
        yield made, started


def complete(server: Server, **body: Any) -> Answer:
    return server.post("/v1/completions", **{"temperature": 0, **body})


def text(server: Server, **body: Any) -> str:
    """The text of a completion, which is the same whole and streamed."""
    whole: str = complete(server, **body).json["choices"][0]["text"]
    events = complete(server, **body, stream=True).events
    assert "".join(event["choices"][0]["text"] for event in events) == whole
    ends = [event["choices"][0]["finish_reason"] for event in events]
    assert ends[-1] and not any(ends[:-1])
    return whole


def refused(answer: Answer, param: str) -> None:
    assert (answer.status, answer.error["param"]) == (400, param), answer


# --- Characters that are no characters


def test_a_prompt_of_ids_that_ends_within_a_character_does_not_come_out_again(server: Server, model: TinyModel) -> None:
    prompt = model.ids(b"Hello \xf0\x9f\x8c")
    assert text(server, prompt=prompt, max_tokens=4) in (f"{BROKEN}!", "\N{HOT PEPPER}!")


def test_invalid_bytes_neither_end_a_stream_nor_swallow_what_follows(server: Server) -> None:
    assert text(server, prompt="i", max_tokens=20) == f"{BROKEN}A{BROKEN}B end"
    assert text(server, prompt="s", max_tokens=20) == f"{BROKEN} A{BROKEN} B"


def test_a_sentencepiece_model_shows_no_marks_and_drops_no_characters(tmp_path: Path) -> None:
    made = chain_model(
        tmp_path / "model", ["\u2581Hello", "\u2581world", "!", EOS], Options(tokenizer="spm"), prompt_end="a"
    )
    with serving(made.folder, folder=tmp_path / "server") as spm:
        shown = text(spm, prompt="a", skip_special_tokens=False)
        assert shown.startswith(" Hello world!") and "\u2581" not in shown
        ids = complete(spm, prompt="a", return_token_ids=True).json["choices"][0]["token_ids"]  # its end is no text
        library = made.tokenizer.load().decode(made.encode("a") + ids[:-1], skip_special_tokens=False)
        assert "a" + shown == library
        rare = complete(spm, prompt="a龘b", echo=True, max_tokens=1).json
        assert rare["choices"][0]["text"].startswith("a龘b")
        assert rare["usage"]["prompt_tokens"] == len(made.encode("a龘b"))
        assert spm.post("/tokenize", prompt="a龘b").json["tokens"] == made.encode("a龘b")


# --- Ends


def test_every_end_of_the_models_list_ends_it(server: Server) -> None:
    for prompt, said in (("x", "hi"), ("E", "one"), ("N", "no")):
        reply = complete(server, prompt=prompt, max_tokens=20).json
        (choice,) = reply["choices"]
        assert (choice["text"], choice["finish_reason"], reply["usage"]["completion_tokens"]) == (said, "stop", 2)


def test_no_stop_texts_are_none_and_there_may_be_many(server: Server) -> None:
    for stop in (None, [], ["v", "w", "x", "y", "z"]):
        (choice,) = complete(server, prompt="Q", stop=stop, max_tokens=3).json["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    for stop in ("", [""], ["", "z"], 5, [1], {}):
        refused(complete(server, prompt="Q", stop=stop), "stop")


# --- Values at their bounds


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("temperature", (-1, "hot", 10**39), (0, 1e-45, 5e-324, 1e9)),
        ("top_p", (-1, 1.5), (0, 1)),
        ("top_k", (-2, 1.5), (-1, 0, 10**9)),
        ("min_p", (-0.1, 1.5), (0, 1)),
        ("repetition_penalty", (0, -1), (0.5, 2)),
        ("presence_penalty", (99, -2.5), (-2, 2)),
        ("frequency_penalty", (99, -2.5), (-2, 2)),
        ("seed", (2**64, 2**63), (-1, 2**63 - 1)),
        ("stop_token_ids", ([9999999], [-1], [2**63]), ([0],)),
        ("logit_bias", ({"9999999": 5}, {"-1": 5}, {"abc": 5}, {"65": "x"}, {"65": 101}), ({"65": 100}, {"65": -100})),
        ("response_format", ("json", {}, {"type": "yaml"}, {"type": "json_schema"}), ({"type": "text"},)),
    ],
)  # fmt: skip
def test_a_value_beyond_its_bounds_is_refused_by_name_and_one_at_them_is_not(
    server: Server, name: str, wrong: tuple[Any, ...], right: tuple[Any, ...]
) -> None:
    for start in ({"prompt": "Q"}, {"messages": USER}):
        path = "/v1/chat/completions" if "messages" in start else "/v1/completions"
        for value in (*wrong, *right):
            started_s = time.monotonic()
            answer = server.post(path, **start, **{"max_tokens": 2, name: value})
            assert time.monotonic() - started_s < 1
            if value in wrong:
                refused(answer, name)
            else:
                assert answer.status == 200 and answer.json["usage"]["completion_tokens"] == 2, value
    assert text(server, prompt="x") == "hi"


def test_ids_that_are_none_are_refused_while_others_are_answered(server: Server, model: TinyModel) -> None:
    ask = {"prompt": "Q", "max_tokens": 100, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(complete, server, **ask)
        while not beside.done():
            for ids in ([9999999], [-1], [model.vocabulary], [2**63]):
                refused(complete(server, prompt="x", min_tokens=1, max_tokens=4, stop_token_ids=ids), "stop_token_ids")
                refused(complete(server, prompt=ids), "prompt")
        assert beside.result().json["choices"][0]["text"] == "abcdefg" + "h" * 93


def test_a_bias_forces_a_token_or_forbids_it(server: Server) -> None:
    assert text(server, prompt="Q", max_tokens=3, logit_bias={"65": 100}) == "AAA"
    assert "a" not in text(server, prompt="Q", max_tokens=3, logit_bias={str(ord("a")): -100})


def test_rows_that_are_no_tokens_are_neither_drawn_nor_listed_nor_read(
    server: Server, drawing: Server, model: TinyModel
) -> None:
    tokens = len(model.tokenizer.pieces)
    for prompt in ([tokens], [model.vocabulary - 1], [model.vocabulary]):
        refused(complete(server, prompt=prompt), "prompt")
    for seed in range(4):
        hot = {"temperature": 2, "max_tokens": 20, "seed": seed, "logprobs": 20, "return_token_ids": True}
        for asked in (server, drawing):
            (choice,) = complete(asked, prompt="x", ignore_eos=True, **hot).json["choices"]
            assert max(choice["token_ids"]) < tokens and len(choice["token_ids"]) == 20
            assert all(len(listed) <= 21 for listed in choice["logprobs"]["top_logprobs"])
    biased = {"response_format": {"type": "json_object"}, "logit_bias": {str(ord("}")): 100}}
    for temperature in (0, 2):
        reply = drawing.post("/v1/chat/completions", messages=USER, max_tokens=9, temperature=temperature, **biased)
        assert json.loads(reply.json["choices"][0]["message"]["content"]) == {}
    ids = [str(number) for number in range(256, model.vocabulary)]
    told = complete(server, prompt="Q", logprobs=20, max_tokens=1, return_tokens_as_token_ids=True).json["choices"][0]
    assert not set(told["logprobs"]["top_logprobs"][0]) & {f"token_id:{one}" for one in ids if int(one) >= tokens}


@pytest.mark.parametrize("temperature", [1e-4, 1e-8, 1e-45, 5e-324])
def test_a_tiny_temperature_is_greedy(server: Server, drawing: Server, temperature: float) -> None:
    for asked, prompt in ((server, "Q"), (drawing, "hello")):
        ask = {"prompt": prompt, "max_tokens": 8, "ignore_eos": True}
        greedy = text(asked, **ask)
        assert greedy and text(asked, **ask, temperature=temperature, top_p=0.5) == greedy


def test_a_seed_gives_the_same_tokens_whoever_is_beside_it(drawing: Server) -> None:
    seeded = {"prompt": "prompt", "temperature": 0.8, "seed": 42, "max_tokens": 16, "ignore_eos": True, "return_token_ids": True}  # fmt: skip

    def ids(**more: Any) -> tuple[int, ...]:
        return tuple(complete(drawing, **{**seeded, **more}).json["choices"][0]["token_ids"])

    alone, loose = ids(), set()
    with ThreadPoolExecutor(16) as pool:
        for others in (1, 4, 9, 15):
            beside = [pool.submit(ids, seed=None) for _ in range(others)] + [pool.submit(ids, seed=7)]
            assert pool.submit(ids).result() == alone
            loose |= {one.result() for one in beside[:-1]}
    assert len(loose) > 1


def test_prompts_with_shared_beginnings_give_the_same_from_the_cache_and_without_it(drawing: Server) -> None:
    """A salt of its own keeps a prompt from all that is cached. 2,000 by hand: RVLLM_PREFIX_PROMPTS."""
    dice = random.Random(5)
    stems = [[dice.randrange(1, 256) for _ in range(260)] for _ in range(8)]
    prompts = [
        [*dice.choice(stems)[: dice.randint(0, 260)], *(dice.randrange(1, 256) for _ in range(dice.randint(32, 40)))]
        for _ in range(int(os.environ.get("RVLLM_PREFIX_PROMPTS", "60")))
    ]

    def told(prompt: list[int], **salt: str) -> tuple[list[int], float, int]:
        ask = {"max_tokens": 3, "ignore_eos": True, "return_token_ids": True, "logprobs": 0}
        reply = complete(drawing, prompt=prompt, **ask, **salt).json
        (choice,) = reply["choices"]
        score = sum(choice["logprobs"]["token_logprobs"])
        return choice["token_ids"], score, reply["usage"]["prompt_tokens_details"]["cached_tokens"]

    with ThreadPoolExecutor(4) as pool:
        cached = list(pool.map(told, prompts))
        alone = [pool.submit(told, prompt, cache_salt=f"{number}") for number, prompt in enumerate(prompts)]
        for (ids, score, _), other in zip(cached, alone):
            assert other.result() == (ids, pytest.approx(score, abs=1e-4), 0)
    assert sum(hits for *_, hits in cached) > 30 * len(prompts)


def test_log_probabilities_are_finite_whatever_is_impossible(server: Server, drawing: Server) -> None:
    """`Answer.json` reads no NaN and no Infinity."""
    ids = {str(number): -100 for number in range(256) if number != ord("Q")}
    for more in ({"echo": True, "top_k": 1, "temperature": 1}, {"logit_bias": ids}, {"temperature": 0}):
        for asked in (server, drawing):
            reply = complete(asked, prompt="QQ", logprobs=5, max_tokens=4, ignore_eos=True, **more)
            scored = reply.json["choices"][0]["logprobs"]
            assert all(math.isfinite(one) for one in scored["token_logprobs"] if one is not None)
            assert all(one is not None for one in scored["token_logprobs"][-4:])
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["a", "b"]}}}
    told = drawing.post(
        "/v1/chat/completions", messages=USER, response_format=schema, logprobs=True, top_logprobs=5, max_tokens=20
    )
    for one in told.json["choices"][0]["logprobs"]["content"]:
        assert all(math.isfinite(other["logprob"]) for other in (one, *one["top_logprobs"]))


def test_penalties_count_what_they_are_defined_to_count(two: tuple[TinyModel, Server]) -> None:
    model, server = two
    cases = [({}, "X"), ({"repetition_penalty": 1.2}, "Y"), ({"presence_penalty": 2}, "X"), ({"frequency_penalty": 2}, "X")]  # fmt: skip
    for more, said in cases:
        for prompt in ("XQ", model.ids("X", "Q")):
            ask = {"prompt": prompt, "max_tokens": 1, **more}
            assert text(server, **ask) == said
            many = complete(server, **{**ask, "prompt": [prompt] * 3}).json["choices"]
            assert [one["text"] for one in many] == [said] * 3


def test_a_prompt_that_is_empty_has_its_bos_or_is_refused(two: tuple[TinyModel, Server], server: Server) -> None:
    _, with_bos = two
    for prompt, tokens in (("", 1), ([""], 1), (["a", ""], 3)):
        reply = complete(with_bos, prompt=prompt, max_tokens=1)
        assert (reply.status, reply.json["usage"]["prompt_tokens"]) == (200, tokens)
        refused(complete(server, prompt=prompt), "prompt")
    for asked in (server, with_bos):
        for prompt in ([], [[]]):
            refused(complete(asked, prompt=prompt), "prompt")
        refused(asked.post("/v1/chat/completions", messages=[]), "messages")
        empty = [{"role": "user", "content": ""}]
        assert asked.post("/v1/chat/completions", messages=empty, max_tokens=2).status == 200


def test_a_prompt_has_one_bos_whoever_writes_it(two: tuple[TinyModel, Server]) -> None:
    model, server = two
    bos = model.id(BOS)
    for body in ({"messages": USER}, {"prompt": "hi"}, {"prompt": f"{BOS}hi"}):
        told = server.post("/tokenize", **body).json["tokens"]
        assert (told[0], told.count(bos)) == (bos, 1), body
    assert complete(server, prompt=f"{BOS}hi", max_tokens=1).json["usage"]["prompt_tokens"] == 3
    reply = server.post("/v1/chat/completions", messages=USER, max_tokens=1).json
    assert reply["usage"]["prompt_tokens"] == server.post("/tokenize", messages=USER).json["count"]


# --- Lengths and what is counted


def test_max_tokens_is_cut_to_the_room_that_a_long_prompt_leaves(server: Server) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        chat = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "y" * 80}], ignore_eos=True, **{name: 65535})  # fmt: skip
        assert chat.json["usage"]["total_tokens"] == CONTEXT
        assert chat.json["choices"][0]["finish_reason"] == "length"
    reply = complete(server, prompt="Q" * 100, max_tokens=65535).json
    assert reply["usage"]["completion_tokens"] == CONTEXT - 100 and reply["choices"][0]["finish_reason"] == "length"
    assert complete(server, prompt="Q", max_tokens=None).json["usage"]["completion_tokens"] == 16


def test_no_tokens_are_an_empty_text_or_the_scored_prompt(server: Server) -> None:
    reply = complete(server, prompt="Qab", max_tokens=0).json
    assert reply["choices"][0]["finish_reason"] == "length" and not reply["choices"][0]["text"]
    assert reply["usage"]["completion_tokens"] == 0


def test_usage_counts_every_completion_and_the_prompt_once(server: Server) -> None:
    ask = {"prompt": "xQ", "n": 3, "max_tokens": 5, "ignore_eos": True}
    *events, last = complete(server, **ask, stream=True, stream_options={"include_usage": True}).events
    assert last["usage"] == complete(server, **ask).json["usage"] | {"prompt_tokens_details": last["usage"]["prompt_tokens_details"]}  # fmt: skip
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (2, 15)
    ends = [event["choices"][0]["index"] for event in events if event["choices"][0]["finish_reason"]]
    assert sorted(ends) == [0, 1, 2] and not any(event.get("usage") for event in events)


# --- Names, bodies, keys


def test_a_model_that_is_not_served_is_told_by_those_that_are(server: Server, model: TinyModel) -> None:
    for name in ("nope", "", str(model.folder)):
        answer = complete(server, prompt="x", model=name)
        assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")
        assert "m1, m2" in answer.error["message"]
    for body, name in (({"model": "m2"}, "m2"), ({"model": "m1"}, "m1"), ({}, "m1")):
        assert complete(server, prompt="x", **body).json["model"] == name


@pytest.mark.parametrize("data", ['{"prompt": "你好"}'.encode("gbk"), b'\xef\xbb\xbf{"prompt": "x"}', b"\xff\xfe"])
def test_a_body_in_another_encoding_is_told_so_in_utf_8(server: Server, data: bytes) -> None:
    connection = server.connect()
    connection.request("POST", "/v1/completions", data, dict(JSON))
    reply = connection.getresponse()
    told = json.loads(reply.read().decode("utf-8"))
    assert (reply.status, told["error"]["code"]) == (400, "invalid_json")
    connection.request("POST", "/v1/completions", b'{"prompt": "x"}', dict(JSON))
    assert json.loads(connection.getresponse().read())["choices"][0]["text"] == "hi"
    connection.close()


def test_what_a_body_has_to_have_is_named(server: Server) -> None:
    for path, name in (("/v1/completions", "prompt"), ("/v1/chat/completions", "messages")):
        for body in ({}, {"stream": True}):
            refused(server.post(path, **body), name)


def test_keys_are_asked_for_on_every_route_and_never_told(model: TinyModel, tmp_path: Path) -> None:
    how = ("--api-key", "K-secret", "--allowed-origins", '["https://page.example"]')
    with serving(model.folder, *how, folder=tmp_path / "server") as locked:
        right = {"authorization": "Bearer K-secret"}
        paths = locked.send("GET", "/openapi.json", headers=right).json["paths"]
        for path, methods in paths.items():
            for method in methods:
                answer = locked.send(method.upper(), path.replace("{model}", "m"), {} if method == "post" else None)
                assert answer.status == (200 if path in ("/", "/health", "/ping") else 401), (method, path)
        preflight = {
            "origin": "https://page.example",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        allowed = locked.send("OPTIONS", "/v1/chat/completions", headers=preflight)
        assert allowed.status in (200, 204)
        assert allowed.headers["access-control-allow-origin"] == "https://page.example"
        assert "POST" in allowed.headers["access-control-allow-methods"]
        assert "authorization" in allowed.headers["access-control-allow-headers"].lower()
        keyless = locked.send("POST", "/v1/chat/completions", {}, {**JSON, "origin": "https://page.example"})
        assert (keyless.status, keyless.error["code"]) == (401, "invalid_api_key")
        assert keyless.headers["access-control-allow-origin"] == "https://page.example"
        assert locked.send("POST", "/v1/completions", {"prompt": "x"}, {**JSON, **right}).status == 200
        assert b"K-secret" not in locked.send("GET", "/metrics", headers=right).body
        assert not any("K-secret" in line for line in locked.said)


# --- What templates see


def seen(server: Server, template: str, messages: list[dict[str, Any]] = USER, **more: Any) -> Answer:
    return server.post("/v1/chat/completions", messages=messages, chat_template=template, max_tokens=2, **more)


def test_a_template_is_told_the_date_and_has_no_tools_that_were_not_sent(server: Server) -> None:
    answer = seen(server, probe("strftime_now('%Y-%m-%d') ~ ':' ~ (tools is defined)"))
    days = {day.date().isoformat() for day in (datetime.datetime.now(), datetime.datetime.now(datetime.timezone.utc))}
    assert answer.status == 400 and any(f"PROBE:{day}:False" in answer.error["message"] for day in days)


def test_the_template_is_the_one_that_was_given_or_the_file_or_the_configurations(tmp_path: Path) -> None:
    made = chain_model(tmp_path / "model", ["a", EOS])
    listed = [{"name": name, "template": probe(f"'{name}'")} for name in ("default", "tool_use")]
    edit_json(made.folder / "tokenizer_config.json", {"chat_template": listed})
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]

    reader = ("--tool-call-parser", "hermes")  # for these templates write no calls

    def told(*arguments: str) -> str:
        with serving(made.folder, *arguments, folder=tmp_path / "server") as started:
            answers = [started.post("/v1/chat/completions", messages=USER, **one) for one in ({}, {"tools": tools})]
        return " ".join(answer.error["message"].partition("PROBE:")[2] for answer in answers)

    assert told(*reader) == "default tool_use"
    (made.folder / "chat_template.jinja").write_text(probe("'file'"), encoding="utf-8")
    assert told(*reader) == "file file"
    assert told(*reader, "--chat-template", probe("'given'")) == "given given"


def test_a_refused_role_is_a_wrong_request_streamed_or_not(server: Server) -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}x"
    for stream in (True, False):
        answer = seen(server, template, [{"role": "system", "content": "a"}, *USER], stream=stream)
        assert answer.status == 400 and "System role not supported" in answer.error["message"]
    assert seen(server, template).json["choices"][0]["message"]["content"] == "hi"


def test_a_call_without_a_text_is_no_none(server: Server) -> None:
    shown = "{% for m in messages %}[{{ m.role }}|{{ m.content }}|{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}]{% endfor %}"  # fmt: skip
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
    talk = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "7"},
    ]
    ids = server.post("/tokenize", messages=talk, chat_template=shown).json["tokens"]
    told = server.post("/detokenize", tokens=ids).json["prompt"]
    assert told == "[user|hi|][assistant||look][tool|7|]"


def test_no_calls_are_as_good_as_no_such_key(server: Server) -> None:
    template = "{% for m in messages %}{% if m.tool_calls is defined and m.tool_calls|length != 1 %}{{ raise_exception('no') }}{% endif %}{% endfor %}x"  # fmt: skip
    answers = [
        seen(server, template, [*USER, {"role": "assistant", "content": "a", **more}, *USER])
        for more in ({}, {"tool_calls": None}, {"tool_calls": []})
    ]
    assert [answer.status for answer in answers] == [200] * 3
    assert len({json.dumps(answer.json["usage"] | {"prompt_tokens_details": None}) for answer in answers}) == 1


def test_parts_are_one_text_or_parts_as_the_template_takes_them(server: Server) -> None:
    parts = [{"type": "text", "text": "AAA"}, {"type": "text", "text": "BBB"}]
    talk = [{"role": "user", "content": parts}]
    told = seen(server, probe("messages[0].content"), talk).error["message"]
    assert told.index("AAA") < told.index("BBB") and "'type'" not in told
    looping = "{% for part in messages[0].content %}{{ part.text }}-{% endfor %}"
    ids = server.post("/tokenize", messages=talk, chat_template=looping).json["tokens"]
    assert server.post("/detokenize", tokens=ids).json["prompt"] == "AAA-BBB-"
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x.example"}}]}]
    assert "images are not supported" in seen(server, looping, image).error["message"]


@pytest.mark.parametrize("prefill", ["Q!\n", "Q! ", "\tQ", "Q"])
def test_a_message_that_the_template_trims_is_continued(server: Server, prefill: str) -> None:
    template = "{% for m in messages %}<{{ m.content|trim }}><|im_end|>{% endfor %}"
    talk = [*USER, {"role": "assistant", "content": prefill}]
    how = {"continue_final_message": True, "add_generation_prompt": False, "chat_template": template}
    ids = server.post("/tokenize", messages=talk, **how).json["tokens"]
    told = server.post("/detokenize", tokens=ids).json["prompt"]
    assert told.rstrip().endswith(prefill.strip()) and told.count(IM_END) == 1
    reply = server.post("/v1/chat/completions", messages=talk, max_tokens=2, **how)
    assert reply.status == 200
    if prefill.endswith("Q"):
        assert reply.json["choices"][0]["message"]["content"] == "ab"


def test_no_template_of_a_request_gets_out_of_the_sandbox(server: Server, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    attacks = (
        "{{ lipsum.__globals__['os'].popen('touch " + str(touched) + "').read() }}",
        "{{ cycler.__init__.__globals__.os.system('touch " + str(touched) + "') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}x{% endfor %}",
    )
    status = Path(f"/proc/{server.process.pid}/status")

    def resident_kib() -> int:
        return int(status.read_text().split("VmRSS:")[1].split()[0])

    before = resident_kib()
    for attack in attacks:
        started_s = time.monotonic()
        assert seen(server, attack).status == 400 and time.monotonic() - started_s < 2
    assert not touched.exists() and resident_kib() - before < 200 << 10
    assert seen(server, "x").json["choices"][0]["message"]["content"] == "hi"
