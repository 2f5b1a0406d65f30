"""One front: a model's text on this side, the engine's link on the other, and completions between. Knows no HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol
from uuid import uuid4

from rvllm.api.admission import Admission
from rvllm.api.errors import HttpError, unavailable
from rvllm.api.metrics import Metrics, Timeline
from rvllm.config import ServerConfig
from rvllm.engine.request import Request, TokenEvent, check_request
from rvllm.engine.scheduler import check_length
from rvllm.errors import BadRequest, RvllmError
from rvllm.link.client import AsyncEngineClient, Stream, news
from rvllm.link.messages import Facts
from rvllm.sampling.params import SamplingParams
from rvllm.text.answer import Families
from rvllm.text.completion import Delta, Terms, Writer, drawing, joined, settled_seed, with_bad_word_ids
from rvllm.text.token_text import TokenTexts
from rvllm.text.tokenizer import Tokenizer

MOST_CHOICES = 1024
"""Completions of one request: of all its prompts together."""

MOST_FORM_CHARACTERS = 16 << 20
"""Of the forms of all its completions: each takes its own to the engine."""


@dataclass(frozen=True, slots=True)
class Served:
    """A model that is ready. `defaults`: sampling parameters of requests that bring none; `seed`: the engine's.

    families: how it writes what is no text. template_kwargs: of chats that bring none. content_format: as
    ChatTemplate.render has it.
    """

    tokenizer: Tokenizer
    texts: TokenTexts
    defaults: Mapping[str, Any]
    seed: int | None
    facts: Facts
    client: AsyncEngineClient
    families: Families
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    content_format: str = "auto"


@dataclass(frozen=True, slots=True)
class Prompt:
    """`text` None: it came as ids, or is a chat."""

    text: str | None
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One completion: `index` among all of the request, the n of its first prompt first.

    early: what is written already of a token that is still to be taken.
    """

    index: int
    prompt: Prompt
    request: Request
    writer: Writer
    line: Timeline
    early: list[Delta] = field(default_factory=list)


class AtOnce(Protocol):
    """Tells a client of tokens while whoever answers him sleeps."""

    def teller(self, choice: Choice) -> Teller | None:
        """Who tells of what comes next, once that is nothing but text until the last; None: not yet."""


Teller = Callable[[str, float], bool]
"""Tells of a text, perhaps an empty one, and when it came; False: it could not, now and without waiting."""


