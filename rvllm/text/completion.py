"""A request's text on both sides of an engine: terms and parameters before it, a writer of its tokens behind it.

Shared by the Python API and the server. Knows text, ids and what a request may ask; not where the engine runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rvllm.config import EngineConfig
from rvllm.engine.request import Request, TokenEvent
from rvllm.errors import BadRequest, EngineError
from rvllm.model.files import ModelFiles, Progress, locate, read_json
from rvllm.sampling.params import SamplingParams
from rvllm.sampling.philox import fresh_seed, offset_seed
from rvllm.text.stop import TextStream
from rvllm.text.tokenizer import Tokenizer

Logprobs = Mapping[int, float]

# What generation_config.json may set, as in vLLM; its max_new_tokens is our max_tokens.
_GENERATION_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


# Not frozen: one is made for every token, and a frozen one takes four times as long.
@dataclass(slots=True)
class Delta:
    """What one step added to one completion. `text` may be empty while a character or a stop string is incomplete.

    `logprobs`: for each token, its id and those of the likeliest, natural logs; empty unless asked for.
    `finish_reason`: None while it goes on, else "stop" | "length"; `stop_reason`: the stop string or id that ended it.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...]
    finish_reason: str | None
    stop_reason: str | int | None


def joined(deltas: Sequence[Delta]) -> Delta:
    """Several, one after the other, as one."""
    if len(deltas) == 1:
        return deltas[0]
    return Delta(
        "".join(delta.text for delta in deltas),
        tuple(token for delta in deltas for token in delta.token_ids),
        tuple(entry for delta in deltas for entry in delta.logprobs),
        deltas[-1].finish_reason,
        deltas[-1].stop_reason,
    )


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One finished completion; fields as in vLLM."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None
    logprobs: tuple[Logprobs, ...] | None
    finish_reason: str | None
    stop_reason: str | int | None


@dataclass(frozen=True, slots=True)
class Terms:
    """How a request is treated beside others; as in Request."""

    priority: int = 0
    cache_salt: str | None = None

    def check(self) -> None:
        """Raise BadRequest for what is no priority or no salt."""
        if type(self.priority) is not int or not -(2**63) <= self.priority < 2**63:
            raise BadRequest(f"priority is {self.priority!r}, it has to be a whole number", param="priority")
        if self.cache_salt is not None and (not isinstance(self.cache_salt, str) or not self.cache_salt):
            # Not shown: a salt may be a secret.
            raise BadRequest(
                "cache_salt is no text of at least one character", param="cache_salt", hint="leave it out to share"
            )


