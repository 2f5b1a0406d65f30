"""Stop strings, and one request's text from ids to what may be sent. Knows text and ids; not who waits for it."""

from __future__ import annotations

from collections.abc import Sequence

from rvllm.errors import BadRequest
from rvllm.text.detokenizer import Detokenizer
from rvllm.text.tokenizer import Tokenizer

# Every stop string is looked for with every token.
MOST_STOPS = 64
LONGEST_STOP = 1024


def parse_stop(value: object) -> tuple[str, ...]:
    """A request's `stop`: None, a text or a list of texts. Raises BadRequest, param "stop"."""
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list | tuple):
        raise BadRequest(f"stop must be a text or a list of texts, it is a {type(value).__name__}", param="stop")
    if len(stops) > MOST_STOPS:
        raise BadRequest(f"stop has {len(stops):,} texts, the limit is {MOST_STOPS}", param="stop")
    for stop in stops:
        if not isinstance(stop, str):
            raise BadRequest(f"stop must hold texts, one is a {type(stop).__name__}", param="stop")
        if not stop:
            raise BadRequest("a stop text is empty", param="stop", hint="leave stop out to stop at nothing")
        if len(stop) > LONGEST_STOP:
            raise BadRequest(f"a stop text has {len(stop):,} characters, the limit is {LONGEST_STOP:,}", param="stop")
    return tuple(dict.fromkeys(stops))


class StopMatcher:
    """Lets text through until a stop string is complete in it.

    The string that is complete first wins, the longest of those that end together: so the result does not depend on
    how the text was cut. Held back is only an end that could begin a stop string. `include`: the match comes out too.
    """

    __slots__ = ("_firsts", "_held", "_include", "_longest", "_stops", "matched")

    def __init__(self, stops: tuple[str, ...], *, include: bool) -> None:
        self._stops = stops
        self._include = include
        self._held = ""
        self._longest = max(map(len, stops), default=0)
        self._firsts = frozenset(stop[0] for stop in stops)
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take more text; what is safe to send of all so far. Nothing comes out behind a match."""
        if self.matched is not None or not text:
            return ""
        if not self._held and self._firsts.isdisjoint(text):
            return text  # no stop string begins in it
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, start, self.matched = min(found)
            self._held = ""
            return text[: end if self._include else start]
        safe = len(text) - self._possible_start(text)
        self._held = text[safe:]
        return text[:safe]

    def flush(self) -> str:
        """What is held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that is a proper beginning of some stop string."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._firsts and any(stop.startswith(text[start:]) for stop in self._stops):
                return len(text) - start
        return 0


class TextStream:
    """One request's text: ids in, text that may be sent out, until a stop string.

    stopped    the stop string that ended it, None until then
    consumed   how many pushed ids are part of the completion: up to the one that completed the stop string
    A stop string that is a special token's text ends it at that token, although decoding hides the token.
    """

    __slots__ = ("_detokenizer", "_include", "_matcher", "_one_by_one", "_stop_tokens", "consumed", "stopped")

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        *,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_ids, skip_special_tokens=skip_special_tokens)
        self._matcher = StopMatcher(stop, include=include_stop)
        self._include = include_stop
        self._one_by_one = bool(stop)
        self._stop_tokens = {tokenizer.special_tokens[text]: text for text in stop if text in tokenizer.special_tokens}
        self.stopped: str | None = None
        self.consumed = 0

    def push(self, ids: Sequence[int]) -> str:
        """Take the next ids; the text that became certain. Ids behind the stop are left alone."""
        if not self._one_by_one:
            self.consumed += len(ids)
            return self._detokenizer.push(ids)
        text = ""
        for token_id in ids:
            if self.stopped is not None:
                break
            text += self.take(token_id)
        return text

    def take(self, token_id: int) -> str:
        """As `push` of this one, which is none behind the stop."""
        self.consumed += 1
        if not self._one_by_one:
            return self._detokenizer.take(token_id)
        if token_id in self._stop_tokens:
            return self._stop_at(token_id)
        text = self._matcher.push(self._detokenizer.take(token_id))
        self.stopped = self._matcher.matched
        return text

    def finish(self) -> str:
        """The text still held back, when no more ids come; "" after a stop."""
        if self.stopped is not None:
            return ""
        text = self._matcher.push(self._detokenizer.flush())
        self.stopped = self._matcher.matched
        return text + self._matcher.flush()

    def _stop_at(self, token_id: int) -> str:
        # Text that was held back may complete a stop string before this one.
        text = self.finish()
        if self.stopped is None:
            self.stopped = self._stop_tokens[token_id]
            text += self.stopped if self._include else ""
        return text
