"""The endpoints: a body becomes prompts and parameters, a generation a reply. Knows no socket and no process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, TypeVar

from rvllm.api.details import Details, IdTexts
from rvllm.api.front import Front, Prompt, Served
from rvllm.api.http import DONE, REQUEST_ID, Exchange, Routes, event, while_connected
from rvllm.api.replies import ChatReply, CompletionReply, Reply
from rvllm.api.requests import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    SamplingBody,
    StreamOptions,
    TokenizeBody,
    parse,
)
from rvllm.errors import BadRequest, PromptTooLong
from rvllm.text.token_text import TokenTexts
from rvllm.version import VERSION

OPEN_ROUTES = ("/health", "/ping")
"""They need no key."""

COMPLETION_TOKENS = 16
"""max_tokens of a completion that brings none, as in OpenAI's API."""

INLINE_BYTES = 1 << 14
"""Of a body: above, its text is encoded in a thread of its own, so that others' tokens go on."""

SHRINKAGE = 4
"""How much shorter than a text its normal form may be: three characters may become one."""

Result = TypeVar("Result")
_TEMPLATE_ARGUMENTS = (
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "self",
)  # fmt: skip


def routes(front: Front) -> Routes:
    """Every path of a front, and what it takes."""
    api = Api(front)
    return {
        "/health": {"GET": api.health},
        "/ping": {"GET": api.health, "POST": api.health},
        "/version": {"GET": api.version},
        "/metrics": {"GET": api.metrics},
        "/load": {"GET": api.load},
        "/v1/models": {"GET": api.models},
        "/v1/models/": {"GET": api.one_model},
        "/v1/completions": {"POST": api.completions},
        "/v1/chat/completions": {"POST": api.chat},
        "/tokenize": {"POST": api.tokenize},
        "/detokenize": {"POST": api.detokenize},
    }


