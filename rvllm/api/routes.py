"""The endpoints: a body becomes prompts and parameters, a generation a reply. Knows no socket and no process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from rvllm.api.details import Details, IdTexts
from rvllm.api.front import Front, Generation, Prompt, Served
from rvllm.api.http import DONE, REQUEST_ID, Exchange, Routes, event, while_connected
from rvllm.api.messages import CountBody, MessageReply, MessagesBody
from rvllm.api.messages import error_shape as anthropic_error
from rvllm.api.page import WebPage
from rvllm.api.prompts import chat_ids, completion_prompts, cut, tokenize_ids
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
from rvllm.api.responses import ResponseReply, ResponsesBody
from rvllm.api.tools import Tools, reader_for, tools_of
from rvllm.api.turns import TurnReply, typed_event
from rvllm.errors import BadRequest
from rvllm.sampling.params import SamplingParams
from rvllm.text.answer import AnswerReader
from rvllm.text.token_text import TokenTexts
from rvllm.text.tool_formats import Mistral
from rvllm.version import VERSION

OPEN_ROUTES = ("/", "/health", "/ping")
"""They need no key."""

COMPLETION_TOKENS = 16
"""max_tokens of a completion that brings none, as in OpenAI's API."""

INLINE_BYTES = 1 << 14
"""Of a body: above, its text is encoded in a thread of its own, so that others' tokens go on."""

FORM_SETTINGS = ("disable_any_whitespace", "disable_additional_properties")

PROMPT_END = 64
"""Tokens of a prompt that say whether what follows are thoughts."""

Result = TypeVar("Result")


def routes(front: Front) -> Routes:
    """Every path of a front, and what it takes."""
    api = Api(front)
    page: Routes = {} if front.habits.disable_web_page else {"/": {"GET": WebPage()}}
    return {
        **page,
        "/health": {"GET": api.health},
        "/ping": {"GET": api.health, "POST": api.health},
        "/version": {"GET": api.version},
        "/metrics": {"GET": api.metrics},
        "/load": {"GET": api.load},
        "/v1/models": {"GET": api.models},
        "/v1/models/": {"GET": api.one_model},
        "/v1/completions": {"POST": api.completions},
        "/v1/chat/completions": {"POST": api.chat},
        "/v1/responses": {"POST": api.responses},
        "/v1/messages": {"POST": api.messages},
        "/v1/messages/count_tokens": {"POST": api.count_tokens},
        "/v1/embeddings": {"POST": api.embeddings},
        "/tokenize": {"POST": api.tokenize},
        "/detokenize": {"POST": api.detokenize},
    }


