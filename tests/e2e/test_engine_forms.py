"""Requests whose text must have a form, over a link: what becomes of them while their grammar is compiled.

The engine's model counts and knows no masks: a text of digits that goes on with the next number is right, any other ends
with an error of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from rvllm.engine.grammar import Vocabulary
from rvllm.engine.request import Request
from rvllm.errors import BadRequest
from rvllm.link.client import EngineClient, link_to
from rvllm.link.process import EngineProcess
from rvllm.sampling.params import SamplingParams
from rvllm.sampling.structured import StructuredOutputsParams
from tests.fixtures.engines import VOCAB, at_rest, numbers, running, until

HEAVY = StructuredOutputsParams(json={"enum": [f"{'x' * 10}{number}" for number in range(60_000)]})  # type: ignore[arg-type]
"""Takes a quarter of a second to compile."""


@pytest.fixture(scope="module")
def engine() -> Iterator[tuple[EngineProcess, EngineClient]]:
    with running() as (child, client):
        client.teach(Vocabulary(tuple(b"%d," % number for number in range(VOCAB)), frozenset()))
        yield child, client
        until(lambda: at_rest(client.stats()))


def formed(name: str, form: StructuredOutputsParams, first: int = 5, most: int = 50) -> Request:
    params = SamplingParams(max_tokens=most, structured_outputs=form)
    return Request(name, (0, first - 1), params, 0)


def test_a_text_ends_with_its_form(engine: tuple[EngineProcess, EngineClient]) -> None:
    _, client = engine
    form = StructuredOutputsParams(regex="5,6,7,")
    events = list(client.stream(formed("a", form)))
    assert numbers(events) == [5, 6, 7] and events[-1].finish_reason == "stop"


def test_a_grammar_that_cannot_be_compiled_fails_its_request_alone(
    engine: tuple[EngineProcess, EngineClient],
) -> None:
    _, client = engine
    good, bad, other = client.submit(
        [
            formed("good", StructuredOutputsParams(regex="5,6,")),
            formed("bad", StructuredOutputsParams(regex="(")),
            formed("other", StructuredOutputsParams(regex="5,")),
        ]
    )
    while not (good.ended and bad.ended and other.ended):
        client.receive()
    assert numbers(good.take()) == [5, 6] and numbers(other.take()) == [5]
    with pytest.raises(BadRequest, match="form") as caught:
        bad.take()
    assert caught.value.param == "structured_outputs"


def test_a_text_that_leaves_its_form_ends_with_an_error(engine: tuple[EngineProcess, EngineClient]) -> None:
    _, client = engine
    (stream,) = client.submit([formed("lost", StructuredOutputsParams(regex="5,7,"))])
    while not stream.ended:
        client.receive()
    events = stream.take()
    assert [event.finish_reason for event in events] == [None, "error"]
    assert "cannot be followed" in (events[-1].error or "")


def test_while_a_grammar_is_compiled_others_go_on_and_it_may_be_aborted(
    engine: tuple[EngineProcess, EngineClient],
) -> None:
    _, client = engine
    begin_s = time.monotonic()
    (heavy,) = client.submit([formed("heavy", HEAVY)])
    plain = list(client.stream(Request("plain", (0, 1), SamplingParams(max_tokens=20), 0)))
    assert len(plain) == 20 and not heavy.stirred and time.monotonic() - begin_s < 0.2
    client.abort(["heavy"])
    (again,) = client.submit([formed("heavy", StructuredOutputsParams(regex="5,6,"))])  # the same id, another form
    while not again.ended:
        client.receive()
    assert numbers(again.take()) == [5, 6]
    assert at_rest(client.stats())


def test_a_front_that_dies_takes_along_what_is_being_compiled(engine: tuple[EngineProcess, EngineClient]) -> None:
    child, client = engine
    other = EngineClient(link_to(child.address))
    other.ready()
    fresh = StructuredOutputsParams(json={"enum": [f"{'y' * 10}{number}" for number in range(60_000)]})  # type: ignore[arg-type]
    other.submit([formed("dying", fresh)])
    other.close()
    events = list(client.stream(formed("next", StructuredOutputsParams(regex="5,"))))  # compiled after that one
    assert numbers(events) == [5]
    until(lambda: at_rest(client.stats()))


def test_what_is_being_compiled_is_let_run_out_at_the_end() -> None:
    with running() as (_, client):
        client.teach(Vocabulary(tuple(b"%d," % number for number in range(VOCAB)), frozenset()))
        (stream,) = client.submit([formed("late", HEAVY, most=3)])
        client.shutdown(20)
        while not stream.ended:
            client.receive()
        with pytest.raises(BadRequest, match="no text"):  # of its tokens has the form: an answer, and not the end's
            stream.take()
        assert client.wait()


def test_before_the_vocabulary_is_told_a_form_is_refused() -> None:
    with running() as (_, client):
        (stream,) = client.submit([formed("early", StructuredOutputsParams(regex="5,"))])
        while not stream.ended:
            client.receive()
        with pytest.raises(BadRequest, match="told"):
            stream.take()