class Api:
    """The handlers of one front."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def health(self, exchange: Exchange) -> None:
        """200 once requests can be answered, 503 before and after, with the reason."""
        self._front.ready()
        await exchange.reply(b"")

    async def version(self, exchange: Exchange) -> None:
        await exchange.reply_json({"version": VERSION})

    async def metrics(self, exchange: Exchange) -> None:
        metrics = self._front.metrics
        if metrics is None:
            self._front.ready()  # raises: it is still being loaded
        assert metrics is not None
        if self._front.served is not None:
            await metrics.engine.refresh(self._front.served.client)
        data, kind = metrics.page(exchange.headers.get("accept", ""))
        await exchange.reply(data, headers={"content-type": kind})

    async def load(self, exchange: Exchange) -> None:
        """Requests for text that are being answered."""
        metrics = self._front.metrics
        await exchange.reply_json({"server_load": 0 if metrics is None else metrics.going()})

    async def models(self, exchange: Exchange) -> None:
        data = [self._model(name) for name in self._front.names]
        await exchange.reply_json({"object": "list", "data": data})

    async def one_model(self, exchange: Exchange) -> None:
        await exchange.reply_json(self._model(self._front.name(exchange.name)))

    def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._front.created_s,
            "owned_by": "rvllm",
            "root": self._front.root,
            "parent": None,
            "max_model_len": self._front.ready().facts.limits.max_model_len,
        }

    async def completions(self, exchange: Exchange) -> None:
        data = await exchange.body()
        served = self._front.ready()
        body = parse(data, CompletionBody)
        name = self._front.name(body.model)
        body.check()
        asked = (body.logprobs if body.echo else None, body.prompt_logprobs)
        scored = max((top for top in asked if top is not None), default=None)
        params = body.sampling(
            dict(served.defaults) | {"max_tokens": COMPLETION_TOKENS}, logprobs=body.logprobs, prompt_logprobs=scored
        )
        terms = body.terms()
        prompts = await _aside(data, lambda: completion_prompts(served, body))
        generation = self._front.generation(
            _cut(served, body, prompts), params, terms, exchange.came_s, _name(exchange, body)
        )
        details = Details(served.texts, bool(body.return_token_ids), body.prompt_logprobs)
        texts = self._texts(served, body)
        reply = CompletionReply(
            generation, name, texts, details, body.logprobs, self._options(body), echo=bool(body.echo)
        )
        with generation.admitted(exchange.key, exchange.told):
            await while_connected(exchange, _answer(exchange, reply, bool(body.stream)))

    async def chat(self, exchange: Exchange) -> None:
        data = await exchange.body()
        served = self._front.ready()
        body = parse(data, ChatBody)
        name = self._front.name(body.model)
        body.check()
        top = _top_logprobs(served, body)
        tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        if (body.max_completion_tokens or 0) < 0:
            raise BadRequest(f"max_completion_tokens is {tokens}, the limit is 0", param="max_completion_tokens")
        params = body.sampling(
            {"max_tokens": None} | dict(served.defaults),
            logprobs=top,
            max_tokens=tokens,
            prompt_logprobs=body.prompt_logprobs,
        )
        terms = body.terms()
        prompt = Prompt(None, tuple(await _aside(data, lambda: chat_ids(served, body))))
        try:
            generation = self._front.generation(
                _cut(served, body, [prompt]), params, terms, exchange.came_s, _name(exchange, body)
            )
        except BadRequest as cause:
            cause.param = "messages" if cause.param == "prompt" else cause.param
            raise
        details = Details(served.texts, bool(body.return_token_ids), body.prompt_logprobs, of_prompt=False)
        reply = ChatReply(generation, name, self._texts(served, body), details, top, self._options(body))
        with generation.admitted(exchange.key, exchange.told):
            await while_connected(exchange, _answer(exchange, reply, bool(body.stream)))

    def _texts(self, served: Served, body: SamplingBody) -> TokenTexts | IdTexts:
        """How single tokens are shown."""
        given = body.return_tokens_as_token_ids
        by_id = self._front.habits.return_tokens_as_token_ids if given is None else given
        return IdTexts(served.texts) if by_id else served.texts

    def _options(self, body: SamplingBody) -> StreamOptions:
        given = body.stream_options or StreamOptions()
        if given.include_usage is None and self._front.habits.enable_force_include_usage:
            return StreamOptions(True, given.continuous_usage_stats)
        return given

    async def tokenize(self, exchange: Exchange) -> None:
        data = await exchange.body()
        served = self._front.ready()
        body = parse(data, TokenizeBody)
        self._front.name(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise BadRequest("give either prompt or messages", param="prompt")
        ids = await _aside(data, lambda: tokenize_ids(served, body))
        strings = [served.tokenizer.token_of(token) for token in ids] if body.return_token_strs else None
        length = served.facts.limits.max_model_len
        await exchange.reply_json({"count": len(ids), "max_model_len": length, "tokens": ids, "token_strs": strings})

    async def detokenize(self, exchange: Exchange) -> None:
        data = await exchange.body()
        served = self._front.ready()
        body = parse(data, DetokenizeBody)
        self._front.name(body.model)
        limit = served.facts.limits.vocab_limit
        for token in body.tokens:
            if not 0 <= token < limit:
                raise BadRequest(f"tokens has id {token}, ids are 0 to {limit - 1:,}", param="tokens")
        text = await _aside(data, lambda: served.tokenizer.decode(body.tokens, skip_special_tokens=False))
        await exchange.reply_json({"prompt": text})


async def _answer(exchange: Exchange, reply: Reply, stream: bool) -> None:
    """Reply with what a generation brings, as it comes or at its end."""
    if stream:
        await exchange.begin_events()
    given = reply.generation
    async with aclosing(given.spaced() if stream and given.interval > 1 else given.deltas()) as batches:
        async for batch in batches:
            if stream and (data := b"".join(map(event, reply.chunks(batch)))):
                await exchange.events(data)
    if not stream:
        await exchange.reply_json(reply.whole())
        return
    last = reply.last_chunk()
    await exchange.end((b"" if last is None else event(last)) + DONE)


async def _aside(data: bytes, work: Callable[[], Result]) -> Result:
    """Do what may take long, for a large body, in another thread."""
    return work() if len(data) <= INLINE_BYTES else await asyncio.to_thread(work)


def _name(exchange: Exchange, body: SamplingBody) -> str:
    """The request's: the header's, else the body's, else a new one."""
    given = body.request_id
    if given is None or exchange.headers.get("x-request-id"):
        return exchange.request_id
    if not REQUEST_ID.fullmatch(given):
        raise BadRequest("request_id must be 1 to 128 visible ASCII characters", param="request_id")
    return given


