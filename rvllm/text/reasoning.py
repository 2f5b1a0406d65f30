"""What a model thinks before it answers, told apart from the answer, as text comes. Knows markers; no model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Thinking:
    """How a family marks its thoughts. begins_so: a text begins with them where the prompt says nothing of it."""

    begin: str = "<think>"
    end: str = "</think>"
    begins_so: bool = False

    def open_after(self, prompt: str) -> bool:
        """Whether what follows a prompt, of which this is the end, are thoughts."""
        begin, end = prompt.rfind(self.begin), prompt.rfind(self.end)
        return begin > end if begin != end else self.begins_so


REASONING: Mapping[str, Thinking] = {
    "deepseek_r1": Thinking(begins_so=True),
    "deepseek_v3": Thinking(),
    "ernie45": Thinking(),
    "glm45": Thinking(),
    "holo2": Thinking(),
    "hunyuan_a13b": Thinking("<think>\n", "\n</think>\n"),
    "kimi_k2": Thinking(),
    "minimax_m2": Thinking(begins_so=True),
    "mistral": Thinking("[THINK]", "[/THINK]"),
    "nemotron_v3": Thinking(),
    "olmo3": Thinking(begins_so=True),
    "qwen3": Thinking(),
    "seed_oss": Thinking("<seed:think>", "</seed:think>"),
    "step3": Thinking(begins_so=True),
}
"""vLLM's names."""


class ThoughtReader:
    """Splits a text into (thoughts, answer). Blanks at the ends of thoughts, and before the answer, belong to neither.

    opened: whether it begins in the middle of thoughts. The text may begin with the marker all the same.
    """

    def __init__(self, thinking: Thinking, opened: bool) -> None:
        self._thinking = thinking
        self._state = "thoughts" if opened else "start"
        self._held = ""
        self._blank = ""
        self._begun = False  # whether thoughts, or the answer behind them, have begun

    @property
    def thinking(self) -> bool:
        """Whether it is in the middle of thoughts."""
        return self._state == "thoughts"

    @property
    def over(self) -> bool:
        """Whether all that comes from now on is part of the answer."""
        return self._state == "answer" and self._begun

    def push(self, text: str) -> tuple[str, str]:
        """What became certain with `text`: of the thoughts, and of the answer."""
        if self.over:
            return "", text
        thoughts: list[str] = []
        answer: list[str] = []
        for character in text:
            self._take(character, thoughts, answer)
        return "".join(thoughts), "".join(answer)

    def finish(self) -> tuple[str, str]:
        """The rest: what was held back is what it looked like until then."""
        rest, self._held = self._held, ""
        if self._state == "thoughts":
            return (self._blank + rest if rest else ""), ""
        return "", rest

    def _take(self, character: str, thoughts: list[str], answer: list[str]) -> None:
        if self._state == "start":
            self._start(character, thoughts, answer)
        elif self._state == "thoughts":
            self._think(character, thoughts, answer)
        elif self._begun or not character.isspace():
            self._begun = True
            answer.append(character)

    def _start(self, character: str, thoughts: list[str], answer: list[str]) -> None:
        """At the beginning: thoughts, if the marker comes first."""
        self._held += character
        told, begin = self._held.lstrip(), self._thinking.begin
        if told == begin:
            self._held, self._state = "", "thoughts"
        elif not begin.startswith(told):
            self._state, self._begun = "answer", True
            answer.append(self._held)
            self._held = ""

    def _think(self, character: str, thoughts: list[str], answer: list[str]) -> None:
        self._held += character
        for marker, end in ((self._thinking.end, True), (self._thinking.begin, False)):
            if self._held == marker and (end or not self._begun):
                self._held = self._blank = ""
                if end:
                    self._state, self._begun = "answer", False
                return
            if marker.startswith(self._held) and (end or not self._begun):
                return
        first, rest = self._held[0], self._held[1:]
        self._held = ""
        if first.isspace():
            self._blank += first
        else:
            thoughts.append((self._blank if self._begun else "") + first)
            self._blank, self._begun = "", True
        for one in rest:
            self._take(one, thoughts, answer)
