"""What generate and chat share: a model loaded as the options say, parameters, a completion as it grows."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from rvllm.cli.talk import Talk
from rvllm.errors import BadRequest
from rvllm.sampling.params import SamplingParams

if TYPE_CHECKING:
    from rvllm.llm import LLM

SAMPLING_NAMES = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "logit_bias", "seed", "logprobs",
    "structured_outputs",
)  # fmt: skip
_AT_FIRST: Mapping[str, Any] = {"temperature": 0.0, "max_tokens": None}


def split(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(sampling parameters that were given, the rest: EngineConfig's fields). Raises UsageError for bad parameters."""
    asked = {name: options.get(name) for name in SAMPLING_NAMES}
    # 0 is an answer; only what an option has when it is left out is not.
    given = {name: value for name, value in asked.items() if value is not None and value is not False and value != ()}
    try:
        SamplingParams(**{**_AT_FIRST, **given})  # before the model is loaded
    except BadRequest as cause:
        flag = f"--{cause.param.replace('_', '-')}: " if cause.param else ""
        raise click.UsageError(flag + cause.message) from None
    return given, {name: value for name, value in options.items() if name not in SAMPLING_NAMES}


def load(settings: dict[str, Any], talk: Talk) -> LLM:
    """The model, loaded. Raises StartError."""
    # Imports numpy and the tokenizer library: only once the options are known to be good.
    from rvllm.llm import LLM

    return LLM(progress=talk.progress, warn=talk.note, **settings)


def parameters(llm: LLM, given: Mapping[str, Any]) -> SamplingParams:
    """What was given, else what the model's generation_config.json says, else greedy to the end of the context."""
    return SamplingParams(**{**_AT_FIRST, **llm.default_params, **given})


@dataclass(slots=True)
class Completion:
    """One output, gathered from its deltas. Times are seconds since the request; None before there is a token."""

    prompt_tokens: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Mapping[int, float]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    first_token_s: float | None = None
    total_s: float = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """Speed after the first token, which waits for the prompt; None for fewer than two tokens."""
        if self.first_token_s is None or len(self.token_ids) < 2 or self.total_s <= self.first_token_s:
            return None
        return (len(self.token_ids) - 1) / (self.total_s - self.first_token_s)

    def summary(self) -> str:
        """One line: 37 tokens in, 8 out · first token 0.43 s · 27.1 tok/s."""
        said = [f"{self.prompt_tokens:,} tokens in, {len(self.token_ids):,} out"]
        if self.first_token_s is not None:
            said.append(f"first token {self.first_token_s:.2f} s")
        if self.tokens_per_s is not None:
            said.append(f"{self.tokens_per_s:.1f} tok/s")
        return " · ".join(said)


def complete(
    llm: LLM,
    prompt_ids: list[int],
    params: SamplingParams,
    write: Callable[[str], None],
    stopped: Callable[[], bool] = lambda: False,
) -> Completion:
    """Generate, giving each piece of text to `write` as it comes, until it ends or `stopped` says so."""
    result = Completion(len(prompt_ids))
    started_s = time.perf_counter()
    stream = llm.stream(prompt_ids, params)
    assert isinstance(stream, Generator), stream
    for delta in stream:
        result.total_s = time.perf_counter() - started_s
        if delta.token_ids and result.first_token_s is None:
            result.first_token_s = result.total_s
        result.text += delta.text
        result.token_ids += delta.token_ids
        result.logprobs += delta.logprobs
        result.finish_reason, result.stop_reason = delta.finish_reason, delta.stop_reason
        if delta.text:
            write(delta.text)
        if stopped():
            stream.close()
    return result
