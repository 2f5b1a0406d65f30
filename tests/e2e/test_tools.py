"""Calls of tools and thoughts over HTTP, by OpenAI's client where it lets us: streamed, whole, asked for and ordered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from rvllm.text.answer import Families
from rvllm.text.tokenizer import Tokenizer
from rvllm.text.tool_calls import CallReader
from rvllm.text.tool_formats import Hermes, Llama, Mistral, Pythonic, QwenCoder
from tests.fixtures.engines import at_rest, until
from tests.fixtures.models import EOS, Options, TinyModel, chain_model, probe, random_model
from tests.fixtures.servers import Server, serving, starting

USER = [{"role": "user", "content": "hi"}]
HERMES = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for call in m.tool_calls or [] %}"
    "{{ '<tool_call>\n{\"name\": \"' + call.function.name + '\", \"arguments\": ' + (call.function.arguments | tojson) + '}\n</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 4}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"enum": [1, 2, 3]}},
}


def tool(name: str, parameters: Any = PARAMETERS) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}


TOOLS = [tool("get_w"), tool("other", {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": False})]  # fmt: skip
CALLING = ["Let me", " see.\n", '<tool_call>\n{"na', 'me": "get_w", "argu', 'ments": {"city": "Ro', 'me", "days": 1}}', "\n</tool_call>"]  # fmt: skip


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Says a few words and calls a tool."""
    return chain_model(tmp_path_factory.mktemp("model"), [*CALLING, EOS], Options(template=HERMES))


