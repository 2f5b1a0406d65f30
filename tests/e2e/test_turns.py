"""The Responses and the Messages API, by the clients of those who made them: streamed and whole are the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.e2e.test_tools import HERMES, OPENED, PARAMETERS, TOOLS, fits
from tests.fixtures.engines import at_rest, until
from tests.fixtures.models import EOS, Options, chain_model, loop_model, probe, random_model
from tests.fixtures.servers import Server, serving

SAID = ["Hm,", " a.", "\n</think>\n\n", "Let me", " see.\n", '<tool_call>\n{"na', 'me": "get_w", "argu', 'ments": {"city": "Ro', 'me", "days": 1}}', "\n</tool_call>"]  # fmt: skip
FUNCTIONS = [{"type": "function", **tool["function"]} for tool in TOOLS]
CUSTOM = [
    {"name": one["function"]["name"], "description": "d", "input_schema": one["function"]["parameters"]}
    for one in TOOLS
]
CALLED = {"city": "Rome", "days": 1}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Thinks, says a few words and calls a tool."""
    model = chain_model(tmp_path_factory.mktemp("model"), [*SAID, EOS], Options(template=OPENED))
    flags = ("--served-model-name", "m", "--reasoning-parser", "qwen3", "--api-key", "secret")
    with serving(model.folder, *flags, folder=tmp_path_factory.mktemp("server")) as started:
        yield started
        until(lambda: at_rest(started.stats()), 5)


@pytest.fixture(scope="module")
def random_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = random_model(tmp_path_factory.mktemp("random"), options=Options(template=HERMES))
    with serving(model.folder, "--served-model-name", "m", folder=tmp_path_factory.mktemp("drawing")) as started:
        yield started


@pytest.fixture
def claude(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=f"http://127.0.0.1:{server.port}", api_key="secret", auth_token=None, max_retries=0
    ) as made:
        yield made


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="secret", max_retries=0) as made:
        yield made


# --- Messages