class Writer:
    """Turns one request's tokens into text and remembers how it ended."""

    __slots__ = (
        "_includes_stop", "_logprobs", "_scored", "_scores_only", "_stop_ids", "_stop_reason", "_stream", "_text",
        "_token_ids", "cached_tokens", "finish_reason", "prompt_logprobs",
    )  # fmt: skip

    def __init__(self, tokenizer: Tokenizer, request: Request) -> None:
        params = request.params
        self._stop_ids, self._includes_stop = params.stop_token_ids, params.include_stop_str_in_output
        self._scored = params.logprobs is not None
        self._scores_only = params.max_tokens == 0
        self._stream = TextStream(
            tokenizer,
            request.prompt_ids,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
        )
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[Logprobs] = []
        nothing = self._scores_only and params.prompt_logprobs is None
        self.finish_reason: str | None = "length" if nothing else None
        self._stop_reason: str | int | None = None
        self.cached_tokens: int | None = None
        self.prompt_logprobs: tuple[Logprobs | None, ...] | None = None

    def write(self, event: TokenEvent) -> Delta:
        """Take one token; what it adds. Raises EngineError where the request cannot go on."""
        return self.delta(event, self.add(event))

    def add(self, event: TokenEvent) -> str:
        """As `write`; the text alone that became certain."""
        if event.error is not None:
            raise EngineError(event.error)
        if event.cached_tokens is not None:
            self._keep_prompt(event)
        if self._scores_only:
            self.finish_reason = "length"
            return ""
        stream, token_id = self._stream, event.token_id
        # The id that ends a completion is no part of its text.
        text = stream.take(token_id) if event.stop_id is None or self._includes_stop else ""
        if stream.stopped is not None:
            self.finish_reason, self._stop_reason = "stop", stream.stopped
        elif event.finish_reason is not None:
            text += stream.finish()
            self.finish_reason = event.finish_reason
            self._stop_reason = event.stop_id if event.stop_id in self._stop_ids else None
        if event.logprob is not None:
            self._logprobs.append(dict(event.top_logprobs) | {token_id: event.logprob})
        self._text.append(text)
        self._token_ids.append(token_id)
        return text

    def delta(self, event: TokenEvent, text: str) -> Delta:
        """What the token added that was taken last, of which this is the text."""
        ids = () if self._scores_only else (event.token_id,)
        logprobs = () if event.logprob is None or self._scores_only else (self._logprobs[-1],)
        return Delta(text, ids, logprobs, self.finish_reason, self._stop_reason)

    @property
    def token_count(self) -> int:
        """Tokens of the completion so far: what ended it is one of them."""
        return len(self._token_ids)

    def _keep_prompt(self, event: TokenEvent) -> None:
        self.cached_tokens = event.cached_tokens
        if event.prompt_logprobs is not None:
            scores = [dict(one.top_logprobs) | {one.token_id: one.logprob or 0.0} for one in event.prompt_logprobs]
            self.prompt_logprobs = (None, *scores)

    def output(self, index: int) -> CompletionOutput:
        chosen = [entry[token] for entry, token in zip(self._logprobs, self._token_ids)]
        return CompletionOutput(
            index,
            "".join(self._text),
            tuple(self._token_ids),
            sum(chosen) if self._scored else None,
            tuple(self._logprobs) if self._scored else None,
            self.finish_reason,
            self._stop_reason,
        )


def drawing(request: Request) -> Request:
    """For the engine, which always draws: a prompt that is only scored gets one token that nobody sees."""
    if request.params.max_tokens != 0:
        return request
    return replace(request, params=replace(request.params, max_tokens=1))


def settled_seed(params: SamplingParams, index: int, engine_seed: int | None, number: int) -> int:
    """The index-th completion's seed: from the request's own, else from the engine's and the request's number, else
    from the system."""
    if params.seed is not None:
        return offset_seed(params.seed, index)
    return fresh_seed() if engine_seed is None else offset_seed(engine_seed, number)


def with_bad_word_ids(tokenizer: Tokenizer, params: SamplingParams) -> SamplingParams:
    """As in vLLM, a bad word is barred as it stands at the beginning of a text and as it follows a space."""
    found = list(params.bad_words_token_ids)
    for word in params.bad_words:
        for text in (word.lstrip(), " " + word.lstrip()):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False)) if word.strip() else ()
            if not ids:
                raise BadRequest(f"bad_words has {word!r}, which has no tokens", param="bad_words")
            found.append(ids)
    return replace(params, bad_words=(), bad_words_token_ids=tuple(dict.fromkeys(found))) if found else params


def open_tokenizer(config: EngineConfig, files: ModelFiles, progress: Progress | None) -> Tokenizer:
    """The model's own, or the one that the settings name, with their chat template. Raises StartError."""
    named = locate(config.tokenizer, offline=config.offline, progress=progress) if config.tokenizer else files
    tokenizer = Tokenizer.from_files(named)
    return tokenizer.with_chat_template(config.chat_template) if config.chat_template is not None else tokenizer


def default_params(config: EngineConfig, generation: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling defaults by --generation-config: "auto" the model's own, "vllm" none, else a folder's."""
    if config.generation_config == "vllm":
        return {}
    if config.generation_config != "auto":
        from pathlib import Path

        generation = read_json(Path(config.generation_config) / "generation_config.json")
    found = {key: generation[key] for key in _GENERATION_KEYS if generation.get(key) is not None}
    if generation.get("max_new_tokens") is not None:
        found["max_tokens"] = generation["max_new_tokens"]
    return found
