"""Replies that are a list of blocks: thoughts, text, calls. What the Responses and the Messages API share.

Whole or streamed, a reply is made of what comes bit by bit; events are what has changed since.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar
from uuid import uuid4

import msgspec

from rvllm.api.front import Choice, Generation
from rvllm.text.answer import AnswerPart, AnswerReader, Thought
from rvllm.text.completion import Delta
from rvllm.text.tool_calls import Call, More

Json = dict[str, Any]


def typed_event(value: Json) -> bytes:
    """A server-sent event that bears its type."""
    return b"event: " + str(value["type"]).encode() + b"\ndata: " + msgspec.json.encode(value) + b"\n\n"


@dataclass(slots=True)
class Block:
    """`kind`: "thought", "text" or "call", whose arguments are the text."""

    kind: str
    id: str
    text: str = ""
    call: Call | None = None


@dataclass(slots=True)
class TurnReply(ABC):
    """A reply of one completion. `model`: the name that the request has for it."""

    generation: Generation
    model: str
    reader: AnswerReader
    blocks: list[Block] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    thought_tokens: int = 0
    created_s: int = field(default_factory=lambda: int(time.time()))
    id: str = field(default_factory=lambda: uuid4().hex)
    _open: bool = False

    PREFIXES: ClassVar[Mapping[str, str]] = {"thought": "rs_", "text": "msg_", "call": "fc_"}

    @abstractmethod
    def opening(self) -> Iterator[Json]:
        """Events before the first token."""

    @abstractmethod
    def begun(self, index: int, block: Block) -> Iterator[Json]:
        """A block begins."""

    @abstractmethod
    def grown(self, index: int, block: Block, text: str) -> Iterator[Json]:
        """Text was added to a block."""

    @abstractmethod
    def ended(self, index: int, block: Block) -> Iterator[Json]:
        """A block is complete."""

    @abstractmethod
    def closing(self) -> Iterator[Json]:
        """Events behind the last token."""

    @abstractmethod
    def whole(self) -> Json:
        """The reply once all has come."""

    def take(self, batch: Sequence[tuple[Choice, Delta]]) -> Iterator[Json]:
        """Events for what has come."""
        for _, delta in batch:
            if self.reader.thinking:
                self.thought_tokens += len(delta.token_ids)
            yield from self._parts(self.reader.push(delta.text) if delta.text else [])
            if delta.finish_reason is not None:
                self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
                yield from self._parts(self.reader.finish())
                yield from self._end()

    @property
    def tokens(self) -> tuple[int, int, int]:
        """Of the prompt, those of them that were cached, and of the completion."""
        (choice,) = self.generation.choices
        return len(choice.prompt.ids), choice.writer.cached_tokens or 0, choice.writer.token_count

    def _parts(self, parts: Sequence[AnswerPart]) -> Iterator[Json]:
        for part in parts:
            if isinstance(part, Call):
                yield from self._end()
                yield from self._begin("call", part)
                if part.arguments:
                    yield from self._grow(part.arguments)
                continue
            if isinstance(part, More):
                yield from self._grow(part.text)
                continue
            kind, text = ("thought", part.text) if isinstance(part, Thought) else ("text", part)
            if not self._open or self.blocks[-1].kind != kind:
                yield from self._end()
                yield from self._begin(kind)
            yield from self._grow(text)

    def _begin(self, kind: str, call: Call | None = None) -> Iterator[Json]:
        self.blocks.append(Block(kind, self.PREFIXES[kind] + uuid4().hex, call=call))
        self._open = True
        yield from self.begun(len(self.blocks) - 1, self.blocks[-1])

    def _grow(self, text: str) -> Iterator[Json]:
        self.blocks[-1].text += text
        yield from self.grown(len(self.blocks) - 1, self.blocks[-1], text)

    def _end(self) -> Iterator[Json]:
        if self._open:
            self._open = False
            yield from self.ended(len(self.blocks) - 1, self.blocks[-1])
