"""The Python API: text in, text out, engine and tokenizer in this process. Knows both; holds no policy of either."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rvllm.config import DEFAULT_MODEL, EngineConfig, Speculation
from rvllm.engine.engine import Engine
from rvllm.engine.load import load_engine
from rvllm.engine.request import Request, TokenEvent, check_request
from rvllm.engine.tally import Load
from rvllm.errors import BadRequest
from rvllm.model.files import ModelFiles, Progress, locate, read_json
from rvllm.model.source import open_source
from rvllm.sampling.params import SamplingParams
from rvllm.sampling.philox import fresh_seed, offset_seed
from rvllm.text.stop import TextStream
from rvllm.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Logprobs = Mapping[int, float]

# What generation_config.json may set, as in vLLM; its max_new_tokens is our max_tokens.
_GENERATION_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
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
class RequestOutput:
    """A prompt and its `n` completions; fields as in vLLM.

    num_cached_tokens   tokens of the prompt that were in the prefix cache
    prompt_logprobs     of each token of the prompt, when asked for; None for the first, which nothing comes before
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool = True
    num_cached_tokens: int | None = None
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class _Terms:
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


class LLM:
    """A loaded model. `settings` are EngineConfig's fields by name; speculative_config may be vLLM's mapping.

        llm = LLM("smollm2")
        llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text

    Raises StartError where the model, the device or the settings do not allow it.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        progress: Progress | None = None,
        warn: Callable[[str], None] | None = None,
        **settings: Any,
    ) -> None:
        warn = warn or _warn
        guesses = settings.get("speculative_config")
        if isinstance(guesses, Mapping):
            settings["speculative_config"] = Speculation.parse(guesses)
        self.config = EngineConfig(model=model, **settings)
        files = locate(model, offline=self.config.offline, progress=progress)
        source = open_source(files, load_format=self.config.load_format, warn=warn)
        self.tokenizer = _tokenizer(self.config, files, progress)
        self.tokenizer.check_fits(source.config.vocab_size)
        self._engine: Engine = load_engine(
            source,
            self.config,
            vocab_limit=self.tokenizer.vocab_size,
            eos_ids=frozenset(self.tokenizer.eos_token_ids),
            progress=progress,
            warn=warn,
        )
        self.default_params = _default_params(self.config, source.generation)
        self._requests = 0
        self._events: dict[str, deque[TokenEvent]] = {}  # of every request in the engine

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together."""
        return self._engine.limits.max_model_len

    @property
    def has_chat_template(self) -> bool:
        return self.tokenizer.chat_template is not None

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a raw prompt, with the BOS token where the tokenizer puts one."""
        return self.tokenizer.encode(text, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> list[int]:
        """Ids of a conversation through the model's chat template; see Tokenizer.apply_chat_template."""
        return self.tokenizer.apply_chat_template(messages, **template)

    def get_default_sampling_params(self) -> SamplingParams:
        """What generation_config.json says, and vLLM's defaults for the rest."""
        return SamplingParams(**self.default_params)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt, a text or token ids each; results in the order of the prompts.

        priority: the lower, the sooner, with scheduling_policy="priority". cache_salt: share cached prefixes only with
        prompts of the same salt.
        """
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        items: Sequence[Any] = [prompts] if single else prompts
        asked = [(item, self.encode_prompt(item)) if isinstance(item, str) else (None, list(item)) for item in items]
        params = sampling_params or self.get_default_sampling_params()
        return self._complete(asked, params, _Terms(priority, cache_salt))

    @property
    def load(self) -> Load:
        """What the engine is busy with, and has done since it began: guesses and those that were right, too."""
        return self._engine.load

    def reset_prefix_cache(self) -> None:
        """Forget what earlier prompts left in the cache."""
        self._engine.forget_prefixes()

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation; `template` as for encode_chat."""
        asked = [(None, self.encode_chat(messages, **template))]
        return self._complete(asked, sampling_params or self.get_default_sampling_params())

    def stream(self, prompt_ids: Sequence[int], params: SamplingParams) -> Iterator[Delta]:
        """One completion as it grows; the last delta has the finish reason. Closing the iterator aborts the request."""
        request = self._request(prompt_ids, params)
        if params.max_tokens == 0:
            yield Delta("", (), (), "length", None)
            return
        writer = _Writer(self.tokenizer, request)
        try:
            self._add(request)
            while writer.finish_reason is None:
                while not self._events[request.id]:
                    self._step()
                yield writer.write(self._events[request.id].popleft())
        finally:
            self._forget(request.id)

    def _complete(
        self, prompts: Sequence[tuple[str | None, list[int]]], params: SamplingParams, terms: _Terms = _Terms()
    ) -> list[RequestOutput]:
        """All prompts at once. Every request is checked before any starts."""
        groups = [[self._request(ids, params, index, terms) for index in range(params.n)] for _, ids in prompts]
        writers = {request.id: _Writer(self.tokenizer, request) for group in groups for request in group}
        if params.max_tokens != 0 or params.prompt_logprobs is not None:
            self._run(groups, writers)
        return [
            RequestOutput(
                group[0].id,
                text,
                tuple(ids),
                tuple(writers[request.id].output(index) for index, request in enumerate(group)),
                num_cached_tokens=writers[group[0].id].cached_tokens,
                prompt_logprobs=writers[group[0].id].prompt_logprobs,
            )
            for (text, ids), group in zip(prompts, groups)
        ]

    def _run(self, groups: Sequence[Sequence[Request]], writers: Mapping[str, _Writer]) -> None:
        going = set(writers)
        try:
            for group in groups:
                self._add(*group)
            while going:
                for name in self._step() & going:
                    self._write_all(name, writers[name])
                    if writers[name].finish_reason is not None:
                        going.remove(name)
        finally:
            for name in going:
                self._forget(name)

    def _add(self, *requests: Request) -> None:
        """One prompt's completions to the engine. Where none is wanted, one token is drawn, which nobody sees."""
        self._engine.add(*map(_drawing, requests))
        for request in requests:
            self._events[request.id] = deque()

    def _step(self) -> set[str]:
        """One step of the engine; every request's tokens wait in its own queue, whoever asked. Who got some."""
        found = set()
        for event in self._engine.step():
            self._events[event.request_id].append(event)
            found.add(event.request_id)
        return found

    def _write_all(self, request_id: str, writer: _Writer) -> None:
        """Write the request's waiting tokens, and take it out of the engine when a stop string ends it."""
        events = self._events[request_id]
        while events and writer.finish_reason is None:
            writer.write(events.popleft())
        if writer.finish_reason is not None:
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        self._engine.abort(request_id)
        self._events.pop(request_id, None)

    def _request(
        self, prompt_ids: Sequence[int], params: SamplingParams, index: int = 0, terms: _Terms = _Terms()
    ) -> Request:
        """The index-th of n requests, its id and seed settled. Raises BadRequest where the engine cannot run it."""
        limit = self._engine.limits.vocab_limit
        params = self._with_bad_word_ids(params)
        check_request(prompt_ids, params, vocab_limit=limit, max_logprobs=self.config.max_logprobs)
        terms.check()
        self._requests += 1
        name, seed = f"request-{self._requests}", self._seed(params, index)
        return Request(name, tuple(prompt_ids), params, seed, terms.priority, terms.cache_salt)

    def _with_bad_word_ids(self, params: SamplingParams) -> SamplingParams:
        """As in vLLM, a bad word is barred as it stands at the beginning of a text and as it follows a space."""
        found = list(params.bad_words_token_ids)
        for word in params.bad_words:
            for text in (word.lstrip(), " " + word.lstrip()):
                ids = tuple(self.tokenizer.encode(text, add_special_tokens=False)) if word.strip() else ()
                if not ids:
                    raise BadRequest(f"bad_words has {word!r}, which has no tokens", param="bad_words")
                found.append(ids)
        return replace(params, bad_words=(), bad_words_token_ids=tuple(dict.fromkeys(found))) if found else params

    def _seed(self, params: SamplingParams, index: int) -> int:
        """The request's own seed, else one that follows from the engine's and the request's number, else entropy."""
        if params.seed is not None:
            return offset_seed(params.seed, index)
        if self.config.seed is not None:
            return offset_seed(self.config.seed, self._requests)
        return fresh_seed()