def test_a_message_has_thoughts_text_and_calls_streamed_or_not(claude: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {
        "model": "m",
        "max_tokens": 50,
        "system": "Be good.",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": CUSTOM,
    }
    whole = claude.messages.create(**asked)
    thought, text, call = whole.content
    assert thought.type == "thinking" and thought.thinking == "Hm, a."
    assert text.type == "text" and text.text == "Let me see."
    assert call.type == "tool_use" and (call.name, call.input) == ("get_w", CALLED) and call.id
    assert (whole.stop_reason, whole.stop_sequence, whole.role, whole.type) == (
        "tool_use",
        None,
        "assistant",
        "message",
    )
    assert whole.usage.output_tokens == len(SAID) + 1 and whole.usage.input_tokens > 0
    kinds = []
    with claude.messages.stream(**asked) as stream:
        for event in stream:
            kinds.append(event.type)
        streamed = stream.get_final_message()
    assert [block.model_dump(exclude={"id"}) for block in streamed.content] == [
        block.model_dump(exclude={"id"}) for block in whole.content
    ]
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert streamed.usage.input_tokens == whole.usage.input_tokens
    assert (streamed.stop_reason, streamed.model) == ("tool_use", "m")
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
    tokens = claude.messages.count_tokens(
        model="m", messages=asked["messages"], system="Be good.", tools=asked["tools"]
    )
    assert tokens.input_tokens == whole.usage.input_tokens


def test_a_message_that_is_cut_or_stopped_says_so(claude: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    cut = claude.messages.create(**asked, max_tokens=2)
    assert cut.stop_reason == "max_tokens" and [block.type for block in cut.content] == ["thinking"]
    stopped = claude.messages.create(**asked, max_tokens=50, stop_sequences=["see"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "see")
    assert stopped.content[-1].type == "text" and stopped.content[-1].text == "Let me "
    plain = claude.messages.create(**asked, max_tokens=50, thinking={"type": "disabled"})
    assert [block.type for block in plain.content] == ["text"] and plain.stop_reason == "end_turn"
    assert plain.content[0].type == "text" and plain.content[0].text == "".join(SAID)


def test_what_is_wrong_with_a_message_is_told_in_anthropics_words(claude: anthropic.Anthropic, server: Server) -> None:
    user = [{"role": "user", "content": "hi"}]
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.messages.create(model="m", max_tokens=5, messages=user, extra_body={"temperature": -1})  # type: ignore[arg-type]
    assert caught.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    assert "temperature" in caught.value.body["error"]["message"]  # type: ignore[index]
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="other", max_tokens=5, messages=user)  # type: ignore[arg-type]
    key = {"x-api-key": "secret", "content-type": "application/json"}
    for body in (
        {"messages": user},
        {"messages": user, "max_tokens": 0},
        {"max_tokens": 5},
        {"max_tokens": 5, "messages": [{"role": "tool", "content": ""}]},
        {"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"max_tokens": 5, "messages": [{"role": "user", "content": 5}]},
        {"max_tokens": 5, "messages": user, "odd": 1},
        {"max_tokens": 5, "messages": user, "tools": [{"type": "bash_20250124", "name": "bash"}]},
        {"max_tokens": 5, "messages": user, "tools": CUSTOM, "tool_choice": {"type": "tool", "name": "nobody"}},
        {"max_tokens": 5, "messages": user, "tool_choice": {"type": "any"}},
        {"max_tokens": 5, "messages": user, "tool_choice": {"type": "maybe"}},
        {"max_tokens": 5, "messages": user, "thinking": {"type": "perhaps"}},
    ):
        answer = server.send("POST", "/v1/messages", body, key)
        assert answer.status == 400 and answer.json["type"] == "error", body
        assert answer.json["error"]["type"] == "invalid_request_error" and answer.json["error"]["message"]
    assert server.send("POST", "/v1/messages", {"max_tokens": 5, "messages": user}).status == 401


def test_a_conversation_with_calls_reaches_the_template(tmp_path: Path) -> None:
    model = chain_model(tmp_path / "model", ["a", EOS], Options(template=probe("messages | tojson")))
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "T", "signature": "s"}, {"type": "text", "text": "ok"}, {"type": "tool_use", "id": "t1", "name": "get_w", "input": CALLED}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]}, {"type": "text", "text": "so?"}]},
    ]  # fmt: skip
    expected = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ok", "reasoning_content": "T", "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "get_w", "arguments": CALLED}}]},
        {"role": "tool", "tool_call_id": "t1", "content": "rain"},
        {"role": "user", "content": "so?"},
    ]  # fmt: skip
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "T"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok", "annotations": []}]},
        {"type": "function_call", "call_id": "t1", "name": "get_w", "arguments": json.dumps(CALLED)},
        {"type": "function_call_output", "call_id": "t1", "output": "rain"},
        {"role": "user", "content": "so?"},
    ]
    with serving(model.folder, folder=tmp_path / "server") as probing:
        told = probing.post("/v1/messages", max_tokens=5, system="S", messages=messages).json["error"]["message"]
        assert json.loads(told.removeprefix("PROBE:")) == expected
        told = probing.post("/v1/responses", instructions="S", input=items).error["message"]
        assert json.loads(told.removeprefix("PROBE:")) == expected


# --- Responses


def test_a_response_has_thoughts_text_and_calls_streamed_or_not(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "m", "instructions": "Be good.", "input": "hi", "tools": FUNCTIONS}
    whole = client.responses.create(**asked)
    thought, message, call = whole.output
    assert thought.type == "reasoning" and thought.content and thought.content[0].text == "Hm, a."
    assert message.type == "message" and whole.output_text == "Let me see."
    assert call.type == "function_call" and (call.name, json.loads(call.arguments)) == ("get_w", CALLED)
    assert (whole.status, whole.incomplete_details, whole.error, whole.model) == ("completed", None, None, "m")
    assert whole.usage and whole.usage.output_tokens == len(SAID) + 1
    assert whole.usage.output_tokens_details.reasoning_tokens == 3
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    assert [event.sequence_number for event in events if hasattr(event, "sequence_number")] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3

    def shown(response: Any) -> list[Any]:
        return [
            item.model_dump(exclude={"id", "call_id", "parsed_arguments"}, exclude_none=True)
            for item in response.output
        ]

    for mine, other in zip(shown(streamed), shown(whole)):
        for part in (*(mine.get("content") or ()), *(other.get("content") or ())):
            part.pop("parsed", None)
        assert mine == other
    joined = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert joined == "Let me see."
    arguments = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    assert json.loads(arguments) == CALLED


