"""Tokens that read the same wherever they stand, so that nothing around them need be decoded. Knows how decoders join.

With a byte-level decoder (GPT-2's alphabet) a text is its tokens' bytes as UTF-8: a token that is whole characters adds
these. With a SentencePiece one (blanks replaced, byte tokens, joined, a blank taken from the start) a token that is no
byte token adds its spelling, behind another such: then it is not the start, and no run of bytes is broken off by it.
"""

from __future__ import annotations

import json

import tokenizers

BLANK = "\u2581"
_BROKEN = "\ufffd"
_SENTENCEPIECE = [
    {"type": "Replace", "pattern": {"String": BLANK}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2, Radford et al. 2019)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTES = _byte_alphabet()


class PlainTexts(dict[int, str | None]):
    """id -> what it adds to any text behind another id that has one here; None: that has to be decoded.

    Made for each id when it is first asked for.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._spelled = backend.id_to_token
        self._added = frozenset(backend.get_added_tokens_decoder())
        self._kind = _kind(backend)

    def __missing__(self, token_id: int) -> str | None:
        text = self[token_id] = self._text(token_id)
        return text

    def _text(self, token_id: int) -> str | None:
        spelled = self._spelled(token_id) if token_id >= 0 else None
        if not spelled or token_id in self._added:
            return None
        if self._kind == "bytes":
            text = _utf8(spelled)
        elif self._kind == "sentencepiece" and not spelled.startswith("<0x"):
            text = spelled.replace(BLANK, " ")
        else:
            text = None
        return text if text and _BROKEN not in text else None


def _utf8(spelled: str) -> str | None:
    """The whole characters that a token's bytes are."""
    if not all(character in BYTES for character in spelled):
        return None
    try:
        return bytes(BYTES[character] for character in spelled).decode()
    except UnicodeDecodeError:
        return None


def _kind(backend: tokenizers.Tokenizer) -> str | None:
    if backend.decoder is None:
        return None
    decoder = json.loads(backend.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return "bytes"
    return "sentencepiece" if steps in (_SENTENCEPIECE, [*_SENTENCEPIECE, _STRIP]) else None
