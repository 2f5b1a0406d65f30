"""Requests as vLLM's own clients and guides send them, every field of its protocol, and what its flags make of replies."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rvllm.api.serving import fingerprint
from rvllm.config import EngineConfig, ServerConfig
from rvllm.engine.scheduler import Limits
from rvllm.link.messages import Facts
from rvllm.version import VERSION
from tests.fixtures.commands import rvllm
from tests.fixtures.models import EOS, Options, TinyModel, chain_model, probe
from tests.fixtures.servers import Answer, Server, serving

USER = [{"role": "user", "content": "hi"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
SHOWS = "{{ messages[0].content }}|{% if add_generation_prompt %}x{% endif %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """After x, and in a chat: " ok", end."""
    return chain_model(tmp_path_factory.mktemp("model"), [" ok", EOS])


@pytest.fixture(scope="module")
def server(model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(model.folder, "--served-model-name", "m", folder=tmp_path_factory.mktemp("server")) as started:
        yield started


def ask(server: Server, **body: Any) -> Answer:
    """A chat where there are messages, else a completion."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return server.post(path, **body)


# --- What vLLM's clients send


def test_its_bench_client_is_answered(server: Server) -> None:
    completion: dict[str, Any] = {
        "model": "m", "prompt": "x", "repetition_penalty": 1.0, "max_tokens": 8, "logprobs": None, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    *events, last = ask(server, **completion, ignore_eos=True, temperature=0.0).events
    assert "".join(event["choices"][0]["text"] for event in events).startswith(" ok")
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 8
    chat = completion | {"messages": PARTS[:1], "max_completion_tokens": 8}
    del chat["prompt"], chat["max_tokens"], chat["logprobs"]
    *events, last = ask(server, **chat).events
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == " ok"
    assert last["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "x", "max_tokens": 7, "temperature": 0},
        {"prompt": ["x", "x"], "n": 2, "use_beam_search": False, "best_of": 2},
        {"messages": USER, "structured_outputs": {"choice": ["positive", "negative"]}},
        {"messages": USER, "structured_outputs": {"regex": r"\w+@\w+\.com\n"}, "stop": ["\n"], "max_tokens": 9},
        {"messages": USER, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
        {"messages": USER, "guided_json": SCHEMA},
        {"messages": USER, "chat_template_kwargs": {"enable_thinking": False}, "top_k": 20, "min_p": 0},
        {"messages": [{"role": "assistant", "content": "o"}], "continue_final_message": True, "add_generation_prompt": False},
        {"messages": [{"role": "system", "content": [{"type": "text", "text": "a"}]}, *USER], "logprobs": True, "top_logprobs": 5},
        {"messages": [*USER, {"role": "assistant", "content": "a"}, *USER], "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ],
)  # fmt: skip
def test_its_guides_are_answered(server: Server, body: dict[str, Any]) -> None:
    assert ask(server, model="m", **({"max_tokens": 20} | body)).status == 200


# --- Every field of its protocol

HONOURED: dict[str, Any] = {
    "n": 2, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "temperature": 0.5,
    "top_p": 0.5, "top_k": 5, "min_p": 0.1, "seed": 1, "stop": ["b"], "stop_token_ids": [1], "ignore_eos": False,
    "max_tokens": 2, "min_tokens": 1, "prompt_logprobs": 1, "skip_special_tokens": False,
    "include_stop_str_in_output": True, "structured_outputs": {"choice": ["a"]}, "logit_bias": {"5": 1.0},
    "allowed_token_ids": [1, 2], "bad_words": ["c"], "truncate_prompt_tokens": 3, "truncation_side": "left",
    "response_format": {"type": "json_object"}, "priority": 1, "request_id": "a", "cache_salt": "a",
    "return_tokens_as_token_ids": True, "return_token_ids": True, "user": "a", "model": "m", "stream": False,
    "spaces_between_special_tokens": True, "use_beam_search": False, "length_penalty": 1.0, "detokenize": True,
    "vllm_xargs": {}, "kv_transfer_params": {}, "logprob_token_ids": [],
}  # fmt: skip
OF_COMPLETIONS: dict[str, Any] = {"echo": True, "add_special_tokens": False, "logprobs": 1, "suffix": ""}
OF_CHATS: dict[str, Any] = {
    "logprobs": True, "add_generation_prompt": True, "continue_final_message": False, "chat_template_kwargs": {"a": 1},
    "documents": [{"title": "a", "text": "b"}], "reasoning_effort": "low", "include_reasoning": True,
    "max_completion_tokens": 2, "parallel_tool_calls": True, "tools": [], "tool_choice": "none",
}  # fmt: skip
REFUSED: dict[str, Any] = {
    "best_of": 3, "use_beam_search": True, "length_penalty": 2.0, "detokenize": False, "prompt_embeds": "AA==",
    "logprob_token_ids": [1], "repetition_detection": {"max_pattern_size": 3}, "vllm_xargs": {"a": 1},
    "kv_transfer_params": {"a": 1}, "spaces_between_special_tokens": False,
    "prompt_logprob_token_ids": [1], "prompt_logprob_start": 1, "flat_logprobs": True, "output_kind": 1,
    "stream_interval": 2, "extra_args": {"a": 1}, "skip_reading_prefix_cache": True, "thinking_token_budget": 5,
    "watermarking": {"a": 1}, "trace_decode_token_ids": True, "routed_experts_prompt_start": 1, "session_id": "a",
    "return_token_offsets": True, "mm_processor_kwargs": {"a": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", HONOURED)
def test_a_field_is_honoured_or_changes_nothing(server: Server, name: str) -> None:
    for start in ({"prompt": "x"}, {"messages": USER}):
        answer = ask(server, **start, **({"max_tokens": 3} | {name: HONOURED[name]}))
        assert answer.status == 200, answer


@pytest.mark.parametrize(
    ("start", "name", "value"),
    [({"prompt": "x"}, *field) for field in OF_COMPLETIONS.items()]
    + [({"messages": USER}, *field) for field in OF_CHATS.items()],
)
def test_a_field_of_one_of_them_is_honoured(server: Server, start: dict[str, Any], name: str, value: Any) -> None:
    assert ask(server, **start, max_tokens=3, **{name: value}).status == 200


@pytest.mark.parametrize("name", [*REFUSED, "chat_template", "return_prompt_text", "suffix"])
def test_a_field_that_is_not_done_is_refused_by_its_name(server: Server, name: str) -> None:
    start = {"prompt": "x"} if name == "suffix" else {"messages": USER}
    answer = ask(server, **start, **{name: REFUSED.get(name, "a")})
    assert (answer.status, answer.error["param"]) == (400, name) and name in answer.error["message"]


# --- Flags about chats and replies


def test_a_chat_may_bring_its_template_where_it_is_trusted(model: TinyModel, server: Server, tmp_path: Path) -> None:
    refused = ask(server, messages=USER, chat_template=SHOWS)
    assert refused.error["param"] == "chat_template" and "--trust-request-chat-template" in refused.error["message"]
    assert server.post("/tokenize", messages=USER, chat_template=SHOWS).error["param"] == "chat_template"
    flags = ("--trust-request-chat-template", "--response-role", "bot", "--enable-tokenizer-info-endpoint")
    flags += ("--fingerprint-mode", "custom", "--fingerprint-value", "mine", "--enable-per-request-metrics")
    with serving(model.folder, *flags, folder=tmp_path / "server") as trusting:
        assert trusting.post("/tokenize", messages=USER, chat_template=SHOWS).json["tokens"] == model.encode("hi|x")
        whole = ask(trusting, messages=USER, chat_template=SHOWS).json
        assert whole["choices"][0]["message"] == {"role": "bot", "content": " ok", "refusal": None}
        assert whole["usage"]["prompt_tokens"] == len(model.encode("hi|x"))
        # What a user writes is no special token, whoever wrote the template; and that one is in the sandbox.
        end = [{"role": "user", "content": EOS}]
        assert model.id(EOS) not in trusting.post("/tokenize", messages=end, chat_template=SHOWS).json["tokens"]
        for broken in ("{{ ", "{{ ''.__class__.__mro__[1].__subclasses__() }}", probe("1 / 0")):
            answer = ask(trusting, messages=USER, chat_template=broken)
            assert (answer.status, answer.error["param"] in ("chat_template", "messages")) == (400, True), answer
        told = trusting.send("GET", "/openapi.json").json["components"]["schemas"]["ChatBody"]["properties"]
        assert told["chat_template"]["anyOf"] == [{"type": "string"}, {"type": "null"}]

        # The other flags of that server.
        assert whole["system_fingerprint"] == "mine"
        times = whole["metrics"]
        assert 0 < times["time_to_first_token_ms"] < 30_000 and times["queue_time_ms"] >= 0
        assert times["mean_itl_ms"] == pytest.approx(times["generation_time_ms"]) and times["tokens_per_second"] > 0
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *events, last = ask(trusting, messages=USER, **options).events
        assert [event["choices"][0]["delta"].get("role") for event in events][:2] == ["bot", None]
        assert last["metrics"]["tokens_per_second"] > 0 and not any("metrics" in event for event in events)
        assert "metrics" not in ask(trusting, prompt="x", n=2).json
        info = trusting.send("GET", "/tokenizer_info").json
        assert (info["eos_token"], info["tokenizer_class"]) == (EOS, "PreTrainedTokenizerFast")
        assert "messages" in info["chat_template"] and info["model_max_length"] == 2048
        assert info["added_tokens_decoder"][str(model.id(EOS))] == {"content": EOS, "special": True}


def test_what_is_not_asked_for_is_not_told(server: Server) -> None:
    whole = ask(server, messages=USER).json
    assert re.fullmatch(r"rvllm-[0-9.]+-[0-9a-f]{8}", whole["system_fingerprint"]) and "metrics" not in whole
    assert server.send("GET", "/tokenizer_info").status == 404


def test_a_template_sees_contents_as_it_is_said(tmp_path: Path) -> None:
    shows = "{% set parts = messages[0]['con' ~ 'tent'] %}{% for p in parts %}[{{ p.text }}]{% endfor %}"
    model = chain_model(tmp_path / "model", [" ok", EOS], Options(template=shows))
    flags = ("--chat-template-content-format", "openai", "--fingerprint-mode", "none")
    with serving(model.folder, *flags, folder=tmp_path / "server") as started:
        assert started.post("/tokenize", messages=PARTS).json["tokens"] == model.encode("[a][b]")
        reply = started.post("/v1/chat/completions", messages=USER, max_tokens=2).json
        assert (reply["usage"]["prompt_tokens"], reply["system_fingerprint"]) == (len("[hi]"), None)


def test_a_fingerprint_follows_from_the_settings() -> None:
    facts = Facts("m", "cpu", Limits(64, 16, 4, 1, 64, 64, vocab_limit=9, eos_ids=frozenset()), 20)
    whole, alone = (
        fingerprint(EngineConfig(), ServerConfig(fingerprint_mode=mode), facts) for mode in ("full", "hash")
    )
    assert whole == f"rvllm-{VERSION}-{alone}" and len(alone or "") == 8
    other = EngineConfig(kv_cache_dtype="fp8")
    assert fingerprint(other, ServerConfig(fingerprint_mode="hash"), facts) not in (alone, None)


@pytest.mark.parametrize("flags", [("--fingerprint-mode", "custom"), ("--fingerprint-value", "a")])
def test_a_fingerprint_of_ones_own_needs_both(flags: tuple[str, ...]) -> None:
    done = rvllm("serve", "m", *flags)
    assert done.returncode == 2 and "each needs the other" in done.stderr