def test_a_response_that_is_cut_off_is_incomplete(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "m", "input": [{"role": "user", "content": "hi"}], "max_output_tokens": 4}
    whole = client.responses.create(**asked)
    assert whole.status == "incomplete" and whole.incomplete_details
    assert whole.incomplete_details.reason == "max_output_tokens" and whole.output_text == "Let me"
    *_, last = client.responses.create(**asked, stream=True)
    assert last.type == "response.incomplete" and last.response.output_text == "Let me"


def test_what_is_wrong_with_a_response_is_named(server: Server) -> None:
    key = {"authorization": "Bearer secret", "content-type": "application/json"}
    for body, param in (
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [5]}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "truncation": "auto"}, "truncation"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "temperature": -1}, "temperature"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "response_format"),
        ({"input": "x", "odd": 1}, "odd"),
    ):
        for stream in (False, True):
            answer = server.send("POST", "/v1/responses", {**body, "stream": stream}, key)
            assert (answer.status, answer.error["param"]) == (400, param), body


def test_forms_and_calls_that_must_be_follow_their_schemas(random_server: Server) -> None:
    format = {"type": "json_schema", "name": "x", "schema": PARAMETERS, "strict": True}
    for seed in range(3):
        reply = random_server.post("/v1/responses", input="hi", text={"format": format}, seed=seed).json
        assert fits("get_w", json.loads(reply["output"][0]["content"][0]["text"]))
        reply = random_server.post("/v1/responses", input="hi", tools=FUNCTIONS, tool_choice="required", seed=seed).json
        assert all(fits(item["name"], json.loads(item["arguments"])) for item in reply["output"]) and reply["output"]
        choice = {"type": "tool", "name": "other"}
        asked = {"messages": [{"role": "user", "content": "hi"}], "tools": CUSTOM, "max_tokens": 300}
        reply = random_server.post("/v1/messages", **asked, tool_choice=choice).json
        (block,) = reply["content"]
        assert block["name"] == "other" and fits("other", block["input"]) and reply["stop_reason"] == "tool_use"
        choice = {"type": "any", "disable_parallel_tool_use": True}
        (block,) = random_server.post("/v1/messages", **asked, tool_choice=choice).json["content"]
        assert fits(block["name"], block["input"])


def test_when_the_engine_dies_a_stream_ends_with_an_error_of_its_kind(tmp_path: Path) -> None:
    made = loop_model(tmp_path / "model", options=Options(max_positions=100_000))
    with serving(made.folder, "--shutdown-timeout", "0", folder=tmp_path / "server") as ending:
        bodies = {
            "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 90_000, "stream": True},
            "/v1/responses": {"input": "hi", "max_output_tokens": 90_000, "stream": True},
        }
        replies = []
        for path, body in bodies.items():
            connection = ending.connect()
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            replies.append((connection, connection.getresponse()))
            assert any(b"delta" in line for line in replies[-1][1])
        ending.process.terminate()
        last = [reply.read().split(b"\n\n")[-2].decode() for _, reply in replies]
        assert all(one.startswith("event: error\ndata: ") for one in last)
        message, response = (json.loads(one.partition("data: ")[2]) for one in last)
        assert message["error"]["type"] == "overloaded_error" and message["error"]["message"]
        assert response["type"] == "error" and response["message"] and response["sequence_number"] > 2
        for connection, _ in replies:
            connection.close()


def test_embeddings_are_refused_by_name(random_server: Server) -> None:
    answer = random_server.post("/v1/embeddings", model="m", input="x")
    assert answer.status == 400 and "no embeddings" in answer.error["message"]
