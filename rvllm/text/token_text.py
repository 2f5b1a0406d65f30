"""A single token as it is shown with log-probabilities. Knows spellings; no context of a token."""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import lru_cache

from rvllm.engine.grammar import Vocabulary
from rvllm.text.plain_tokens import BLANK, BYTES
from rvllm.text.tokenizer import Tokenizer

_BROKEN = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_MOST_KEPT = 1 << 14


class TokenTexts:
    """`of` an id: its text, in which bytes that are no whole character are U+FFFD, and its true bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.of = lru_cache(_MOST_KEPT)(self._of)
        self.decode = tokenizer.decode

    def _of(self, token_id: int) -> tuple[str, bytes]:
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        spelled = self._tokenizer.token_of(token_id) or ""
        match = _BYTE_TOKEN.fullmatch(spelled)
        if match and text != spelled:
            data = bytes([int(match[1], 16)])
            return (data.decode() if data.isascii() else text), data
        blanks = len(spelled) - len(spelled.lstrip(BLANK))
        if blanks and text.startswith(" " * (blanks - 1)) and not text.startswith(" " * blanks):
            text = " " + text  # which decoders take from the start of a text
        if _BROKEN not in text:
            return text, text.encode()
        if spelled and all(character in BYTES for character in spelled):
            return text, bytes(BYTES[character] for character in spelled)
        return text, text.encode()

    def vocabulary(self, count: int, plain: Collection[str] = ()) -> Vocabulary:
        """What the ids below `count` stand for, for grammars; special tokens for nothing, but for those in `plain`.

        Takes a second where there are many.
        """
        of, known = self._of, self._tokenizer.token_of
        tokens = tuple(of(token)[1] if known(token) is not None else b"" for token in range(count))
        special = frozenset(token for text, token in self._tokenizer.special_tokens.items() if text not in plain)
        return Vocabulary(tokens, special)
