"""Token ids to text while they arrive: text comes out once it is final. Knows decoding; not why ids end.

The window method. ids[context:given] have come out as text, ids[given:] not yet. What is new is what
decode(ids[context:]) has beyond decode(ids[context:given]); the context keeps the blank that decoders take from the
start of a text. While the new text ends in U+FFFD it may end inside a character, and is held back. `flush` gives out
such an end, for there the character stays incomplete. Behind an id that reads by itself another such needs no decoding.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rvllm.text.tokenizer import Tokenizer

_BROKEN = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_PROMPT_CONTEXT = 6  # tokens: a character has at most 4 bytes, and one more token shows that it is complete
_MOST_HELD = 32  # tokens: a real character is complete long before; bounds what a run of invalid bytes costs
_CUTS_TRIED = 8


class Detokenizer:
    """One sequence's text. Joined, what `push` and `flush` return is what decoding prompt and output together adds.

    `prompt_ids` are context only: nothing of them comes out again, even where they end inside a character.
    """

    __slots__ = ("_behind_plain", "_given", "_given_text", "_ids", "_plain", "_prompt_before", "_skip", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._plain = tokenizer.plain_texts
        self._ids = self._prompt_context(prompt_ids)
        self._given = len(self._ids)
        self._given_text: str | None = None  # decoded when it is needed
        self._behind_plain = self._ends_plain()
        self._prompt_before = None if self._behind_plain else self._before_incomplete()

    def take(self, token_id: int) -> str:
        """As `push` of this one."""
        if self._behind_plain and (new := self._plain[token_id]) is not None:
            self._ids, self._given, self._given_text = [token_id], 1, None
            return new
        return self.push((token_id,))

    def push(self, ids: Sequence[int]) -> str:
        """Take the next ids; the text that became final with them, "" while a character is incomplete."""
        self._ids += filter(self._shows, ids)
        if len(self._ids) == self._given:
            return ""
        self._behind_plain = False
        text = self._decode(self._ids)
        if not text.endswith(_BROKEN):
            return self._give(text)
        if len(self._ids) - self._given > _MOST_HELD:
            return self._give_most(text)
        return ""

    def flush(self) -> str:
        """The text that is held back, an incomplete character as U+FFFD."""
        return self._give(self._decode(self._ids))

    def _give(self, text: str) -> str:
        """Give out everything; `text` is decode(ids). The ids given out now are the next ones' context."""
        new = self._beyond_given(text, self._ids)
        if len(self._ids) > self._given:
            self._ids = self._ids[self._given :]
            self._given, self._given_text = len(self._ids), None
            self._prompt_before = None
            self._behind_plain = self._ends_plain()
        return new

    def _give_most(self, text: str) -> str:
        """Give out all but the last ids, cut where decoding both sides apart changes nothing.

        There is such a place close to the end: no character is longer than four bytes.
        """
        count = len(self._ids)
        for end in range(count - 1, count - _CUTS_TRIED, -1):
            head = self._decode(self._ids[:end])
            if head + self._decode(self._ids[end:]) == text:
                new = self._beyond_given(head, self._ids[:end])
                self._ids = self._ids[end:]
                self._given, self._given_text = 0, ""
                self._prompt_before = None
                return new
        return self._give(text)

    def _beyond_given(self, text: str, ids: Sequence[int]) -> str:
        """What `text`, decode(ids), has beyond the text given out."""
        if self._given_text is None:
            self._given_text = self._decode(self._ids[: self._given])
        if text.startswith(self._given_text):
            return text[len(self._given_text) :]
        if self._prompt_before is not None and text.startswith(self._prompt_before):
            return text[len(self._prompt_before) :]
        # Byte tokens that were text have become invalid with those behind them: what came out stays.
        return self._decode(ids[self._given :])

    def _prompt_context(self, prompt_ids: Sequence[int]) -> list[int]:
        """The prompt's end: long enough that decoding what follows it gives the same as behind all of it."""
        context: list[int] = []
        for token_id in filter(self._shows, reversed(prompt_ids)):
            context.append(token_id)
            # A run of byte tokens is valid or invalid as a whole.
            if len(context) >= _PROMPT_CONTEXT and not self._is_byte(token_id):
                break
        return context[::-1]

    def _before_incomplete(self) -> str | None:
        """The prompt's text before the character that it ends inside of; None where it ends with a whole one."""
        self._given_text = self._decode(self._ids)
        if not self._given_text.endswith(_BROKEN):
            return None
        for count in (1, 2, 3):
            text = self._decode(self._ids[:-count])
            if not text.endswith(_BROKEN):
                return text
        return None

    def _ends_plain(self) -> bool:
        return bool(self._ids) and self._plain[self._ids[-1]] is not None

    def _shows(self, token_id: int) -> bool:
        """Whether decoding looks at `token_id` at all. Hidden ids would be no context for those behind them."""
        hidden = self._skip and token_id in self._tokenizer.special_ids
        return not hidden and self._tokenizer.token_of(token_id) is not None

    def _is_byte(self, token_id: int) -> bool:
        return _BYTE_TOKEN.fullmatch(self._tokenizer.token_of(token_id) or "") is not None

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)
