"""Replies as OpenAI's clients read them, whole or in chunks. Knows shapes of JSON; not where text comes from."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from uuid import uuid4

from rvllm.api.details import LEAST_LOGPROB, Details, IdTexts, Json
from rvllm.api.front import Choice, Generation
from rvllm.api.http import encode_json, event
from rvllm.api.requests import StreamOptions
from rvllm.text.answer import AnswerPart, AnswerReader, Thought
from rvllm.text.completion import Delta, Logprobs
from rvllm.text.token_text import TokenTexts
from rvllm.text.tool_calls import Call, More, calls_in

MARK = "\N{OBJECT REPLACEMENT CHARACTER}"
"""Stands for a text until there is one; what follows the text in an event never has it."""


@dataclass(slots=True)
class Reply(ABC):
    """What both kinds share.

    top: how many likeliest tokens are told of each; None: no log-probabilities. fingerprint: of system and settings.
    timed: it tells how long it took, where it is one completion.
    """

    generation: Generation
    model: str
    texts: TokenTexts | IdTexts
    details: Details
    top: int | None = None
    options: StreamOptions = field(default_factory=StreamOptions)
    created_s: int = field(default_factory=lambda: int(time.time()))
    fingerprint: str | None = None
    timed: bool = False
    frames: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    """What stands around the text in a choice's usual events, once there was one."""

    PREFIX = ""
    OBJECT = ""
    CHUNK = ""

    @abstractmethod
    def choice(self, choice: Choice) -> Json:
        """A completion in a whole reply."""

    @abstractmethod
    def pieces(self, choice: Choice, delta: Delta) -> Iterator[Json]:
        """What came of a completion, for a chunk each."""

    @abstractmethod
    def goes_on(self, choice: Choice) -> bool:
        """Whether a text that comes now becomes one piece, as `text_piece` has it."""

    @abstractmethod
    def text_piece(self, choice: Choice, text: str) -> Json:
        """A piece that is nothing but the next text."""

    def whole(self) -> Json:
        """The reply once all has come."""
        given = self.generation.choices
        choices = [self.choice(choice) | self.details.of_choice(choice) for choice in given]
        told = {"choices": choices, "usage": self.usage()} | self.details.of_reply(given)
        return self._head(self.OBJECT) | told | self._times()

    @property
    def usual(self) -> bool:
        """Whether events have nothing but texts in them, on the whole."""
        return self.top is None and not self.details.ids and not self.options.continuous_usage_stats

    def events(self, batch: Sequence[tuple[Choice, Delta]]) -> bytes:
        """What has come, as events. In most all but the text is what it was in the one before."""
        told: list[bytes] = []
        usual = self.usual
        for choice, delta in batch:
            if usual and delta.finish_reason is None and self.goes_on(choice):
                told.append(self.text_event(choice, delta.text))
            else:
                told += map(event, self.chunks([(choice, delta)]))
        return b"".join(told)

    def text_event(self, choice: Choice, text: str) -> bytes:
        """The event of a piece that is nothing but the next text; none where there is none."""
        if not text:
            return b""
        before, after = self.frame(choice)
        return before + encode_json(text) + after

    def frame(self, choice: Choice) -> tuple[bytes, bytes]:
        """What stands around the text in such an event."""
        if (found := self.frames.get(choice.index)) is None:
            whole = event(self._chunk([self.text_piece(choice, MARK)], None))
            before, _, after = whole.rpartition(encode_json(MARK))
            found = self.frames[choice.index] = before, after
        return found

    def chunks(self, batch: Sequence[tuple[Choice, Delta]]) -> Iterator[Json]:
        """Chunks for what has come."""
        for choice, delta in batch:
            pieces = list(self.pieces(choice, delta))
            self.details.of_pieces(choice, delta, pieces)
            for piece in pieces:
                usage = self.usage() if self.options.continuous_usage_stats else None
                yield self._chunk([piece], usage) | self.details.of_chunk(choice)

    def last_chunk(self) -> Json | None:
        """The usage, where it is asked for."""
        return self._chunk([], self.usage()) | self._times() if self.options.include_usage else None

    def usage(self) -> Json:
        """Tokens so far: a prompt's once, whatever n is."""
        choices = self.generation.choices
        prompts = {id(choice.prompt): choice for choice in reversed(choices)}
        read = sum(len(choice.prompt.ids) for choice in prompts.values())
        written = sum(choice.writer.token_count for choice in choices)
        cached = sum(choice.writer.cached_tokens or 0 for choice in prompts.values())
        return {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _times(self) -> Json:
        """vLLM's figures of a request."""
        if not self.timed or len(self.generation.choices) != 1:
            return {}
        return {"metrics": self.generation.choices[0].line.times()}

    def _chunk(self, choices: list[Json], usage: Json | None) -> Json:
        told = {"usage": usage} if self.options.include_usage or self.options.continuous_usage_stats else {}
        return self._head(self.CHUNK) | {"choices": choices} | told

    def _head(self, kind: str) -> Json:
        return {
            "id": self.PREFIX + self.generation.name,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


@dataclass(slots=True)
class ChatReply(Reply):
    """chat.completion and its chunks: a role, texts, and last an empty delta with the finish reason.

    reader: makes who reads a completion. named: a call was ordered by name, which is no reason to finish. role: the
    answer's.
    """

    reader: Callable[[], AnswerReader] = AnswerReader
    named: bool = False
    thoughts: bool = True
    short_ids: bool = False
    role: str = "assistant"
    readers: dict[int, AnswerReader] = field(default_factory=dict)

    PREFIX, OBJECT, CHUNK = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def choice(self, choice: Choice) -> Json:
        output = choice.writer.output(choice.index)
        reader = self.reader()
        message = self._message([*reader.push(output.text), *reader.finish()])
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(output.token_ids, output.logprobs or ()),
            "finish_reason": self._reason(output.finish_reason, reader),
            "stop_reason": output.stop_reason,
        }

    def _message(self, parts: Sequence[AnswerPart]) -> Json:
        calls = calls_in(parts)
        text = "".join(part for part in parts if isinstance(part, str))
        message: Json = {"role": self.role, "content": text or (None if calls else ""), "refusal": None}
        thought = "".join(part.text for part in parts if isinstance(part, Thought))
        if thought and self.thoughts:
            message |= _thought(thought)
        if calls:
            message["tool_calls"] = [self._call(call) for call in calls]
        return message

    def _call(self, call: Call) -> Json:
        name = uuid4().hex
        name = name[:9] if self.short_ids else f"chatcmpl-tool-{name}"
        return {"id": name, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}

    def _reason(self, reason: str | None, reader: AnswerReader) -> str | None:
        return "tool_calls" if reason == "stop" and reader.calls and not self.named else reason

    def goes_on(self, choice: Choice) -> bool:
        reader = self.readers.get(choice.index)
        return reader is not None and reader.plain

    def text_piece(self, choice: Choice, text: str) -> Json:
        return _piece(choice, {"content": text})

    def pieces(self, choice: Choice, delta: Delta) -> Iterator[Json]:
        if (reader := self.readers.get(choice.index)) is None:
            reader = self.readers[choice.index] = self.reader()
            yield _piece(choice, {"role": self.role, "content": ""})
        before = reader.calls
        parts = reader.push(delta.text) if delta.text else []
        if delta.finish_reason is not None:
            parts += reader.finish()
        told = self._deltas(parts, before)
        if delta.logprobs and not told:
            told = [{"content": ""}]
        for place, one in enumerate(told):
            yield _piece(choice, one, None if place else self._logprobs(delta.token_ids, delta.logprobs))
        if delta.finish_reason is not None:
            reason = self._reason(delta.finish_reason, reader)
            yield _piece(choice, {}) | {"finish_reason": reason, "stop_reason": delta.stop_reason}

    def _deltas(self, parts: Sequence[AnswerPart], calls: int) -> list[Json]:
        """What came of a message; `calls` came before."""
        told: list[Json] = []
        for part in parts:
            if isinstance(part, str):
                told.append({"content": part})
            elif isinstance(part, Call):
                told.append({"tool_calls": [{"index": calls} | self._call(part)]})
                calls += 1
            elif isinstance(part, More):
                told.append({"tool_calls": [{"index": calls - 1, "function": {"arguments": part.text}}]})
            elif self.thoughts:
                told.append(_thought(part.text))
        return told

    def _logprobs(self, ids: Sequence[int], entries: Sequence[Logprobs]) -> Json | None:
        if self.top is None:
            return None
        content = [
            self._scored(token, entry[token])
            | {"top_logprobs": [self._scored(other, entry[other]) for other in list(entry)[: self.top]]}
            for token, entry in zip(ids, entries)
        ]
        return {"content": content, "refusal": None}

    def _scored(self, token: int, logprob: float) -> Json:
        text, data = self.texts.of(token)
        return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(data)}


