"""What is asked of a server: random prompts, ShareGPT's conversations, one's own lines. Knows files and tokenizers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rvllm.errors import StartError

BYTES = range(3, 256)
"""Ids that every vocabulary has, but for 0 to 2, which often are special."""

TRIES = 100
CANDIDATES = 8192
"""Of a vocabulary's tokens, as many are looked at for random texts."""


class Text(Protocol):
    """Of a tokenizer, what is needed here."""

    vocab_size: int
    special_ids: frozenset[int]

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text or token ids, how many tokens they are (None: unknown), and how many may be answered."""

    content: str | list[int]
    tokens: int | None
    output: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of random requests, in tokens; lengths are drawn from (1 - ratio) to (1 + ratio) times theirs."""

    input: int
    output: int
    input_ratio: float = 0.0
    output_ratio: float = 0.0
    prefix: int = 0


def random_prompts(lengths: Lengths, count: int, seed: int, text: Text | None, *, as_text: bool) -> list[Prompt]:
    """Random token ids, or as_text: texts that have exactly as many tokens. Raises StartError."""
    random = np.random.default_rng(seed)
    ids = [id for id in range(text.vocab_size) if id not in text.special_ids] if text else list(BYTES)
    pool = np.array(ids)
    if as_text:
        assert text, "texts need a tokenizer"
        # An id that is part of a character becomes another one's text: with such ids no length could be had exactly.
        some = random.permutation(pool)[:CANDIDATES].tolist()
        pool = np.array([id for id in some if text.encode(text.decode([id])) == [id]])
        if not len(pool):
            raise StartError("the tokenizer has no token that is a text", hint="--backend openai sends token ids")

    def drawn(length: int, ratio: float) -> int:
        return int(random.integers(int(length * (1 - ratio)), int(np.ceil(length * (1 + ratio))) + 1))

    shared = random.choice(pool, lengths.prefix).tolist()
    found = []
    for _ in range(count):
        size = max(1 - lengths.prefix, drawn(lengths.input, lengths.input_ratio))
        content: Any = shared + random.choice(pool, size).tolist()
        output = max(1, drawn(lengths.output, lengths.output_ratio))
        tokens = len(content)
        if as_text:
            assert text, "texts need a tokenizer"
            content = exact_text(content, text, random, pool)
        found.append(Prompt(content, tokens, output))
    return found


def exact_text(ids: list[int], text: Text, random: np.random.Generator, pool: Any) -> str:
    """A text that is encoded to len(ids) tokens, beginning as ids are. Raises StartError where none was found."""
    wanted = list(ids)
    for _ in range(TRIES):
        written = text.decode(wanted)
        got = text.encode(written)
        if len(got) == len(ids):
            return written
        missing = len(ids) - len(got)
        wanted = got + random.choice(pool, missing).tolist() if missing > 0 else got[: len(ids)]
    raise StartError(f"found no text of {len(ids):,} tokens", hint="--backend openai sends token ids")


def sharegpt(path: Path, count: int, seed: int, output: int | None, text: Text | None, *, repeat: bool) -> list[Prompt]:
    """First turns of ShareGPT's conversations; vLLM's bounds hold where there is a tokenizer. Raises StartError."""
    if output is None and text is None:
        raise StartError("answers' lengths need a tokenizer", hint="give --tokenizer, or --sharegpt-output-len")
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as cause:
        raise StartError(f"{path} is no JSON: {cause}") from None
    if not isinstance(entries, list):
        raise StartError(f"{path} is no list of conversations")
    found = []
    for place, entry in enumerate(entries):
        try:
            turns = [turn["value"] for turn in entry["conversations"][:2]]
        except (TypeError, KeyError):
            turns = [None]
        if not all(isinstance(turn, str) for turn in turns):
            raise StartError(f"{path}: entry {place} has no `conversations` with `value`s")
        if len(turns) == 2:
            tokens = len(text.encode(turns[0])) if text else None
            length = output or len(text.encode(turns[1])) if text else output
            assert length is not None
            if tokens is None or (4 <= tokens <= 1024 and (output or length >= 4) and tokens + length <= 2048):
                found.append(Prompt(turns[0], tokens, length))
    return chosen(found, count, seed, path, shuffle=True, repeat=repeat)


def custom(
    path: Path, count: int, seed: int, output: int, text: Text | None, *, shuffle: bool, repeat: bool
) -> list[Prompt]:
    """Prompts from lines of JSON, {"prompt": TEXT, "output_tokens": N}; -1 takes N of each line. Raises StartError."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as cause:
            raise StartError(f"{path}, line {number} is no JSON: {cause}") from None
        if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
            raise StartError(f'{path}, line {number} has no text as "prompt"')
        length = entry.get("output_tokens") if output == -1 else output
        if not isinstance(length, int) or isinstance(length, bool) or length < 1:
            raise StartError(f'{path}, line {number} has no number above 0 as "output_tokens"')
        found.append(Prompt(entry["prompt"], len(text.encode(entry["prompt"])) if text else None, length))
    return chosen(found, count, seed, path, shuffle=shuffle, repeat=repeat)


def chosen(found: list[Prompt], count: int, seed: int, path: Path, *, shuffle: bool, repeat: bool) -> list[Prompt]:
    """`count` of them; where there are fewer, some again if they may be repeated. Raises StartError for none."""
    if not found:
        raise StartError(f"{path} has no prompt that can be sent")
    random = np.random.default_rng(seed)
    order = [found[place] for place in random.permutation(len(found))] if shuffle else found
    if repeat and len(order) < count:
        order = order + [order[place] for place in random.integers(len(order), size=count - len(order))]
    return order[:count]
