"""What a request may ask of the sampler, checked. Knows ranges; never sees a logit, a text or a device.

Names and defaults are vLLM's. A `SamplingParams` that exists is valid on its own; whether its token ids exist
depends on the model and is `check_vocabulary`'s question.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from numbers import Integral, Real

from rvllm.errors import BadRequest
from rvllm.sampling.structured import StructuredOutputsParams

# vLLM's bound for "zero": here the noise could still turn only a gap under 26e-5 between two logits.
GREEDY_TEMPERATURE = 1e-5

_FLOAT32_MAX = 3.4028234663852886e38  # parameters travel to the device as float32
_FLOAT32_TINY = 2.0**-126  # the smallest that every device holds: a division by it is not one by 0
_INT64_MAX = 2**63 - 1
BIAS_LIMIT = 100.0
_DECIMAL = re.compile(r"-?[0-9]{1,19}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """One request's sampling parameters; raises BadRequest naming the field that is out of range.

    temperature, top_p, top_k   temperature under 1e-5, top_p 0 and top_k 1 mean greedy; top_k 0, -1 or beyond
                                the vocabulary means off (-1 is stored as 0)
    min_p                       keep tokens at least this fraction as probable as the best one
    repetition_penalty          divides a positive, multiplies a negative logit of a token in prompt or output
    presence_, frequency_penalty  subtracted once, and once per occurrence, for tokens of the output only
    seed                        any int64; None, or -1 as in vLLM, draws one from the system's entropy
    max_tokens                  None: to the end of the context; 0: nothing is generated, the prompt is scored
    min_tokens                  no end-of-sequence or stop id before this many tokens
    logprobs                    None: none; k: the chosen token's, and the k best
    prompt_logprobs             None: none; k: of every prompt token but the first, its own and the k best
    stop, stop_token_ids        also given as None or a list; `stop` also as one string
    logit_bias                  {id: -100..100}, an id also as a decimal string; added to the logits
    allowed_token_ids           None: all; otherwise a list of ids, the only ones ever drawn
    bad_words                   strings, never written where there is a choice; the tokenizer's owner makes ids of them
    bad_words_token_ids         the same as lists of ids: the last is not drawn where the output ends with the others
    structured_outputs          the form that the text must have; also given as an object with its fields
    speculate                   whether tokens may be guessed where the engine does so: the output is the same
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    structured_outputs: StructuredOutputsParams | None = None
    speculate: bool = True

    def __post_init__(self) -> None:
        for name, (low, high) in REAL_RANGES.items():
            self._set(name, _real(name, getattr(self, name), low, high))
        for name, (least, most) in WHOLE_RANGES.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                self._set(name, _whole(name, value, least, most))
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise _refusal(name, getattr(self, name), "true or false")
        self._set("top_k", max(self.top_k, 0))
        self._set("seed", None if self.seed == -1 else self.seed)
        self._set("stop", _strings("stop", self.stop))
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids) or ())
        self._set("logit_bias", _biases(self.logit_bias))
        self._set("allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
        self._set("bad_words", _strings("bad_words", self.bad_words))
        self._set("bad_words_token_ids", _sequences("bad_words_token_ids", self.bad_words_token_ids))
        if self.structured_outputs is not None:
            self._set("structured_outputs", StructuredOutputsParams.parse(self.structured_outputs))
        self._check_together()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_together(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _refusal("min_tokens", self.min_tokens, f"max_tokens, which is {self.max_tokens}")
        if self.stop and not self.detokenize:
            raise BadRequest(
                "stop has strings, but detokenize is false and no text will exist to find them in",
                param="stop",
                hint="use stop_token_ids, or leave detokenize true",
            )
        if self.structured_outputs is not None and self.allowed_token_ids is not None:
            raise BadRequest(
                "allowed_token_ids and structured_outputs together may leave no token to draw",
                param="allowed_token_ids",
                hint="leave one of them out",
            )
        if self.allowed_token_ids == ():
            raise BadRequest(
                "allowed_token_ids is empty, so no token could be drawn",
                param="allowed_token_ids",
                hint="list at least one id, or leave it out to allow all",
            )

    @property
    def penalises(self) -> bool:
        """Whether what was drawn, or prompted, changes what may be drawn."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def greedy(self) -> bool:
        """Whether the best token is taken, without chance."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_p == 0 or self.top_k == 1

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise BadRequest where a token id is not below `vocab_size`, the number of ids that may be drawn."""
        for name, ids in (
            ("logit_bias", self.logit_bias or ()),
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("bad_words_token_ids", chain.from_iterable(self.bad_words_token_ids)),
        ):
            for token in ids:
                if token >= vocab_size:
                    raise BadRequest(
                        f"{name} has token id {token}, the limit is {vocab_size - 1}",
                        param=name,
                        hint=f"this model's token ids are 0 to {vocab_size - 1}",
                    )


REAL_RANGES = {
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (_FLOAT32_TINY, _FLOAT32_MAX),
    "temperature": (0.0, _FLOAT32_MAX),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
}
WHOLE_RANGES = {
    "n": (1, _INT64_MAX),
    "top_k": (-1, _INT64_MAX),
    "seed": (-(2**63), _INT64_MAX),
    "max_tokens": (0, _INT64_MAX),
    "min_tokens": (0, _INT64_MAX),
    "logprobs": (0, _INT64_MAX),
    "prompt_logprobs": (0, _INT64_MAX),
}
_OPTIONAL = ("seed", "max_tokens", "logprobs", "prompt_logprobs")
_FLAGS = ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output", "speculate")


def _refusal(name: str, given: object, limit: str) -> BadRequest:
    return BadRequest(f"{name} is {reprlib.repr(given)}, the limit is {limit}", param=name)


def _real(name: str, given: object, low: float, high: float) -> float:
    limit = f"a number from {low:g} to {high:g}"
    # bool is an int to Python, but true is no number to a client.
    if isinstance(given, bool) or not isinstance(given, Real):
        raise _refusal(name, given, limit)
    try:
        value = float(given)
    except OverflowError:
        raise _refusal(name, given, limit) from None
    if not low <= value <= high:  # NaN is not
        raise _refusal(name, given, limit)
    return value


def _whole(name: str, given: object, low: int, high: int) -> int:
    if isinstance(given, Integral) and not isinstance(given, bool):
        value = int(given)
        if low <= value <= high:
            return value
    raise _refusal(name, given, f"a whole number from {low} to {high}")


def _strings(name: str, given: object) -> tuple[str, ...]:
    items = _items(name, (given,) if isinstance(given, str) else given, "strings") or ()
    for item in items:
        if not isinstance(item, str) or not item:
            raise _refusal(name, given, "a string or a list of strings, none empty")
    return tuple(str(item) for item in items)


def _token_ids(name: str, given: object) -> tuple[int, ...] | None:
    items = _items(name, given, "token ids")
    return None if items is None else tuple(_whole(name, item, 0, _INT64_MAX) for item in items)


def _sequences(name: str, given: object) -> tuple[tuple[int, ...], ...]:
    found = []
    for item in _items(name, given, "lists of token ids") or ():
        ids = _token_ids(name, item)
        if not ids:
            raise _refusal(name, given, "lists of token ids, none empty")
        found.append(ids)
    return tuple(found)


def _items(name: str, given: object, what: str) -> tuple[object, ...] | None:
    if given is None:
        return None
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise _refusal(name, given, f"a list of {what}")
    return tuple(given)


def _biases(given: object) -> Mapping[int, float] | None:
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise _refusal("logit_bias", given, "an object of token id to bias")
    biases = {_bias_id(key): _real("logit_bias", value, -BIAS_LIMIT, BIAS_LIMIT) for key, value in given.items()}
    if len(biases) < len(given):
        raise BadRequest("logit_bias names a token id twice", param="logit_bias")
    return biases


def _bias_id(key: object) -> int:
    if isinstance(key, str) and _DECIMAL.fullmatch(key):
        key = int(key)
    return _whole("logit_bias", key, 0, _INT64_MAX)
