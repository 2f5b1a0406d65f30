"""Which tokens a grammar lets come next, by llguidance. Knows tokens' bytes and grammars; no step and no device.

A grammar is compiled once, whoever asks for it, and copied for each sequence. Its masks leave open how a text is cut
into tokens. Nothing here is imported before the first grammar comes.
"""

from __future__ import annotations

import json
import os
import re
from collections import OrderedDict
from collections.abc import Sequence as Items
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np

from rvllm.errors import BadRequest
from rvllm.program.program import Program
from rvllm.sampling.params import SamplingParams
from rvllm.sampling.sampler import Mask
from rvllm.sampling.structured import StructuredOutputsParams
from rvllm.sampling.tags import Tags

MOST_KEPT = 32  # compiled grammars
MOST_THREADS = 8
_HEAD = '%llguidance {"no_forcing": true}\n'
_PLACE = re.compile(r"(at )?\d+\(\d+\): (failed to compile JSON schema: )?")
_MOST_SAID = 300


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Each id's bytes, empty where it has no token. special_ids: tokens that no grammar's text stands for."""

    tokens: tuple[bytes, ...]
    special_ids: frozenset[int]


class Matcher:
    """How far one sequence has come in its grammar.

    mask: (width,) uint32 as in SamplingRow, written anew by `Grammars.fill`.
    complete: whether the text is, and nothing may follow. error: why it cannot go on, if it cannot.
    """

    def __init__(self, inner: Any, buffer: Mask, width: int, ends: bool) -> None:
        self.inner, self.buffer, self.mask = inner, buffer, buffer[:width]
        self.ends = ends  # whether end-of-sequence ids may be drawn where the text may end
        self.complete = False
        self.error: str | None = None

    def accept(self, token: int) -> None:
        """Go on by a token of the mask."""
        if not self.inner.consume_token(token):
            self.error = self.error or f"the grammar cannot be followed any further: {_reason(self.inner)}"
        self.complete = bool(self.inner.is_stopped())


class Grammars:
    """The grammars over one vocabulary. `compile` may run in another thread, beside the rest.

    width: words of a mask; eos_ids: drawn where a text may end.
    """

    def __init__(self, vocabulary: Vocabulary, width: int, eos_ids: frozenset[int]) -> None:
        """Raises BadRequest where llguidance is not installed."""
        self._library = _library()
        self._count, self._width = len(vocabulary.tokens), width
        self._words = self._count // 32 + 1  # one bit more: whether the text may end
        self._tokenizer = self._library.LLTokenizer(_Tokens(vocabulary, eos_ids))
        self._limits = self._library.LLParserLimits(verbose_errors=False)
        self._eos = np.zeros(max(self._words, width), np.uint32)
        for token in eos_ids:
            if token < self._count:
                self._eos[token // 32] |= np.uint32(1 << token % 32)
        self._compiled: OrderedDict[StructuredOutputsParams, Any] = OrderedDict()
        self._lock = Lock()
        self._executor: Any = None

    def compile(self, asked: StructuredOutputsParams) -> Any:
        """The grammar, ready to be copied. Raises BadRequest where it cannot be followed."""
        with self._lock:
            if (found := self._compiled.get(asked)) is not None:
                self._compiled.move_to_end(asked)
                return found
        text = _grammar(asked, self._library)
        made = self._library.LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        if not made.is_error():
            made.compute_bitmask()  # some are found to be empty only now
        if made.is_error():
            raise _refused(_reason(made))
        if made.is_stopped():
            raise _refused("no text but the empty one has this form")
        with self._lock:
            self._compiled[asked] = made
            if len(self._compiled) > MOST_KEPT:
                self._compiled.popitem(last=False)
        return made

    def matcher(self, asked: StructuredOutputsParams, *, ends: bool) -> Matcher:
        """A sequence's own, at its beginning. Raises BadRequest as `compile` does."""
        inner = self.compile(asked).deep_copy()
        return Matcher(inner, np.zeros(max(self._words, self._width), np.uint32), self._width, ends)

    def fill(self, matchers: Items[Matcher]) -> None:
        """Write each one's mask. That of one with an error allows anything: its sequence ends with the next token."""
        if len(matchers) > 1:
            self._fill_side_by_side(matchers)
        for matcher in matchers:
            if len(matchers) == 1:
                matcher.inner.unsafe_compute_mask_ptr(matcher.buffer.ctypes.data, 4 * self._words)
            self._finish(matcher)

    def _fill_side_by_side(self, matchers: Items[Matcher]) -> None:
        if self._executor is None:
            self._executor = self._library.LLExecutor(num_threads=min(MOST_THREADS, os.cpu_count() or 1))
        masks = np.zeros((len(matchers), self._words), np.uint32)
        pairs = [(matcher.inner, place) for place, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(pairs, masks.ctypes.data, 4 * self._words, len(matchers))
        for matcher, mask in zip(matchers, masks):
            matcher.buffer[: self._words] = mask

    def _finish(self, matcher: Matcher) -> None:
        """The bit behind the vocabulary says that the text may end here: then the ids that end it may be drawn."""
        buffer, end = matcher.buffer, np.uint32(1 << self._count % 32)
        may_end = bool(buffer[self._count // 32] & end)
        buffer[self._count // 32] &= ~end
        if matcher.error is None and matcher.inner.is_error():
            matcher.error = f"the grammar cannot be followed any further: {_reason(matcher.inner)}"
        if matcher.error is not None:
            buffer[:] = ~np.uint32(0)
        elif may_end and matcher.ends:
            buffer |= self._eos


def matcher_for(grammars: Grammars | None, params: SamplingParams) -> Matcher | None:
    """The matcher of a sequence with these parameters; None where they ask for no form. Raises BadRequest."""
    if params.structured_outputs is None:
        return None
    assert grammars is not None, "the vocabulary comes first"
    return grammars.matcher(params.structured_outputs, ends=not params.ignore_eos)


def mask_words(program: Program) -> int:
    """The words of a mask over the program's logits."""
    (_, logits) = program.output.shape
    assert isinstance(logits, int), logits
    return -(-logits // 32)


class _Tokens:
    """What llguidance asks of a tokenizer. It never has to cut text into tokens: no grammar forces any."""

    is_tokenizer_wrapper = True
    eos_token_id = bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, eos_ids: frozenset[int]) -> None:
        self.tokens = list(vocabulary.tokens)
        special = vocabulary.special_ids | eos_ids
        self.special_token_ids = sorted(token for token in special if token < len(self.tokens))

    def __call__(self, text: str) -> list[int]:
        raise AssertionError("a grammar that forces tokens")


def _library() -> Any:
    try:
        import llguidance
    except ModuleNotFoundError as cause:
        if cause.name != "llguidance":
            raise
        raise BadRequest(
            "structured output needs llguidance, which is not installed here",
            param="structured_outputs",
            hint="the operator can install it: python -m pip install llguidance",
        ) from None
    return llguidance


def _grammar(asked: StructuredOutputsParams, library: Any) -> str:
    """What llguidance is given. Raises BadRequest."""
    form = _lark(asked, library)
    if asked.after is None:
        return form
    free = f"start: free BLANK @form\nfree[suffix={json.dumps(asked.after)}]: /(.|\\n)*/\nBLANK: /[ \\n]*/\n"
    return json.dumps({"grammars": [{"lark_grammar": _HEAD + free}, {"name": "form", "lark_grammar": form}]})


def _lark(asked: StructuredOutputsParams, library: Any) -> str:
    """The grammar in the one language that llguidance has them all in. Raises BadRequest."""
    if asked.json is not None or asked.json_object:
        schema = {"type": "object"} if asked.json is None else json.loads(asked.json)
        return f"{_HEAD}start: %json {_schema(schema, asked)}"
    if asked.structural_tag is not None:
        return _HEAD + _tagged(Tags.parse(asked.structural_tag), asked)
    if asked.regex is not None:
        return _HEAD + str(json.loads(library.LLMatcher.grammar_from_regex(asked.regex))["grammars"][0]["lark_grammar"])
    if asked.choice is not None:
        return _HEAD + "start: " + " | ".join(map(json.dumps, dict.fromkeys(asked.choice)))
    from llguidance.gbnf_to_lark import any_to_lark

    assert asked.grammar is not None
    try:
        return _HEAD + any_to_lark(asked.grammar)
    except Exception as cause:  # whatever a stranger's grammar may run the converter into
        raise _refused(f"it is neither Lark nor GBNF: {cause}") from None


def _tagged(tags: Tags, asked: StructuredOutputsParams) -> str:
    """Free text, in which a trigger, as soon as it is complete, has to become one of its tags."""
    triggers = list(dict.fromkeys(tag.trigger for tag in tags.tags))
    lines = [f"trigger_{place}[lazy]: TEXT {json.dumps(trigger)}" for place, trigger in enumerate(triggers)]
    for place, tag in enumerate(tags.tags):
        rest = [json.dumps(text) if text else "" for text in (tag.begin.removeprefix(tag.trigger), tag.end)]
        inside = _schema(tag.schema, asked)
        lines.append(f"tag_{place}: trigger_{triggers.index(tag.trigger)} {rest[0]} %json {inside} {rest[1]}")
    one = " | ".join(f"tag_{place}" for place in range(len(tags.tags)))
    start = f"start: {one} | free" if tags.once else f"start: ({one})* free"
    return "\n".join([start, "free: TEXT", "TEXT: /(.|\\n)*/", *lines]) + "\n"


def _schema(schema: Any, asked: StructuredOutputsParams) -> str:
    if asked.disable_additional_properties:
        _close(schema)
    if asked.disable_any_whitespace:
        schema["x-guidance"] = {"whitespace_flexible": False}
    elif asked.whitespace_pattern is not None:
        schema["x-guidance"] = {"whitespace_pattern": asked.whitespace_pattern}
    return json.dumps(schema)


def _close(schema: Any) -> None:
    """Let objects have the properties that their schemas name, and no others."""
    if isinstance(schema, dict):
        if "properties" in schema:
            schema.setdefault("additionalProperties", False)
        for value in schema.values():
            _close(value)
    elif isinstance(schema, list):
        for value in schema:
            _close(value)


def _reason(inner: Any) -> str:
    """llguidance's words without the copy of the grammar that they end with, and without its own parts' states."""
    said = re.split(r"\n {1,4}\d+ \||\n<", str(inner.get_error()))[0]
    said = _PLACE.sub("", said, count=1)
    if said.startswith("NoExtension"):
        return "no text of the model's tokens has it"
    return " ".join(said.split())[:_MOST_SAID]


def _refused(why: str) -> BadRequest:
    return BadRequest(f"the text cannot be given this form: {why}", param="structured_outputs")
