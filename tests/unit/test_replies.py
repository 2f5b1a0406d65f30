"""Events of streams that are put together from parts are, byte for byte, those that are made whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rvllm.api.admission import Admission
from rvllm.api.details import Details
from rvllm.api.front import Choice, Generation, Prompt
from rvllm.api.http import event
from rvllm.api.metrics import Metrics, Timeline
from rvllm.api.replies import MARK, ChatReply, CompletionReply, Reply
from rvllm.api.requests import StreamOptions
from rvllm.engine.request import Request
from rvllm.sampling.params import SamplingParams
from rvllm.text.answer import AnswerReader
from rvllm.text.completion import Delta, Writer
from rvllm.text.hf_tokenizer import TokenizerParts
from rvllm.text.reasoning import REASONING, ThoughtReader
from rvllm.text.token_text import TokenTexts
from rvllm.text.tokenizer import Tokenizer
from rvllm.text.tool_formats import READERS
from tests.fixtures.tiny_tokenizers import tiny_tokenizer

TOKENIZER = Tokenizer(TokenizerParts(tiny_tokenizer("bytelevel").load(), "here", {}, {}, add_bos=None))
TEXTS = TokenTexts(TOKENIZER)
FIGURES = Metrics("m", 100)
REQUEST = Request("r", (1, 2), SamplingParams(), 0)


def reply(kind: type[Reply], ids: bool, name: str, **more: Any) -> Reply:
    choices = [
        Choice(index, Prompt("x", (1, 2)), REQUEST, Writer(TOKENIZER, REQUEST), Timeline(FIGURES, 0.0, 2))
        for index in range(2)
    ]
    generation = Generation(name, choices, None, FIGURES, Admission(), 1)  # type: ignore[arg-type]
    return kind(generation, name, TEXTS, Details(TEXTS, ids), created_s=5, fingerprint="f", **more)


def thinking() -> AnswerReader:
    return AnswerReader(ThoughtReader(REASONING["qwen3"], opened=True))


def calling() -> AnswerReader:
    return AnswerReader(None, READERS["hermes"]({}))


MORE: dict[type[Reply], tuple[dict[str, Any], ...]] = {
    CompletionReply: ({}, {"echo": True}, {"top": 1}),
    ChatReply: ({}, {"reader": thinking}, {"thoughts": False, "reader": thinking}, {"reader": calling}),
}
OPTIONS = (StreamOptions(), StreamOptions(True), StreamOptions(True, True))
SOME = st.text(max_size=8) | st.sampled_from(['"\\\n\u2028', "</think>", MARK, "data: {}\n\n", "", "\N{HOT PEPPER}"])


@pytest.mark.parametrize("kind", MORE)
@given(data=st.data())
def test_events_of_texts_are_those_that_are_made_whole(kind: type[Reply], data: st.DataObject) -> None:
    options, more = data.draw(st.sampled_from(OPTIONS)), data.draw(st.sampled_from(MORE[kind]))
    ids, name = data.draw(st.booleans()), data.draw(st.sampled_from(("m", f'a"{MARK}')))
    quick, whole = (reply(kind, ids, name, options=options, **more) for _ in range(2))
    scores = ({97: -1.0},) if "top" in more else ()
    for place, text in enumerate(data.draw(st.lists(SOME, max_size=8))):
        index = data.draw(st.integers(0, 1)) if place else 0
        delta = Delta(text, (97,), scores, None, None)
        batches = [[(one.generation.choices[index], replace(delta))] for one in (quick, whole)]
        assert quick.events(batches[0]) == b"".join(map(event, whole.chunks(batches[1])))
    for one in (0, 1):
        last = Delta("z", (97,), scores, "stop", "z")
        batches = [[(each.generation.choices[one], last)] for each in (quick, whole)]
        assert quick.events(batches[0]) == b"".join(map(event, whole.chunks(batches[1])))


@pytest.mark.parametrize("kind", MORE)
def test_usual_texts_are_put_together(kind: type[Reply]) -> None:
    made = reply(kind, False, "m")
    for text in "ab":
        made.events([(made.generation.choices[0], Delta(text, (97,), (), None, None))])
    assert list(made.frames) == [0]