@dataclass(slots=True)
class Front:
    """`names` are the model's, the first in replies to requests that name none. `served`: once the model is ready.

    begun: requests so far; stopping: no more are taken; loading: how far that is; metrics: once the model is ready.
    habits: what requests have that say nothing of it. fingerprint: of system and settings, in replies.
    """

    names: Sequence[str]
    root: str
    created_s: int
    served: Served | None = None
    stopping: bool = False
    loading: str = "the model is being loaded"
    begun: int = 0
    metrics: Metrics | None = None
    admission: Admission = field(default_factory=Admission)
    habits: ServerConfig = field(default_factory=ServerConfig)
    fingerprint: str | None = None

    def ready(self) -> Served:
        """The model. Raises HttpError, 503, while there is none, or none any more."""
        if self.stopping:
            raise unavailable("the server is shutting down", "shutting_down")
        if self.served is None:
            raise unavailable(self.loading, "loading")
        if self.served.client.error is not None:
            raise unavailable(f"the engine is gone: {self.served.client.error}", "engine_dead")
        return self.served

    def name(self, asked: str | None) -> str:
        """The model's name as the request has it. Raises HttpError, 404, for one that is not served."""
        if asked is None or asked in self.names:
            return self.names[0] if asked is None else asked
        raise HttpError(
            404,
            f"the model {asked[:200]!r} is not served here, there is {', '.join(self.names)}",
            param="model",
            code="model_not_found",
        )

    async def learn_forms(self, params: SamplingParams) -> None:
        """Tell the engine what its tokens stand for, once, before the first text that must have a form."""
        if params.structured_outputs is not None and not self.ready().client.taught:
            await self.teach()

    async def teach(self) -> None:
        """Tell the engine what its tokens stand for. Raises HttpError, EngineDied."""
        served = self.ready()
        plain = served.families.markers(calls=False)
        vocabulary = await asyncio.to_thread(served.texts.vocabulary, served.facts.limits.vocab_limit, plain)
        served.client.teach(vocabulary)

    def generation(
        self, prompts: Sequence[Prompt], params: SamplingParams, terms: Terms, asked_s: float, name: str
    ) -> Generation:
        """Completions of each prompt, all checked, none begun. asked_s: when they were asked for, on the monotonic
        clock; name: the request's, in its reply. Raises BadRequest, HttpError.
        """
        served, metrics = self.ready(), self.metrics
        assert metrics is not None
        if len(prompts) * params.n > MOST_CHOICES:
            raise BadRequest(
                f"{len(prompts):,} prompts with n of {params.n:,} are {len(prompts) * params.n:,} completions, the "
                f"limit is {MOST_CHOICES:,}",
                param="n",
                hint="send fewer at once",
            )
        form = params.structured_outputs
        if form is not None and form.size * len(prompts) * params.n > MOST_FORM_CHARACTERS:
            raise BadRequest(
                f"structured_outputs has {form.size:,} characters for each of {len(prompts) * params.n:,} completions, "
                f"the limit is {MOST_FORM_CHARACTERS:,} in all",
                param="structured_outputs",
                hint="send fewer at once",
            )
        params = with_bad_word_ids(served.tokenizer, params)
        limits = served.facts.limits
        for prompt in prompts:
            # Length first: ids are looked at one by one.
            check_length(len(prompt.ids), limits)
            check_request(prompt.ids, params, vocab_limit=limits.vocab_limit, max_logprobs=served.facts.max_logprobs)
        unique = uuid4().hex  # for the engine, which has other fronts' requests too
        choices: list[Choice] = []
        for prompt in prompts:
            for place in range(params.n):
                self.begun += 1
                seed = settled_seed(params, place, served.seed, self.begun)
                index = len(choices)
                request = Request(f"{unique}-{index}", prompt.ids, params, seed, terms.priority, terms.cache_salt)
                line = Timeline(metrics, asked_s, len(prompt.ids))
                choices.append(Choice(index, prompt, request, Writer(served.tokenizer, request), line))
        return Generation(name, choices, served.client, metrics, self.admission, self.habits.stream_interval)