def _top_logprobs(served: Served, body: ChatBody) -> int | None:
    """A chat's logprobs and top_logprobs as SamplingParams has them."""
    if not body.logprobs:
        if body.top_logprobs:
            raise BadRequest("top_logprobs are for logprobs: true", param="top_logprobs")
        return None
    most = served.facts.max_logprobs
    if not 0 <= (body.top_logprobs or 0) <= most:
        raise BadRequest(f"top_logprobs is {body.top_logprobs}, the limit is 0 to {most}", param="top_logprobs")
    return body.top_logprobs or 0


# --- Prompts


def completion_prompts(served: Served, body: CompletionBody) -> list[Prompt]:
    """The prompts of a completion, in the order given. Raises BadRequest."""
    given = body.prompt
    if given is None:
        raise BadRequest("prompt is missing", param="prompt")
    if isinstance(given, str) or (isinstance(given, list) and given and all(type(item) is int for item in given)):
        given = [given]
    if not isinstance(given, list) or not given:
        raise _wrong_prompt()
    if all(isinstance(item, str) for item in given):
        special = body.add_special_tokens is not False
        if body.truncate_prompt_tokens is None:
            _check_characters(served, given)
        return [Prompt(text, tuple(encoded(served, text, special))) for text in given]
    if all(isinstance(item, list) and all(type(token) is int for token in item) for item in given):
        return [Prompt(None, tuple(ids)) for ids in given]
    raise _wrong_prompt()


def _check_characters(served: Served, texts: list[str]) -> None:
    """Raise PromptTooLong for a text that cannot fit however it is encoded, which would take seconds for megabytes."""
    length = served.facts.limits.max_model_len
    most = length * served.tokenizer.longest_token * SHRINKAGE
    longest = max(map(len, texts))
    if longest > most:
        raise PromptTooLong(
            f"the prompt has {longest:,} characters, which are more than the context's {length:,} tokens",
            param="prompt",
            hint="shorten the prompt, or raise --max-model-len where the model allows it",
        )


def encoded(served: Served, text: str, special: bool) -> list[int]:
    """A raw prompt's ids; special tokens' text in it is special tokens."""
    try:
        return served.tokenizer.encode(text, add_special_tokens=special)
    except BadRequest as cause:
        raise BadRequest(cause.message, param="prompt", hint=cause.hint) from None


def chat_ids(served: Served, body: ChatBody | TokenizeBody) -> list[int]:
    """A conversation's ids through the chat template. Raises BadRequest."""
    more = dict(body.chat_template_kwargs or {})
    if clash := sorted(set(more).intersection(_TEMPLATE_ARGUMENTS)):
        raise BadRequest(f"chat_template_kwargs must not set {clash[0]}", param="chat_template_kwargs")
    if isinstance(body, ChatBody):
        more = dict(served.template_kwargs) | more | {"documents": body.documents}
        if body.reasoning_effort is not None:
            more["reasoning_effort"] = body.reasoning_effort
    if body.messages is None:
        raise BadRequest("messages is missing", param="messages")
    goes_on = bool(body.continue_final_message)
    begins = not goes_on if body.add_generation_prompt is None else body.add_generation_prompt
    return served.tokenizer.apply_chat_template(
        body.messages, add_generation_prompt=begins, continue_final_message=goes_on, **more
    )


def tokenize_ids(served: Served, body: TokenizeBody) -> list[int]:
    if body.prompt is None:
        return chat_ids(served, body)
    return encoded(served, body.prompt, body.add_special_tokens is not False)


def _cut(served: Served, body: SamplingBody, prompts: list[Prompt]) -> list[Prompt]:
    """The prompts' last truncate_prompt_tokens tokens, or first; -1: as many as leave room for one more."""
    most = body.truncate_prompt_tokens
    if most is None:
        return prompts
    room = served.facts.limits.max_model_len - 1
    if most != -1 and not 1 <= most <= room:
        raise BadRequest(
            f"truncate_prompt_tokens is {most}, the limit is 1 to {room:,}, or -1", param="truncate_prompt_tokens"
        )
    most = room if most == -1 else most
    kept = slice(most) if body.truncation_side == "right" else slice(-most, None)
    return [prompt if len(prompt.ids) <= most else Prompt(None, prompt.ids[kept]) for prompt in prompts]


def _wrong_prompt() -> BadRequest:
    return BadRequest(
        "prompt must be a text, a list of texts, a list of token ids, or a list of lists of them, and not empty",
        param="prompt",
    )
