"""Events of streams that are put together from parts are, byte for byte, those that are made whole; what is told at once
is told once.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rvllm.api.admission import Admission
from rvllm.api.details import Details
from rvllm.api.front import Choice, Generation, Prompt, Teller
from rvllm.api.http import event
from rvllm.api.metrics import Metrics, Timeline
from rvllm.api.replies import MARK, ChatReply, CompletionReply, Reply
from rvllm.api.requests import StreamOptions
from rvllm.engine.request import Request, TokenEvent
from rvllm.link.client import AsyncEngineClient
from rvllm.link.messages import Tokens, frame
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


class Told:
    """Stands for a client's connection. full: it takes nothing; broken: it fails."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.full = self.broken = False

    def teller(self, choice: Choice) -> Teller:
        return self.tell

    def tell(self, text: str, came_s: float) -> bool:
        if self.broken:
            raise ZeroDivisionError
        if not self.full:
            self.texts.append(text)
        return not self.full


class Loose(AsyncEngineClient):
    """A client of no engine: what it says is thrown away, and what it hears is what a test has it hear."""

    def _send(self, data: bytes) -> None: ...

    def hear(self, text: str, *ids: str, last: bool = False) -> None:
        reason = "length" if last else None
        self._handle(Tokens([TokenEvent(one, ord(text), None, (), reason, None, 0) for one in ids]))


@dataclass
class Answered:
    """A completion that is answered: what came by the generator, and what was told at once."""

    told: Told
    writer: Writer
    texts: list[str] = field(default_factory=list)
    error: BaseException | None = None
    task: asyncio.Task[None] | None = None

    async def run(self, generation: Generation) -> None:
        try:
            async for batch in generation.deltas(self.told):
                self.texts += [delta.text for _, delta in batch]
        except ZeroDivisionError as error:
            self.error = error


async def begun(client: Loose, name: str, **params: Any) -> Answered:
    request = Request(name, (1, 2), SamplingParams(max_tokens=50, **params), 0)
    line = Timeline(FIGURES, 0.0, 2)
    choice = Choice(0, Prompt("x", (1, 2)), request, Writer(TOKENIZER, request), line)
    made = Answered(Told(), choice.writer)
    made.task = asyncio.ensure_future(made.run(Generation(name, [choice], client, FIGURES, Admission(), 1)))
    await settled()
    return made


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_what_neither_begins_nor_ends_a_text_is_told_at_once_and_once() -> None:
    async def main() -> None:
        client = Loose()
        one = await begun(client, "one", stop=("XYZ",))
        for text in "abc":
            client.hear(text, "one")
            await settled()
        assert (one.texts, one.told.texts) == (["a"], ["b", "c"])
        one.told.full = True
        client.hear("d", "one")
        one.told.full = False
        client.hear("e", "one")  # behind one that is still to be taken
        await settled()
        assert (one.texts, one.told.texts) == (["a", "d", "e"], ["b", "c"])
        for text in "XYZ":
            client.hear(text, "one")
        await settled()
        assert (one.texts, one.told.texts) == (["a", "d", "e", ""], ["b", "c", "", ""])
        assert one.writer.token_count == 8
        assert one.task is not None and one.task.done() and one.error is None

    asyncio.run(main())


def test_tokens_that_came_together_are_told_together() -> None:
    """A front that is behind writes once for several."""

    async def main() -> None:
        client = Loose()
        one = await begun(client, "one")
        client.hear("a", "one")
        await settled()
        steps = [Tokens([TokenEvent("one", ord(text), None, (), None, None, 0)]) for text in "bcd"]
        client._take(b"".join(map(frame, steps)))
        assert one.told.texts == []
        await settled()
        assert (one.texts, one.told.texts) == (["a", "b", "c", "d"], [])
        client._take(frame(steps[0]))
        assert one.told.texts == ["b"]

    asyncio.run(main())


def test_a_fault_in_what_is_told_at_once_ends_its_request_alone() -> None:
    async def main() -> None:
        client = Loose()
        good, bad = await begun(client, "good"), await begun(client, "bad")
        client.hear("a", "good", "bad")
        await settled()
        bad.told.broken = True
        client.hear("b", "bad", "good")
        await settled()
        client.hear("c", "bad", "good", last=True)
        await settled()
        assert isinstance(bad.error, ZeroDivisionError) and bad.texts == ["a"]
        assert good.texts == ["a", "c"] and good.told.texts == ["b"] and good.error is None

    asyncio.run(main())
