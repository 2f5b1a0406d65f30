"""The Python API: text in, text out, engine and tokenizer in this process. Knows both; holds no policy of either."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rvllm.config import DEFAULT_MODEL, EngineConfig, Speculation
from rvllm.engine.engine import Engine
from rvllm.engine.load import load_engine
from rvllm.engine.request import Request, TokenEvent, check_request
from rvllm.engine.tally import Load
from rvllm.model.files import Progress, locate
from rvllm.model.source import open_source
from rvllm.sampling.params import SamplingParams
from rvllm.text.completion import (
    CompletionOutput,
    Delta,
    Logprobs,
    Terms,
    Writer,
    default_params,
    drawing,
    open_tokenizer,
    settled_seed,
    with_bad_word_ids,
)
from rvllm.text.token_text import TokenTexts

Prompt = str | Sequence[int]
_SHARED = Terms()


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
        self.tokenizer = open_tokenizer(self.config, files, progress)
        self.tokenizer.check_fits(source.config.vocab_size)
        self._engine: Engine = load_engine(
            source,
            self.config,
            vocab_limit=self.tokenizer.vocab_size,
            eos_ids=frozenset(self.tokenizer.eos_token_ids),
            progress=progress,
            warn=warn,
        )
        self.default_params = default_params(self.config, source.generation)
        self._texts = TokenTexts(self.tokenizer)
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
        return self._complete(asked, params, Terms(priority, cache_salt))

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
        writer = Writer(self.tokenizer, request)
        try:
            self._add(request)
            while writer.finish_reason is None:
                while not self._events[request.id]:
                    self._step()
                yield writer.write(self._events[request.id].popleft())
        finally:
            self._forget(request.id)

    def _complete(
        self, prompts: Sequence[tuple[str | None, list[int]]], params: SamplingParams, terms: Terms = _SHARED
    ) -> list[RequestOutput]:
        """All prompts at once. Every request is checked before any starts."""
        groups = [[self._request(ids, params, index, terms) for index in range(params.n)] for _, ids in prompts]
        writers = {request.id: Writer(self.tokenizer, request) for group in groups for request in group}
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

    def _run(self, groups: Sequence[Sequence[Request]], writers: Mapping[str, Writer]) -> None:
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
        self._engine.add(*map(drawing, requests))
        for request in requests:
            self._events[request.id] = deque()

    def _step(self) -> set[str]:
        """One step of the engine; every request's tokens wait in its own queue, whoever asked. Who got some."""
        found = set()
        for event in self._engine.step():
            self._events[event.request_id].append(event)
            found.add(event.request_id)
        return found

    def _write_all(self, request_id: str, writer: Writer) -> None:
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
        self, prompt_ids: Sequence[int], params: SamplingParams, index: int = 0, terms: Terms = _SHARED
    ) -> Request:
        """The index-th of n requests, its id and seed settled. Raises BadRequest where the engine cannot run it."""
        limit = self._engine.limits.vocab_limit
        params = with_bad_word_ids(self.tokenizer, params)
        check_request(prompt_ids, params, vocab_limit=limit, max_logprobs=self.config.max_logprobs)
        terms.check()
        if params.structured_outputs is not None:
            grammars = self._engine.grammars or self._engine.learn(self._texts.vocabulary(limit))
            grammars.compile(params.structured_outputs)
        self._requests += 1
        name = f"request-{self._requests}"
        seed = settled_seed(params, index, self.config.seed, self._requests)
        return Request(name, tuple(prompt_ids), params, seed, terms.priority, terms.cache_salt)


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)
