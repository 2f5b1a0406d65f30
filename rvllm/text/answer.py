"""A completion's text as what it means: thoughts, text and calls of tools, as it comes. Knows readers; no protocol."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rvllm.errors import BadRequest, StartError
from rvllm.text.reasoning import REASONING, Thinking, ThoughtReader
from rvllm.text.tokenizer import Tokenizer
from rvllm.text.tool_calls import Call, CallReader, More, Part
from rvllm.text.tool_formats import READERS, SAMPLE_CALL, SAMPLE_TOOL, reader_for


@dataclass(frozen=True, slots=True)
class Thought:
    text: str


AnswerPart = Thought | Part


class NamedCall:
    """Reads a text that is nothing but the arguments of one tool's call."""

    def __init__(self, name: str) -> None:
        self._name, self._begun = name, False

    def push(self, text: str) -> list[Part]:
        if self._begun:
            return [More(text)]
        self._begun = bool(text.strip())
        return [Call(self._name, text.lstrip())] if self._begun else []

    def finish(self) -> list[Part]:
        return []


class AnswerReader:
    """Reads one completion. most_calls: of those that come, how many are told; None: all. calls: so many were told."""

    def __init__(
        self,
        thoughts: ThoughtReader | None = None,
        calls: CallReader | NamedCall | None = None,
        most_calls: int | None = None,
    ) -> None:
        self._thoughts, self._calls, self._most = thoughts, calls, most_calls
        self.calls = 0
        self._skips = False  # whether the call that comes is one too many

    @property
    def thinking(self) -> bool:
        """Whether the next token is part of thoughts, as far as is known."""
        return self._thoughts is not None and self._thoughts.thinking

    @property
    def plain(self) -> bool:
        """Whether all that comes from now on is text, and goes through as it comes."""
        return self._calls is None and (self._thoughts is None or self._thoughts.over)

    def push(self, text: str) -> list[AnswerPart]:
        """What became certain with `text`."""
        if self._thoughts is None and self._calls is None:
            return [text] if text else []
        thought, answer = ("", text) if self._thoughts is None else self._thoughts.push(text)
        return self._parts(thought, answer)

    def finish(self) -> list[AnswerPart]:
        """The rest."""
        thought, answer = ("", "") if self._thoughts is None else self._thoughts.finish()
        return self._parts(thought, answer) + ([] if self._calls is None else self._wanted(self._calls.finish()))

    def _parts(self, thought: str, answer: str) -> list[AnswerPart]:
        parts: list[AnswerPart] = [Thought(thought)] if thought else []
        if not answer:
            return parts
        return parts + ([answer] if self._calls is None else self._wanted(self._calls.push(answer)))

    def _wanted(self, parts: list[Part]) -> list[AnswerPart]:
        found: list[AnswerPart] = []
        for part in parts:
            if isinstance(part, Call):
                self._skips = self._most is not None and self.calls >= self._most
                self.calls += not self._skips
            if isinstance(part, str) or not self._skips:
                found.append(part)
        return found


@dataclass(frozen=True, slots=True)
class Families:
    """How a model writes calls of tools and thoughts; None where nothing is known of it."""

    calls: type[CallReader] | None = None
    thinking: Thinking | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer, calls: str | None, thinking: str) -> Families:
        """By names that `check` knows; where no reader of calls is named, by the model's own template."""
        reader = _by_template(tokenizer) if calls in (None, "auto") else READERS[calls or ""]
        return cls(reader, REASONING.get(thinking))

    @staticmethod
    def check(calls: str | None, thinking: str) -> None:
        """Raise StartError for what is none of vLLM's names, or one that is not done."""
        if calls is not None and calls not in ("auto", *READERS):
            raise _unknown("--tool-call-parser", calls, READERS)
        if thinking and thinking not in REASONING:
            raise _unknown("--reasoning-parser", thinking, REASONING)

    def marked_by_special(self, tokenizer: Tokenizer, *, calls: bool) -> bool:
        """Whether some of the markers are special tokens, which then have to be in the text to be seen."""
        return any(special in marker for marker in self.markers(calls=calls) for special in tokenizer.special_tokens)

    def markers(self, *, calls: bool) -> tuple[str, ...]:
        """What stands around thoughts, and around calls."""
        found = () if self.thinking is None else (self.thinking.begin, self.thinking.end)
        return found + (self.calls.markers() if calls and self.calls is not None else ())


def _by_template(tokenizer: Tokenizer) -> type[CallReader] | None:
    """Whoever reads the calls that the model's chat template writes."""
    question = {"role": "user", "content": "x"}
    answer = {"role": "assistant", "content": "", "tool_calls": [SAMPLE_CALL]}

    def rendered(*messages: Mapping[str, object], begins: bool) -> str:
        ids = tokenizer.apply_chat_template(messages, tools=[SAMPLE_TOOL], add_generation_prompt=begins)
        return tokenizer.decode(ids, skip_special_tokens=False)

    try:
        whole = rendered(question, answer, begins=False)
        befores = [rendered(question, begins=begins) for begins in (True, False)]
    except BadRequest:  # there is no template, or it knows no tools
        return None
    # An answer may be begun in another way than it is told, with thoughts. Where both go on with one character, as
    # <think> and <tool_call> do, all that comes after the question is looked at.
    cuts = [next((at for at, (x, y) in enumerate(zip(whole, one)) if x != y), len(one)) for one in befores]
    found = (reader_for(whole[cut:]) for cut in cuts)
    return next((reader for reader in found if reader is not None), None)


def _unknown(flag: str, name: str, known: Mapping[str, object]) -> StartError:
    return StartError(f"{flag} {name} is not done", hint=f"there is {', '.join(sorted(known))}")