@pytest.fixture(scope="module")
def server(calling: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(calling.folder, "--served-model-name", "m", folder=tmp_path_factory.mktemp("server")) as started:
        yield started
        until(lambda: at_rest(started.stats()), 5)


@pytest.fixture(scope="module")
def random_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Draws anything that it may."""
    model = random_model(tmp_path_factory.mktemp("random"), options=Options(template=HERMES))
    with serving(model.folder, "--served-model-name", "m", folder=tmp_path_factory.mktemp("drawing")) as started:
        yield started


def both(server: Server, **more: Any) -> tuple[dict[str, Any], str]:
    """The message and the finish reason of a chat, which are the same streamed, joined as OpenAI's client joins them."""
    asked = {"model": "m", "messages": USER, "seed": 3, **more}
    whole = server.post("/v1/chat/completions", **asked).json["choices"][0]
    message: dict[str, Any] = {"content": "", "calls": {}, "reasoning": ""}
    reasons = []
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client:
        more = {name: asked.pop(name) for name in ("include_reasoning",) if name in asked}
        for chunk in client.chat.completions.create(**asked, stream=True, extra_body=more):
            (choice,) = chunk.choices
            message["content"] += choice.delta.content or ""
            extra = choice.delta.model_extra or {}
            assert extra.get("reasoning") == extra.get("reasoning_content")
            message["reasoning"] += extra.get("reasoning") or ""
            for call in choice.delta.tool_calls or []:
                known = message["calls"].setdefault(call.index, {"name": "", "arguments": "", "id": ""})
                assert call.function
                known["id"] += call.id or ""
                known["name"] += call.function.name or ""
                known["arguments"] += call.function.arguments or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    told = whole["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in told.get("tool_calls", [])]
    assert [(call["name"], call["arguments"]) for _, call in sorted(message["calls"].items())] == calls
    assert list(message["calls"]) == list(range(len(calls)))
    ids = [call["id"] for call in (*told.get("tool_calls", []), *message["calls"].values())]
    assert len(set(ids)) == len(ids) and all(ids)
    assert all(call["type"] == "function" for call in told.get("tool_calls", []))
    assert message["content"] == (told["content"] or "") and (told["content"] is not None or calls)
    assert message["reasoning"] == told.get("reasoning", "") == told.get("reasoning_content", "")
    assert reasons == [whole["finish_reason"]]
    return told, whole["finish_reason"]


def named(message: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in message["tool_calls"]]


def fits(name: str, arguments: Any) -> bool:
    if name == "other":
        return arguments in ({"on": True}, {"on": False})
    return set(arguments) == {"city", "days"} and len(arguments["city"]) <= 4 and arguments["days"] in (1, 2, 3)


def test_a_call_that_the_model_makes_is_read_as_its_template_writes_them(server: Server) -> None:
    message, reason = both(server, tools=TOOLS)
    assert (message["content"], reason) == ("Let me see.", "tool_calls")
    assert named(message) == [("get_w", {"city": "Rome", "days": 1})]
    assert both(server, tools=TOOLS, tool_choice="auto", n=1)[1] == "tool_calls"


def test_without_tools_or_with_none_to_be_called_it_is_text(server: Server) -> None:
    for more in ({}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}):
        message, reason = both(server, **more)
        assert (message["content"], reason) == ("".join(CALLING), "stop") and "tool_calls" not in message


def test_a_call_that_is_cut_off_is_its_beginning_and_says_length(server: Server) -> None:
    message, reason = both(server, tools=TOOLS, max_tokens=5)
    (call,) = message["tool_calls"]
    assert (reason, call["function"]) == ("length", {"name": "get_w", "arguments": '{"city": "Ro'})
    message, reason = both(server, tools=TOOLS, max_tokens=4)
    assert reason == "length" and message["content"] == "".join(CALLING[:4])


def test_log_probabilities_of_a_call_are_all_told(server: Server) -> None:
    asked = {"messages": USER, "tools": TOOLS, "logprobs": True}
    whole = server.post("/v1/chat/completions", **asked).json["choices"][0]["logprobs"]["content"]
    events = server.post("/v1/chat/completions", **asked, stream=True).events
    streamed = [one for event in events for one in (event["choices"][0]["logprobs"] or {}).get("content", [])]
    assert streamed == whole and len(whole) == len(CALLING) + 1


def test_every_call_that_must_be_follows_the_tools_schema(random_server: Server) -> None:
    names = set()
    for seed in range(6):
        message, reason = both(random_server, tools=TOOLS, tool_choice="required", seed=seed, parallel_tool_calls=False)
        ((name, arguments),) = named(message)
        assert fits(name, arguments) and reason == "tool_calls" and message["content"] is None
        names.add(name)
    assert len(names) == 2
    for seed in range(3):
        message, reason = both(random_server, tools=TOOLS, tool_choice="required", seed=seed)
        assert all(fits(*one) for one in named(message)) and reason == "tool_calls"
        choice = {"type": "function", "function": {"name": "other"}}
        message, reason = both(random_server, tools=TOOLS, tool_choice=choice, seed=seed)
        assert [name for name, _ in named(message)] == ["other"] and fits(*named(message)[0]) and reason == "stop"


def test_tools_and_what_they_said_reach_the_template(tmp_path: Path) -> None:
    shown = "messages | tojson ~ (tools | tojson if tools else '-')"
    model = chain_model(tmp_path / "model", ["a", EOS], Options(template=probe(shown)))
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "get_w", "arguments": '{"city": "Rome"}'}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]  # fmt: skip
    hides = "--exclude-tools-when-tool-choice-none"
    with serving(model.folder, "--tool-call-parser", "hermes", hides, folder=tmp_path / "server") as probing:
        asked = {"messages": messages, "tools": TOOLS}
        told = probing.post("/v1/chat/completions", **asked).error["message"]
        assert '"arguments": {"city": "Rome"}' in told and '"rain"' in told and '"get_w", "description"' in told
        told = probing.post("/v1/chat/completions", **asked, tool_choice="none").error["message"]
        assert '"rain"' in told and told.endswith("-")


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": [{"type": "code", "function": {"name": "f"}}]}, "tools"),
        ({"tools": [tool("")]}, "tools"),
        ({"tools": [tool("f", [1])]}, "tools"),
        ({"tools": [tool("f")] * 513}, "tools"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tools": [tool("f", {"type": "strin"})], "tool_choice": "required"}, "structured_outputs"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_what_is_wrong_with_tools_is_named(server: Server, more: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        answer = server.post("/v1/chat/completions", messages=USER, stream=stream, **more)
        assert (answer.status, answer.error["param"]) == (400, param)


@pytest.mark.parametrize("flag", ["--tool-call-parser", "--reasoning-parser"])
def test_a_family_that_is_not_known_is_refused_with_those_that_are(
    calling: TinyModel, tmp_path: Path, flag: str
) -> None:
    with starting(calling.folder, flag, "klingon", folder=tmp_path / "server") as refused:
        assert refused.ended() == 1
        assert refused.told(f"{flag} klingon is not done") and refused.told("mistral")


def test_more_calls_than_one_only_where_they_are_wanted(tmp_path: Path) -> None:
    two = ["<tool_call>", '{"name": "get_w"}', "</tool_call>\n", "<tool_call>\n", '{"name": "other"}', "</tool_call>"]
    model = chain_model(tmp_path / "model", [*two, EOS], Options(template=HERMES))
    with serving(model.folder, "--served-model-name", "m", folder=tmp_path / "server") as twice:
        message, _ = both(twice, tools=TOOLS)
        assert named(message) == [("get_w", {}), ("other", {})] and message["content"] is None
        message, reason = both(twice, tools=TOOLS, parallel_tool_calls=False)
        assert named(message) == [("get_w", {})] and reason == "tool_calls"


FUNCTION = "{% for call in m.tool_calls or [] %}{% set f = call.function %}"
STYLES = {
    Hermes: FUNCTION + """{{ '\\n<tool_call>\\n' ~ (f | tojson) ~ '\\n</tool_call>' }}{% endfor %}""",
    Llama: FUNCTION
    + """{{ '{"name": "' ~ f.name ~ '", "parameters": ' ~ (f.arguments | tojson) ~ '}' }}{% endfor %}""",
    Mistral: FUNCTION
    + """{{ '[TOOL_CALLS] [{"name": "' ~ f.name ~ '", "arguments": ' ~ (f.arguments | tojson) ~ ', "id": "' ~ call.id ~ '"}]' }}{% endfor %}""",
    QwenCoder: FUNCTION
    + """{{ '<tool_call>\\n<function=' ~ f.name ~ '>\\n' }}{% for k, v in f.arguments.items() %}{{ '<parameter=' ~ k ~ '>\\n' ~ v ~ '\\n</parameter>\\n' }}{% endfor %}{{ '</function>\\n</tool_call>' }}{% endfor %}""",
    Pythonic: "{% if m.tool_calls %}[{% for call in m.tool_calls %}{{ call.function.name }}({% for k, v in call.function.arguments.items() %}{{ k }}={{ v | tojson }}{% endfor %}){% endfor %}]{% endif %}",
    None: "",
}


@pytest.mark.parametrize("reader", STYLES)
@pytest.mark.parametrize("thinks", [False, True])
def test_the_reader_of_calls_is_the_one_that_reads_what_the_template_writes(
    tmp_path: Path, reader: type[CallReader] | None, thinks: bool
) -> None:
    begin = "{{ '<|im_start|>assistant\n' }}" + ("{{ '<think>\n' }}" if thinks else "")
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
        + STYLES[reader]
        + "{{ '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}" + begin + "{% endif %}"
    )
    model = chain_model(tmp_path / "model", ["a", EOS], Options(template=template))
    found = Families.of(Tokenizer.from_pretrained(str(model.folder)), None, "")
    assert found.calls is reader