@dataclass(frozen=True, slots=True)
class Generation:
    """Completions that belong to one request, and their tokens' way from the engine to text.

    interval: tokens of one event of a stream.
    """

    name: str
    choices: Sequence[Choice]
    client: AsyncEngineClient
    metrics: Metrics
    admission: Admission
    interval: int

    @contextmanager
    def admitted(self, key: int | None, told: dict[str, Any]) -> Iterator[None]:
        """While it is answered. `key`: the number of the client's; told: is told lengths at the end, for the log.

        Raises HttpError, 429, where there is too much to do.
        """
        n = self.choices[0].request.params.n
        prompts = [(choice.index, len(choice.prompt.ids)) for choice in self.choices[::n]]
        with self.admission.admitted(len(self.choices), prompts, key) as began:
            for choice in self.choices:
                choice.line.began = partial(began, choice.index)
            self.metrics.asked(self.choices[0].request.params)
            try:
                yield
            finally:
                self.metrics.answered(max(choice.writer.token_count for choice in self.choices))
                told |= {
                    "prompt_tokens": sum(tokens for _, tokens in prompts),
                    "completion_tokens": sum(choice.writer.token_count for choice in self.choices),
                    "finish_reason": ",".join(choice.writer.finish_reason or "none" for choice in self.choices),
                }

    @property
    def formed(self) -> bool:
        """Whether its texts must have a form."""
        return any(choice.request.params.structured_outputs is not None for choice in self.choices)

    async def deltas(self, at_once: AtOnce | None = None) -> AsyncGenerator[list[tuple[Choice, Delta]], None]:
        """What came since it was asked last, never nothing. Closing the iterator takes all out of the engine.

        at_once: is told in place of the caller, while he waits here, of what he need not know.

        Raises what ended a request: EngineError, BadRequest.
        """
        over = [choice for choice in self.choices if choice.writer.finish_reason is not None]
        if over:  # nothing is to be generated
            yield [(choice, Delta("", (), (), choice.writer.finish_reason, None)) for choice in over]
        others = [choice for choice in self.choices if choice.writer.finish_reason is None]
        if not others:
            return
        for choice in others:
            choice.line.submit()  # before the engine has them, whose waiting counts from there
        going = dict(zip(self.client.submit([drawing(choice.request) for choice in others]), others))
        reason = "abort"
        try:
            while going:
                await news(going)
                if batch := self._take(going):
                    yield batch
                    if at_once is not None and len(self.choices) == 1:  # others' tokens of a step go in one write
                        _take_at_once(at_once, going)
        except RvllmError:
            reason = "error"
            raise
        finally:
            self.client.abort([stream.request_id for stream in going])
            for choice in going.values():
                self.metrics.ended(choice.line, reason)

    def batches(self, stream: bool, at_once: AtOnce | None = None) -> AsyncGenerator[list[tuple[Choice, Delta]], None]:
        """Its deltas, as a reply wants them that is streamed or not."""
        return self._spaced() if stream and self.interval > 1 else self.deltas(at_once)

    async def _spaced(self) -> AsyncGenerator[list[tuple[Choice, Delta]], None]:
        """The same, each completion's put together to `interval` tokens, but for its first and its last."""
        begun: set[int] = set()
        kept: dict[int, list[Delta]] = {}
        async with aclosing(self.deltas()) as batches:
            async for batch in batches:
                ripe = []
                for choice, delta in batch:
                    waiting = kept.setdefault(choice.index, [])
                    waiting.append(delta)
                    last = delta.finish_reason is not None
                    if last or choice.index not in begun or sum(len(one.token_ids) for one in waiting) >= self.interval:
                        begun.add(choice.index)
                        ripe.append((choice, joined(kept.pop(choice.index))))
                if ripe:
                    yield ripe

    def _take(self, going: dict[Stream, Choice]) -> list[tuple[Choice, Delta]]:
        """Write what there is, and take those that end, also by a stop string, out of `going` and the engine."""
        batch = []
        for stream, choice in list(going.items()):
            for event, came_s in zip(stream.take(), stream.times_s):
                batch.append((choice, choice.early.pop() if choice.early else choice.writer.write(event)))
                choice.line.came(event, came_s)
                if (reason := choice.writer.finish_reason) is not None:
                    self.client.abort([stream.request_id])
                    self.metrics.ended(choice.line, reason)
                    del going[stream]
                    break
        return batch


def _take_at_once(at_once: AtOnce, going: Mapping[Stream, Choice]) -> None:
    """Have tokens that come from now on told of as they come, once that can be."""
    for stream, choice in going.items():
        if stream.taker is None and (tell := at_once.teller(choice)) is not None:
            stream.taker = _Taker(stream, choice, choice.writer, choice.line, tell).take


@dataclass(frozen=True, slots=True)
class _Taker:
    """Writes tokens and tells of them; leaves to who answers what ends the text, or cannot be told now."""

    stream: Stream
    choice: Choice
    writer: Writer
    line: Timeline
    tell: Teller

    def take(self, event: TokenEvent, came_s: float) -> bool:
        try:
            text = self.writer.add(event)
            if self.writer.finish_reason is not None or not self.tell(text, came_s):  # by a stop string
                self.choice.early.append(self.writer.delta(event, text))
                return False
            self.line.came(event, came_s)
        except Exception as error:  # a fault in this request, which is not to be the link's
            self.stream.end(error)
        return True