def _thought(text: str) -> Json:
    """Under vLLM's name, and the one that clients know from before."""
    return {"reasoning": text, "reasoning_content": text}


def _piece(choice: Choice, delta: Json, logprobs: Json | None = None) -> Json:
    return {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


@dataclass(slots=True)
class CompletionReply(Reply):
    """text_completion, whole or in chunks. `echo`: the prompt comes first, with its log-probabilities."""

    echo: bool = False
    begun: set[int] = field(default_factory=set)
    lengths: Counter[int] = field(default_factory=Counter)
    """Characters of each choice's tokens so far, for text_offset."""

    PREFIX, OBJECT, CHUNK = "cmpl-", "text_completion", "text_completion"

    def choice(self, choice: Choice) -> Json:
        output = choice.writer.output(choice.index)
        return self._piece(choice, output.text, output.token_ids, output.logprobs or (), first=True) | {
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }

    def goes_on(self, choice: Choice) -> bool:
        return choice.index in self.begun

    def text_piece(self, choice: Choice, text: str) -> Json:
        return self._piece(choice, text, (), (), first=False) | {"finish_reason": None, "stop_reason": None}

    def pieces(self, choice: Choice, delta: Delta) -> Iterator[Json]:
        first = choice.index not in self.begun
        self.begun.add(choice.index)
        told = delta.text or delta.logprobs or delta.finish_reason is not None
        if told or (first and self.echo):
            piece = self._piece(choice, delta.text, delta.token_ids, delta.logprobs, first=first)
            yield piece | {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}

    def _piece(
        self, choice: Choice, text: str, ids: Sequence[int], entries: Sequence[Logprobs | None], *, first: bool
    ) -> Json:
        if first and self.echo:
            prompt = choice.prompt
            text = (self._prompt_text(choice) if prompt.text is None else prompt.text) + text
            ids = (*prompt.ids, *ids)
            entries = (*(choice.writer.prompt_logprobs or ()), *entries)
        logprobs = None if self.top is None else self._logprobs(choice, ids, entries)
        return {"index": choice.index, "text": text, "logprobs": logprobs}

    def _prompt_text(self, choice: Choice) -> str:
        return self.texts.decode(choice.prompt.ids, skip_special_tokens=choice.request.params.skip_special_tokens)

    def _logprobs(self, choice: Choice, ids: Sequence[int], entries: Sequence[Logprobs | None]) -> Json:
        offsets, tokens, scores, tops = [], [], [], []
        for token, entry in zip(ids, entries):
            text, _ = self.texts.of(token)
            offsets.append(self.lengths[choice.index])
            self.lengths[choice.index] += len(text)
            tokens.append(text)
            scores.append(None if entry is None else max(entry[token], LEAST_LOGPROB))
            tops.append(None if entry is None else self._top(entry, token))
        return {"text_offset": offsets, "token_logprobs": scores, "tokens": tokens, "top_logprobs": tops}

    def _top(self, entry: Logprobs, token: int) -> dict[str, float]:
        """The likeliest and the token itself by their texts; the likelier one of two that read alike."""
        found: dict[str, float] = {}
        for one in [*list(entry)[: self.top], token]:  # a prompt's may have more, for prompt_logprobs
            found.setdefault(self.texts.of(one)[0], max(entry[one], LEAST_LOGPROB))
        return found