# --- Thoughts

THINKING = ["Hm,", " a", " b.", "\n</think>\n\n", "Yes", "."]
OPENED = HERMES.replace("assistant\n' }}", "assistant\n' }}{{ '<think>\n' if enable_thinking is not false else '' }}")


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = Options(template=OPENED)
    model = chain_model(tmp_path_factory.mktemp("thinking"), [*THINKING, EOS], options)
    flags = ("--served-model-name", "m", "--reasoning-parser", "qwen3")
    with serving(model.folder, *flags, folder=tmp_path_factory.mktemp("thinker")) as started:
        yield started


def test_thoughts_are_told_apart(thinking: Server) -> None:
    message, reason = both(thinking)
    assert (message["reasoning"], message["content"], reason) == ("Hm, a b.", "Yes.", "stop")
    message, _ = both(thinking, include_reasoning=False)
    assert (message.get("reasoning"), message["content"]) == (None, "Yes.")
    message, reason = both(thinking, max_tokens=2)
    assert (message["reasoning"], message["content"], reason) == ("Hm, a", "", "length")


def test_where_the_prompt_has_no_thoughts_there_are_none(thinking: Server) -> None:
    asked = {"messages": USER, "chat_template_kwargs": {"enable_thinking": False}}
    message = thinking.post("/v1/chat/completions", **asked).json["choices"][0]["message"]
    assert message["content"] == "".join(THINKING) and "reasoning" not in message


def test_a_form_is_that_of_the_answer_behind_the_thoughts(tmp_path: Path) -> None:
    model = random_model(tmp_path / "model", options=Options(template=OPENED, words=("</think>",)))
    flags = ("--served-model-name", "m", "--reasoning-parser", "qwen3")
    with serving(model.folder, *flags, folder=tmp_path / "server") as drawing:
        biases = {str(model.id("</think>")): 4}
        for seed in range(3):
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}}
            message, reason = both(drawing, response_format=form, seed=seed, logit_bias=biases)
            assert fits("get_w", json.loads(message["content"])) and message["reasoning"] and reason == "stop"
            message, reason = both(drawing, tools=TOOLS, tool_choice="required", seed=seed, logit_bias=biases)
            assert all(fits(*one) for one in named(message)) and message["reasoning"] and reason == "tool_calls"