@dataclass(frozen=True, slots=True)
class _Chat:
    """A chat that is about to begin. reader: makes who reads one completion; top: as in SamplingParams.logprobs."""

    served: Served
    name: str
    generation: Generation
    tools: Tools
    top: int | None
    reader: Callable[[], AnswerReader]


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
        params = self._formed(params)
        await self._front.learn_forms(params)
        generation = self._front.generation(
            cut(served, body, prompts), params, terms, exchange.came_s, _name(exchange, body)
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
        body = parse(data, ChatBody)
        chat = await self._begin_chat(exchange, data, body)
        details = Details(chat.served.texts, bool(body.return_token_ids), body.prompt_logprobs, of_prompt=False)
        reply = ChatReply(
            chat.generation,
            chat.name,
            self._texts(chat.served, body),
            details,
            chat.top,
            self._options(body),
            reader=chat.reader,
            named=chat.tools.named,
            thoughts=body.include_reasoning is not False,
            short_ids=chat.served.families.calls is Mistral,
        )
        with chat.generation.admitted(exchange.key, exchange.told):
            await while_connected(exchange, _answer(exchange, reply, bool(body.stream)))

    async def responses(self, exchange: Exchange) -> None:
        data = await exchange.body()
        body = parse(data, ResponsesBody)
        chat = await self._begin_chat(exchange, data, body.chat())
        reply = ResponseReply(chat.generation, chat.name, chat.reader(), body=body)
        exchange.shape = reply.error_shape
        with chat.generation.admitted(exchange.key, exchange.told):
            await while_connected(exchange, _answer_turn(exchange, reply, bool(body.stream)))

    async def messages(self, exchange: Exchange) -> None:
        exchange.shape = anthropic_error
        data = await exchange.body()
        body = parse(data, MessagesBody)
        chat = await self._begin_chat(exchange, data, body.chat())
        reply = MessageReply(chat.generation, chat.name, chat.reader())
        with chat.generation.admitted(exchange.key, exchange.told):
            await while_connected(exchange, _answer_turn(exchange, reply, bool(body.stream)))

    async def count_tokens(self, exchange: Exchange) -> None:
        exchange.shape = anthropic_error
        data = await exchange.body()
        served = self._front.ready()
        body = parse(data, CountBody)
        self._front.name(body.model)
        chat = body.chat()
        tools_of(chat.tools, chat.tool_choice, chat.parallel_tool_calls, served.families)
        ids = await _aside(data, lambda: chat_ids(served, chat, chat.tools))
        await exchange.reply_json({"input_tokens": len(ids)})

    async def embeddings(self, exchange: Exchange) -> None:
        await exchange.body()
        self._front.ready()
        raise BadRequest("this model writes text: it makes no embeddings", param="model")

    async def _begin_chat(self, exchange: Exchange, data: bytes, body: ChatBody) -> _Chat:
        """A chat whose completions are checked, and not begun. Raises BadRequest, HttpError."""
        served = self._front.ready()
        name = self._front.name(body.model)
        body.check()
        top = _top_logprobs(served, body)
        tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        if (body.max_completion_tokens or 0) < 0:
            raise BadRequest(f"max_completion_tokens is {tokens}, the limit is 0", param="max_completion_tokens")
        tools = tools_of(body.tools, body.tool_choice, body.parallel_tool_calls, served.families)
        params = body.sampling(
            {"max_tokens": None} | dict(served.defaults),
            logprobs=top,
            max_tokens=tokens,
            prompt_logprobs=body.prompt_logprobs,
        )
        terms = body.terms()
        shown = (
            None if tools.choice == "none" and self._front.habits.exclude_tools_when_tool_choice_none else body.tools
        )
        prompt = Prompt(None, tuple(await _aside(data, lambda: chat_ids(served, body, shown))))
        prompt_end = served.texts.decode(prompt.ids[-PROMPT_END:], skip_special_tokens=False)
        shows_special = body.skip_special_tokens is None
        params = self._formed(_for_tools(served, params, tools, prompt_end, shows_special=shows_special))
        await self._front.learn_forms(params)
        try:
            generation = self._front.generation(
                cut(served, body, [prompt]), params, terms, exchange.came_s, _name(exchange, body)
            )
        except BadRequest as cause:
            cause.param = "messages" if cause.param == "prompt" else cause.param
            raise
        return _Chat(served, name, generation, tools, top, lambda: reader_for(served.families, tools, prompt_end))

    def _formed(self, params: SamplingParams) -> SamplingParams:
        """With the form that is asked for as the server's settings have it."""
        form, more = params.structured_outputs, self._front.habits.structured_outputs_config
        if form is None or not more or (form.json is None and not form.json_object):
            return params
        given: dict[str, Any] = {name: getattr(form, name) or bool(more.get(name)) for name in FORM_SETTINGS}
        return replace(params, structured_outputs=replace(form, **given))

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
    # Whether a text can have the form that is asked for is known with its first token.
    if stream and not reply.generation.formed:
        await exchange.begin_events()
    async with aclosing(reply.generation.batches(stream)) as batches:
        async for batch in batches:
            if stream and not exchange.begun:
                await exchange.begin_events()
            if stream and (data := b"".join(map(event, reply.chunks(batch)))):
                await exchange.events(data)
    if not stream:
        await exchange.reply_json(reply.whole())
        return
    last = reply.last_chunk()
    await exchange.end((b"" if last is None else event(last)) + DONE)


async def _answer_turn(exchange: Exchange, reply: TurnReply, stream: bool) -> None:
    """Reply with blocks, as they come or at the end."""
    if stream and not reply.generation.formed:
        await _begin_turn(exchange, reply)
    async with aclosing(reply.generation.batches(stream)) as batches:
        async for batch in batches:
            if stream and not exchange.begun:
                await _begin_turn(exchange, reply)
            data = b"".join(map(typed_event, reply.take(batch)))
            if stream and data:
                await exchange.events(data)
    if stream:
        await exchange.end(b"".join(map(typed_event, reply.closing())))
    else:
        await exchange.reply_json(reply.whole())


async def _begin_turn(exchange: Exchange, reply: TurnReply) -> None:
    await exchange.begin_events()
    await exchange.events(b"".join(map(typed_event, reply.opening())))


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


def _for_tools(
    served: Served, params: SamplingParams, tools: Tools, prompt_end: str, *, shows_special: bool
) -> SamplingParams:
    """The parameters with the form that a call must have, and so that markers of calls and thoughts are seen."""
    families, form = served.families, params.structured_outputs
    if tools.form is not None:
        if form is not None:
            raise BadRequest(
                "tool_choice and response_format each say what form the text shall have", param="tool_choice"
            )
        form = tools.form
    if form is not None and families.thinking is not None and families.thinking.open_after(prompt_end):
        form = replace(form, after=families.thinking.end)
    hidden = params.skip_special_tokens
    if shows_special and families.marked_by_special(served.tokenizer, calls=tools.choice == "auto"):
        hidden = False
    return replace(params, structured_outputs=form, skip_special_tokens=hidden)
