"""What vLLM's own fields add to OpenAI's replies of `rvllm serve`, beside a forward pass of the same model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rvllm import LLM, SamplingParams
from tests.fixtures.models import EOS, TinyModel, chain_model, random_model
from tests.fixtures.servers import Server, serving

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return random_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(model.folder, "--max-model-len", "64", folder=tmp_path_factory.mktemp("server")) as started:
        yield started


@pytest.fixture(scope="module")
def scored(model: TinyModel) -> Any:
    """The prompt [5, 6, 7, 8] with the five likeliest at each of its places, by the Python API."""
    llm = LLM(model=str(model.folder), device="cpu", max_model_len=64)
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=5, ignore_eos=True)
    (output,) = llm.generate([[5, 6, 7, 8]], params)
    return output


def test_a_prompts_log_probabilities_are_told_by_ids_with_their_ranks(server: Server, scored: Any) -> None:
    ask = {"prompt": [5, 6, 7, 8], "max_tokens": 3, "temperature": 0, "ignore_eos": True, "prompt_logprobs": 5}
    (choice,) = server.post("/v1/completions", **ask).json["choices"]
    first, *others = choice["prompt_logprobs"]
    assert first is None and len(others) == 3
    for place, token, wanted in zip(others, [6, 7, 8], scored.prompt_logprobs[1:]):
        assert {int(one): told["logprob"] for one, told in place.items()} == pytest.approx(dict(wanted), abs=1e-6)
        by_rank = sorted((told for told in place.values() if told["rank"]), key=lambda told: told["rank"])
        assert [told["rank"] for told in by_rank][:5] == [1, 2, 3, 4, 5]
        assert [told["logprob"] for told in by_rank] == sorted((told["logprob"] for told in by_rank), reverse=True)
        own = place[str(token)]
        assert own["rank"] is None or own["logprob"] == by_rank[own["rank"] - 1]["logprob"]
        assert all(isinstance(told["decoded_token"], str) for told in place.values())


def test_those_of_a_chat_stand_in_the_reply(server: Server) -> None:
    asked = {"messages": USER, "max_tokens": 2, "prompt_logprobs": 0, "return_token_ids": True}
    reply = server.post("/v1/chat/completions", **asked).json
    ids = server.post("/tokenize", messages=USER).json["tokens"]
    assert reply["prompt_token_ids"] == ids and len(reply["prompt_logprobs"]) == len(ids)
    assert [list(place) for place in reply["prompt_logprobs"][1:]] == [[str(token)] for token in ids[1:]]
    assert len(reply["choices"][0]["token_ids"]) == 2 and "prompt_logprobs" not in reply["choices"][0]


def test_log_probabilities_of_a_prompt_may_be_fewer_in_its_echo(server: Server) -> None:
    asked = {"prompt": [5, 6, 7], "max_tokens": 1, "echo": True, "logprobs": 1, "prompt_logprobs": 4, "temperature": 0}
    (choice,) = server.post("/v1/completions", **asked).json["choices"]
    assert all(1 <= len(top) <= 2 for top in choice["logprobs"]["top_logprobs"][1:])
    assert all(4 <= len(place) <= 5 for place in choice["prompt_logprobs"][1:])


@pytest.mark.parametrize("more", [{"stream": True}, {"prompt_logprobs": 99}, {"prompt_logprobs": -1}])
def test_log_probabilities_of_a_prompt_that_are_not_had_are_refused(server: Server, more: dict[str, Any]) -> None:
    refused = server.post("/v1/completions", **{"prompt": "x", "prompt_logprobs": 1, **more})
    assert (refused.status, refused.error["param"]) == (400, "prompt_logprobs")


def test_token_ids_are_told_whole_and_in_streams(server: Server, scored: Any) -> None:
    ask = {"prompt": [5, 6, 7, 8], "max_tokens": 3, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    (choice,) = server.post("/v1/completions", **ask).json["choices"]
    assert choice["token_ids"] == list(scored.outputs[0].token_ids) and choice["prompt_token_ids"] == [5, 6, 7, 8]
    events = [event["choices"][0] for event in server.post("/v1/completions", **ask, stream=True).events]
    assert [token for event in events for token in event["token_ids"]] == choice["token_ids"]
    assert [event.get("prompt_token_ids") for event in events] == [[5, 6, 7, 8]] + [None] * (len(events) - 1)
    plain = server.post("/v1/completions", **{**ask, "return_token_ids": False}).json["choices"][0]
    assert "token_ids" not in plain and "prompt_token_ids" not in plain


def test_ids_of_a_streamed_chat_are_those_of_the_whole_one(server: Server) -> None:
    ask = {"messages": USER, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True, "n": 2}
    whole = server.post("/v1/chat/completions", **ask).json
    events = server.post("/v1/chat/completions", **ask, stream=True).events
    assert [event["prompt_token_ids"] for event in events if "prompt_token_ids" in event] == [whole["prompt_token_ids"]]
    for index in (0, 1):
        mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        told = [token for choice in mine for token in choice.get("token_ids", [])]
        assert told == whole["choices"][index]["token_ids"] and len(told) == 6


def test_tokens_may_be_shown_as_their_ids(server: Server) -> None:
    ask = {"messages": USER, "max_tokens": 2, "logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    (choice,) = server.post("/v1/chat/completions", **ask, return_token_ids=True).json["choices"]
    shown = [one["token"] for one in choice["logprobs"]["content"]]
    assert shown == [f"token_id:{token}" for token in choice["token_ids"]]


def test_prompts_are_cut_on_either_side(server: Server) -> None:
    def kept(**more: Any) -> Any:
        ask = {"prompt": [5, 6, 7, 8], "max_tokens": 1, "truncate_prompt_tokens": 2, "return_token_ids": True}
        return server.post("/v1/completions", **ask, **more).json["choices"][0]["prompt_token_ids"]

    assert (kept(), kept(truncation_side="left"), kept(truncation_side="right")) == ([7, 8], [7, 8], [5, 6])
    assert server.post("/v1/completions", prompt="x", truncation_side="top").error["param"] == "truncation_side"


@pytest.mark.parametrize(
    ("field", "asks", "nothing"),
    [
        ("length_penalty", 0.5, 1.0), ("detokenize", False, True), ("prompt_embeds", "x", None),
        ("logprob_token_ids", [1], []), ("vllm_xargs", {"a": 1}, {}), ("kv_transfer_params", {"a": 1}, {}),
    ],
)  # fmt: skip
def test_what_is_not_done_is_refused_by_name_unless_it_asks_for_nothing(
    server: Server, field: str, asks: object, nothing: object
) -> None:
    refused = server.post("/v1/completions", **{"prompt": "x", field: asks})
    assert (refused.status, refused.error["param"]) == (400, field)
    assert server.post("/v1/completions", **{"prompt": "x", "max_tokens": 1, field: nothing}).status == 200


def test_what_requests_do_not_say_the_server_says(tmp_path_factory: pytest.TempPathFactory) -> None:
    template = "{% if loud %}Q{% endif %}{{ messages[0].content }}{% if end %}Q{% endif %}"
    folder = tmp_path_factory.mktemp("model")
    made = chain_model(folder, ["z", EOS], also={"Q": list("abcdefgh")})
    kwargs = ("--default-chat-template-kwargs", '{"end": true, "loud": true}', "--chat-template", template)
    flags = ("--return-tokens-as-token-ids", "--enable-force-include-usage", *kwargs)
    with serving(made.folder, *flags, folder=tmp_path_factory.mktemp("server")) as habitual:
        ask: dict[str, Any] = {"messages": [{"role": "user", "content": "h"}], "max_tokens": 2, "logprobs": True}
        *_, chunk, _, usage = habitual.post("/v1/chat/completions", **ask, stream=True).events
        assert usage["usage"]["prompt_tokens"] == 3 and not usage["choices"]
        assert chunk["choices"][0]["logprobs"]["content"][0]["token"] == f"token_id:{made.id('b')}"
        own = {"chat_template_kwargs": {"loud": False}, "return_tokens_as_token_ids": False}
        reply = habitual.post("/v1/chat/completions", **ask, **own).json
        assert reply["usage"]["prompt_tokens"] == 2 and reply["choices"][0]["message"]["content"] == "ab"
        assert reply["choices"][0]["logprobs"]["content"][0]["token"] == "a"
        options = {"stream_options": {"include_usage": False}}
        assert habitual.post("/v1/chat/completions", **ask, **options, stream=True).events[-1]["choices"]


def test_an_event_may_have_several_tokens_but_for_the_first(tmp_path_factory: pytest.TempPathFactory) -> None:
    made = chain_model(tmp_path_factory.mktemp("model"), ["z", EOS], also={"Q": list("abcdefgh")})
    with serving(made.folder, "--stream-interval", "3", folder=tmp_path_factory.mktemp("server")) as spaced:
        ask: dict[str, Any] = {"prompt": "Q", "max_tokens": 8, "logprobs": 0, "return_token_ids": True, "stream": True}
        events = [event["choices"][0] for event in spaced.post("/v1/completions", **ask).events]
        assert [event["text"] for event in events] == ["a", "bcd", "efg", "h"]
        assert [len(event["token_ids"]) for event in events] == [1, 3, 3, 1]
        assert [event["logprobs"]["tokens"] for event in events[:2]] == [["a"], ["b", "c", "d"]]
        assert [event["finish_reason"] for event in events] == [None, None, None, "length"]
        stopped = spaced.post("/v1/completions", **{**ask, "stop": "de"}).events
        assert [event["choices"][0]["text"] for event in stopped] == ["a", "bc", ""]
        assert stopped[-1]["choices"][0]["stop_reason"] == "de"
