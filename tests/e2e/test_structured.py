"""Texts that must have a form, over HTTP: a model of random weights writes nothing else, however it is asked."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from rvllm import LLM, SamplingParams, StructuredOutputsParams
from rvllm.engine.request import Request
from rvllm.errors import BadRequest
from rvllm.link.client import EngineClient
from tests.fixtures.commands import rvllm
from tests.fixtures.engines import at_rest, until
from tests.fixtures.models import Options, TinyModel, random_model
from tests.fixtures.servers import Answer, Server, serving

USER = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "kind": {"enum": ["a", 'é"']},
        "name": {"type": "string", "maxLength": 5},
    },
    "required": ["ok", "kind", "name"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    words = ('{"', '":', "true", "alse", '"kind', "ok", ' "', "  ")
    return random_model(tmp_path_factory.mktemp("model"), options=Options(words=words, max_positions=4096))


@pytest.fixture(scope="module", params=["bare", "guessing", "fronts"])
def server(
    model: TinyModel, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    guesses = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}'
    more = {"bare": (), "guessing": ("--speculative-config", guesses), "fronts": ("--api-server-count", "2")}
    with serving(
        model.folder, *more[request.param], "--seed", "1", folder=tmp_path_factory.mktemp("server")
    ) as started:
        yield started
        until(lambda: at_rest(started.stats()), 5)


def chat(server: Server, **more: Any) -> Answer:
    return server.post("/v1/chat/completions", messages=USER, **more)


def right(text: str) -> bool:
    value = json.loads(text)
    assert set(value) == {"ok", "kind", "name"} and value["ok"] in (True, False) and value["kind"] in ("a", 'é"')
    return isinstance(value["name"], str) and len(value["name"]) <= 5


def test_every_completion_follows_the_schema_streamed_or_not(server: Server) -> None:
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
    with client:
        for seed in range(4):
            asked: dict[str, Any] = {"model": client.models.list().data[0].id, "messages": USER, "seed": seed, "n": 2}
            whole = client.chat.completions.create(**asked, response_format=FORMAT)
            texts = [choice.message.content or "" for choice in whole.choices]
            assert all(right(text) for text in texts)
            assert [choice.finish_reason for choice in whole.choices] == ["stop", "stop"]
            streamed = ["", ""]
            for chunk in client.chat.completions.create(**asked, response_format=FORMAT, stream=True):
                streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
            assert streamed == texts


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"structured_outputs": {"regex": "[a-c]{3}-[0-9]{2}"}}, "[a-c]{3}-[0-9][0-9]"),
        ({"structured_outputs": {"choice": ["red", "green", "gré"]}}, "red|green|gré"),
        ({"structured_outputs": {"grammar": 'start: "<" WORD{2,4} ">"\nWORD: /[xy]z/'}}, "<([xy]z){2,4}>"),
        ({"structured_outputs": {"json": {"type": "boolean"}}}, "true|false"),
        ({"guided_regex": "[ab]{2}"}, "[ab]{2}"),
        ({"guided_choice": ["one", "two"]}, "one|two"),
        ({"guided_grammar": 'root ::= "a" [0-9] "b"'}, "a[0-9]b"),
        ({"guided_json": {"type": "null"}}, "null"),
    ],
)
def test_every_kind_of_form_is_held_to_by_both_apis(server: Server, form: dict[str, Any], pattern: str) -> None:
    for seed in range(3):
        reply = chat(server, **form, seed=seed, temperature=1.5).json["choices"][0]
        assert re.fullmatch(pattern, reply["message"]["content"]), reply
        assert reply["finish_reason"] == "stop"
        reply = server.post("/v1/completions", prompt="x", max_tokens=99, **form, seed=seed).json["choices"][0]
        assert re.fullmatch(pattern, reply["text"]), reply


@pytest.mark.parametrize("spelled", ["structured_outputs", "response_format"])
def test_a_tag_in_a_free_text_has_its_form(server: Server, spelled: str) -> None:
    tag = {"begin": "<n>", "content": {"type": "json_schema", "json_schema": {"type": "integer"}}, "end": "</n>"}
    once = {"type": "triggered_tags", "triggers": ["<"], "tags": [tag], "stop_after_first": True}
    whole = {"type": "structural_tag", "format": once}
    form = {spelled: whole if spelled == "response_format" else {"structural_tag": json.dumps(whole)}}
    biases = {str(ord("<")): 100}  # or it would hardly come to begin one
    for stream in (False, True):
        answer = chat(server, **form, logit_bias=biases, stream=stream, temperature=0)
        said = "".join(event["choices"][0]["delta"].get("content", "") for event in answer.events) if stream else answer.json["choices"][0]["message"]["content"]  # fmt: skip
        assert re.fullmatch(r"<n>-?[0-9]+</n>", said), said


def test_any_object_of_json(server: Server, model: TinyModel) -> None:
    biases = {str(ord("}")): 100, str(model.id('{"')): -100}  # or it would take long to come to an end
    reply = chat(server, response_format={"type": "json_object"}, logit_bias=biases).json["choices"][0]
    assert (reply["message"]["content"], reply["finish_reason"]) == ("{}", "stop")


def test_a_text_that_is_cut_off_says_so_and_is_the_beginning_of_one(server: Server) -> None:
    reply = chat(server, response_format=FORMAT, max_tokens=3, logprobs=True, top_logprobs=2).json["choices"][0]
    assert reply["finish_reason"] == "length" and reply["message"]["content"].startswith("{")
    assert len(reply["logprobs"]["content"]) == 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("form", "param", "said"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strin"}}}}, "structured_outputs", "strin"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format", "schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "schema"),
        ({"response_format": {"type": "xml"}}, "response_format", "xml"),
        ({"response_format": {}}, "response_format", "type"),
        ({"structured_outputs": {"json": {"type": "object", "properties": 5}}}, "structured_outputs", "properties"),
        ({"structured_outputs": {"json": {"$ref": "#/nope"}}}, "structured_outputs", "nope"),
        ({"structured_outputs": {"json": {"$ref": "#"}}}, "structured_outputs", ""),
        ({"structured_outputs": {"json": {"type": "string", "pattern": "("}}}, "structured_outputs", "unclosed"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", ""),
        ({"structured_outputs": {"grammar": "start: foo"}}, "structured_outputs", "foo"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "choice"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "structural_tag"),
        ({"structured_outputs": {"regex": "a" * 20_000}, "n": 1000}, "structured_outputs", "in all"),
        ({"structured_outputs": {"regex": "a" * (5 << 20)}}, "structured_outputs", "the limit is 4,194,304"),
        ({"structured_outputs": {"regex": "a"}, "guided_regex": "a"}, "structured_outputs", "one of them"),
        ({"structured_outputs": {"regex": "a"}, "allowed_token_ids": [1]}, "allowed_token_ids", "structured_outputs"),
    ],
)  # fmt: skip
def test_what_cannot_be_held_to_is_a_400_with_the_reason(
    server: Server, form: dict[str, Any], param: str, said: str, stream: bool
) -> None:
    answer = chat(server, **form, stream=stream)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert said in answer.error["message"] and len(answer.error["message"]) < 600


def test_heavy_forms_are_answered_in_time_and_leave_others_alone(server: Server) -> None:
    heavy: list[dict[str, Any]] = [
        {"regex": "(a{1,1000}){1,1000}"},
        {"regex": "(.*a){20}(.*b){20}.{200}c"},
        {"json": {"enum": ["x" * 10 + str(number) for number in range(60_000)]}},
        {"json": {"type": "object", "properties": {"a": {"$ref": "#"}}}},
        {"grammar": "start: " + "(" * 5000},
        {"json": '{"properties":{"a":' * 900 + "{}" + "}}" * 900},
    ]
    with ThreadPoolExecutor(2) as pool:
        beside = pool.submit(chat, server, max_tokens=600, ignore_eos=True, seed=3)
        for form in heavy:
            begin_s = time.monotonic()
            answer = chat(server, structured_outputs=form, max_tokens=5)
            assert answer.status in (200, 400), answer
            assert answer.status == 200 or answer.error["param"] == "structured_outputs"
            assert time.monotonic() - begin_s < 2
        assert beside.result().json["usage"]["completion_tokens"] == 600


def test_many_at_once_each_get_their_own_form(server: Server) -> None:
    def one(number: int) -> None:
        if number % 3 == 2:
            assert chat(server, max_tokens=40, ignore_eos=True).json["usage"]["completion_tokens"] == 40
            return
        words = [f"{number}x{place}" for place in range(3)]
        text = chat(server, structured_outputs={"choice": words}, seed=number).json["choices"][0]["message"]["content"]
        assert text in words

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(one, range(48)))


def test_the_servers_settings_hold_for_forms_that_do_not_say(model: TinyModel, tmp_path: Path) -> None:
    config = '{"backend": "xgrammar", "disable_any_whitespace": true, "disable_additional_properties": true}'
    open_schema = {name: value for name, value in SCHEMA.items() if name != "additionalProperties"}
    with serving(model.folder, "--structured-outputs-config", config, folder=tmp_path / "server") as strict:
        front = strict.engine()  # one that does not say what tokens stand for: the server has, at its start
        form = SamplingParams(max_tokens=9, structured_outputs={"choice": ["a"]})  # type: ignore[arg-type]
        until(lambda: _answered(front, Request("own", (1,), form, 0)), 5)
        front.close()
        for seed in range(3):
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": open_schema}}
            text = chat(strict, response_format=form, seed=seed).json["choices"][0]["message"]["content"]
            assert right(text) and "\n" not in text and not re.search(r'[{,:] |[^"] [}"]', text), text
            assert (
                chat(strict, structured_outputs={"choice": ["a b"]}).json["choices"][0]["message"]["content"] == "a b"
            )


def test_random_clients_that_ask_for_forms_leave_nothing_behind(server: Server) -> None:
    chance = random.Random(5)
    words = [f"word{number}" for number in range(50)]
    tool = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
    bodies: list[dict[str, Any]] = [
        {"structured_outputs": {"choice": words}},
        {"structured_outputs": {"regex": "(a|b)*"}, "max_tokens": 3000, "ignore_eos": True},
        {"structured_outputs": {"json": {"enum": ["x" * 9 + str(number) for number in range(9_000)]}}},
        {"structured_outputs": {"regex": "("}},
        {"response_format": FORMAT, "n": 3},
        {"tools": [tool], "tool_choice": "required", "max_tokens": 50},
        {"max_tokens": 30, "ignore_eos": True},
    ]

    def visit(number: int, body: dict[str, Any], leaves_s: float | None) -> None:
        if body is bodies[2]:  # no two of these alike: each is compiled
            body = {"structured_outputs": {"json": {"enum": [f"{number}x{one}" for one in range(9_000)]}}}
        if leaves_s is None and "ignore_eos" not in body:
            assert chat(server, **body, stream=bool(number % 2)).status == (400 if body is bodies[3] else 200)
            return
        connection = server.connect()
        asked = json.dumps({"messages": USER, "stream": bool(number % 2), **body})
        connection.request("POST", "/v1/chat/completions", asked, {"content-type": "application/json"})
        time.sleep(leaves_s or 0.1)
        connection.close()

    with ThreadPoolExecutor(16) as pool:
        asked = [(number, chance.choice(bodies), chance.choice((None, None, 0.0, 0.05, 0.3))) for number in range(120)]
        for done in [pool.submit(visit, *one) for one in asked]:
            done.result()
    until(lambda: at_rest(server.stats()), 20)


def _answered(front: EngineClient, request: Request) -> bool:
    try:
        return bytes(event.token_id for event in front.stream(request)) == b"a"
    except BadRequest:
        return False  # it is just being told


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('{"enable_in_reasoning": true}', "behind thoughts"),
        ('{"disable_any_whitespace": 1}', "true or false"),
        ('{"odd": 1}', "odd"),
        ("[]", "not an object"),
    ],
)
def test_settings_that_are_not_done_are_refused(config: str, said: str) -> None:
    refused = rvllm("serve", "x", "--structured-outputs-config", config)
    assert refused.returncode == 2 and said in refused.stderr


def test_a_client_that_goes_away_takes_its_request_along(server: Server) -> None:
    body = {"messages": USER, "structured_outputs": {"regex": "(a|b)*"}, "max_tokens": 3000, "ignore_eos": True}
    connection = server.connect()
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    until(lambda: server.stats().load.running == 1, 5)
    connection.close()
    until(lambda: at_rest(server.stats()), 5)


def test_blanks_of_tokens_count_where_a_tokenizer_spells_them(tmp_path: Path) -> None:
    words = ('{"', "  ", "   tw", " o")
    model = random_model(tmp_path / "model", options=Options(tokenizer="spm", words=words))
    llm = LLM(str(model.folder), device="cpu", seed=1)
    forms = [{"choice": ["a   two", " two", "  o"]}, {"json": SCHEMA, "disable_any_whitespace": True}]
    for number, form in enumerate(forms):
        params = SamplingParams(n=6, max_tokens=200, structured_outputs=form)  # type: ignore[arg-type]
        texts = [one.text for one in llm.generate("x", params)[0].outputs]
        assert all(right(text) if number else text in forms[0]["choice"] for text in texts), texts


def test_the_python_api_holds_to_forms_too(model: TinyModel) -> None:
    llm = LLM(str(model.folder), device="cpu", seed=1)
    params = SamplingParams(n=3, max_tokens=300, structured_outputs=StructuredOutputsParams(json=SCHEMA))  # type: ignore[arg-type]
    outputs = llm.generate(["x", "y"], params)
    assert all(right(one.text) and one.finish_reason == "stop" for output in outputs for one in output.outputs)
    streamed = llm.stream([1, 2], SamplingParams(max_tokens=9, structured_outputs={"choice": ["no"]}))  # type: ignore[arg-type]
    assert "".join(delta.text for delta in streamed) == "no"