class _Writer:
    """Turns one request's tokens into text and remembers how it ended."""

    def __init__(self, tokenizer: Tokenizer, request: Request) -> None:
        params = request.params
        self._request = request
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
        nothing = params.max_tokens == 0 and params.prompt_logprobs is None
        self.finish_reason: str | None = "length" if nothing else None
        self._stop_reason: str | int | None = None
        self.cached_tokens: int | None = None
        self.prompt_logprobs: tuple[Logprobs | None, ...] | None = None

    def write(self, event: TokenEvent) -> Delta:
        """Take one token; the text that became certain with it."""
        params = self._request.params
        if event.cached_tokens is not None:
            self._keep_prompt(event)
        if params.max_tokens == 0:
            self.finish_reason = "length"
            return Delta("", (), (), "length", None)
        # The id that ends a completion is no part of its text.
        hidden = event.stop_id is not None and not params.include_stop_str_in_output
        text = "" if hidden else self._stream.push([event.token_id])
        if self._stream.stopped is not None:
            self.finish_reason, self._stop_reason = "stop", self._stream.stopped
        elif event.finish_reason is not None:
            text += self._stream.finish()
            self.finish_reason = event.finish_reason
            self._stop_reason = event.stop_id if event.stop_id in params.stop_token_ids else None
        logprobs = () if event.logprob is None else (dict(event.top_logprobs) | {event.token_id: event.logprob},)
        self._text.append(text)
        self._token_ids.append(event.token_id)
        self._logprobs.extend(logprobs)
        return Delta(text, (event.token_id,), logprobs, self.finish_reason, self._stop_reason)

    def _keep_prompt(self, event: TokenEvent) -> None:
        self.cached_tokens = event.cached_tokens
        if event.prompt_logprobs is not None:
            scores = [dict(one.top_logprobs) | {one.token_id: one.logprob or 0.0} for one in event.prompt_logprobs]
            self.prompt_logprobs = (None, *scores)

    def output(self, index: int) -> CompletionOutput:
        asked = self._request.params.logprobs is not None
        chosen = [entry[token] for entry, token in zip(self._logprobs, self._token_ids)]
        return CompletionOutput(
            index,
            "".join(self._text),
            tuple(self._token_ids),
            sum(chosen) if asked else None,
            tuple(self._logprobs) if asked else None,
            self.finish_reason,
            self._stop_reason,
        )


def _drawing(request: Request) -> Request:
    """For the engine, which always draws: a prompt that is only scored gets one token that nobody sees."""
    if request.params.max_tokens != 0:
        return request
    return replace(request, params=replace(request.params, max_tokens=1))


def _tokenizer(config: EngineConfig, files: ModelFiles, progress: Progress | None) -> Tokenizer:
    named = locate(config.tokenizer, offline=config.offline, progress=progress) if config.tokenizer else files
    tokenizer = Tokenizer.from_files(named)
    return tokenizer.with_chat_template(config.chat_template) if config.chat_template is not None else tokenizer


def _default_params(config: EngineConfig, generation: Mapping[str, Any]) -> dict[str, Any]:
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


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)
