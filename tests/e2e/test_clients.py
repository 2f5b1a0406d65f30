"""What is built on OpenAI's client asks a server: LangChain and LiteLLM, as their users call them. Nothing else is reached."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.test_tools import CALLING, HERMES, PARAMETERS, TOOLS, fits
from tests.fixtures.engines import at_rest, until
from tests.fixtures.models import EOS, Options, chain_model, random_model
from tests.fixtures.servers import Server, serving

pytestmark = [
    pytest.mark.slow,
    # Both are of their own Python versions' and libraries' ages; what they warn of is not ours.
    pytest.mark.filterwarnings("default"),
]

USER = [{"role": "user", "content": "hi"}]
SAID = "Let me see."
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS, "strict": True}}
_reached: list[object] = []
_here = ("127.0.0.1", "localhost", "::1", None)


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    host = None
    if event == "socket.connect" and isinstance(arguments[1], tuple):
        host = arguments[1][0]
    elif event == "socket.getaddrinfo":
        host = arguments[0]
    if host not in _here:
        _reached.append(host)


sys.addaudithook(_watch)  # it cannot be taken away again, but only looks


@pytest.fixture(scope="module", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Connections that a library leaves open are complained of where they are collected: here, and in no later test."""
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def within_the_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("LANGSMITH_TRACING", "LANGCHAIN_TRACING_V2"):
        monkeypatch.setenv(name, "false")
    _reached.clear()
    yield
    assert not _reached


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Says a few words and calls a tool; after Q: a, b, c, d."""
    model = chain_model(
        tmp_path_factory.mktemp("model"), [*CALLING, EOS], Options(template=HERMES), also={"Q": [*"abcd"]}
    )
    flags = ("--served-model-name", "m", "--api-key", "secret")
    with serving(model.folder, *flags, folder=tmp_path_factory.mktemp("server")) as started:
        yield started
        until(lambda: at_rest(started.stats()), 5)


@pytest.fixture(scope="module")
def random_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = random_model(tmp_path_factory.mktemp("random"), options=Options(template=HERMES))
    with serving(model.folder, "--served-model-name", "m", folder=tmp_path_factory.mktemp("drawing")) as started:
        yield started


def url(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}/v1"


# --- LangChain


def lang(server: Server, **more: Any) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model="m", base_url=url(server), api_key="secret", max_retries=0, timeout=30, **more)


def test_langchain_invokes_streams_and_batches(server: Server) -> None:
    chat = lang(server, temperature=0, stream_usage=True)
    whole = chat.invoke("hi")
    assert whole.content.startswith(SAID) and whole.response_metadata["model_name"] == "m"
    assert (
        whole.usage_metadata["total_tokens"]
        == whole.usage_metadata["input_tokens"] + whole.usage_metadata["output_tokens"]
    )
    chunks = list(chat.stream("hi"))
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined += chunk
    assert len(chunks) > 5 and joined.content == whole.content
    assert joined.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]
    assert [one.content for one in chat.batch(["hi", "ho"])] == [whole.content] * 2
    assert asyncio.run(chat.ainvoke("hi")).content == whole.content


def test_langchain_is_told_log_probabilities(server: Server) -> None:
    scored = lang(server).bind(logprobs=True, top_logprobs=2, max_tokens=3).invoke("hi").response_metadata["logprobs"]
    assert len(scored["content"]) == 3 and all(len(one["top_logprobs"]) == 2 for one in scored["content"])


def test_langchain_binds_tools_and_goes_on_with_their_results(server: Server) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    bound = lang(server).bind_tools(TOOLS)
    asked = [HumanMessage("hi")]
    reply = bound.invoke(asked)
    (call,) = reply.tool_calls
    assert (call["name"], call["args"], reply.content) == ("get_w", {"city": "Rome", "days": 1}, SAID)
    streamed = None
    for chunk in bound.stream(asked):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None
    assert [(one["name"], one["args"]) for one in streamed.tool_calls] == [(call["name"], call["args"])]
    again = bound.invoke([*asked, reply, ToolMessage("fine", tool_call_id=call["id"])])
    assert again.content == SAID


def test_langchain_has_structured_output_by_schema_and_by_call(random_server: Server) -> None:
    schema = {"title": "get_w", "description": "d", **PARAMETERS}
    for method in ("json_schema", "function_calling"):
        for seed in range(2):
            found = lang(random_server, seed=seed).with_structured_output(schema, method=method).invoke("hi")
            assert fits("get_w", found)


def test_langchain_completes(server: Server) -> None:
    from langchain_openai import OpenAI

    completes = OpenAI(model="m", base_url=url(server), api_key="secret", max_retries=0, max_tokens=4, temperature=0)
    assert completes.invoke("Q") == "abcd"
    assert "".join(completes.stream("Q")) == "abcd"
    assert [one[0].text for one in completes.generate(["Q", "Q"]).generations] == ["abcd"] * 2


def test_langchain_speaks_the_responses_api(server: Server) -> None:
    reply = lang(server, use_responses_api=True).invoke("hi")
    assert reply.text.startswith(SAID) and reply.response_metadata["status"] == "completed"


# --- LiteLLM


@pytest.fixture(scope="module")
def litellm() -> Any:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it fetches prices when it is imported
    import litellm

    litellm.telemetry = False
    return litellm


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm_completes_chats_whole_streamed_and_async(litellm: Any, server: Server, provider: str) -> None:
    asked: dict[str, Any] = {
        "model": f"{provider}/m",
        "api_base": url(server),
        "api_key": "secret",
        "messages": USER,
        "temperature": 0,
        "num_retries": 0,
    }
    whole = litellm.completion(**asked).choices[0].message.content
    assert whole.startswith(SAID)
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
    assert chunks[-1].usage.completion_tokens > 5
    assert asyncio.run(litellm.acompletion(**asked)).choices[0].message.content == whole
    (call,) = litellm.completion(**asked, tools=TOOLS).choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_w", {"city": "Rome", "days": 1})


def test_litellm_completes_texts(litellm: Any, server: Server) -> None:
    asked: dict[str, Any] = {"model": "text-completion-openai/m", "api_base": url(server), "api_key": "secret", "prompt": "Q", "max_tokens": 4, "temperature": 0}  # fmt: skip
    assert litellm.text_completion(**asked).choices[0].text == "abcd"
    assert "".join(one.choices[0].text or "" for one in litellm.text_completion(**asked, stream=True)) == "abcd"


def test_litellm_asks_for_a_form_and_knows_our_errors(litellm: Any, random_server: Server) -> None:
    asked: dict[str, Any] = {"model": "hosted_vllm/m", "api_base": url(random_server), "api_key": "x", "messages": USER, "num_retries": 0}  # fmt: skip
    text = litellm.completion(**asked, response_format=FORMAT).choices[0].message.content
    assert fits("get_w", json.loads(text))
    with pytest.raises(litellm.BadRequestError, match="temperature is -1"):
        litellm.completion(**asked, temperature=-1)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**(asked | {"messages": [{"role": "user", "content": "x" * 9000}]}))
