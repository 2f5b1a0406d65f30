"""The endpoints: a body becomes prompts and parameters, a generation a reply. Knows no socket and no process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

from rvllm.api.answering import answer, answer_turn
from rvllm.api.details import Details, IdTexts
from rvllm.api.docs import Documents
from rvllm.api.front import Front, Generation, Prompt, Served
from rvllm.api.http import REQUEST_ID, Exchange, Handler, Route, Routes, while_connected
from rvllm.api.messages import CountBody, MessageReply, MessagesBody
from rvllm.api.messages import error_shape as anthropic_error
from rvllm.api.page import WebPage
from rvllm.api.prompts import chat_ids, completion_prompts, cut, tokenize_ids
from rvllm.api.replies import ChatReply, CompletionReply
from rvllm.api.reply_types import (
    ChatCompletion,
    Load,
    Message,
    Model,
    Models,
    Response,
    Text,
    TextCompletion,
    TokenCount,
    TokenizerInfo,
    Tokens,
    Version,
)
from rvllm.api.requests import (
    Body,
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


FIGURES = ("text/plain", "application/openmetrics-text")
READY = (503,)
BODY = (400, 404, 408, 413, 415, 503)
TEXT = (*BODY, 429, 504)
"""Statuses of errors of routes that need the model, read a body, write a text."""


def routes(front: Front) -> Routes:
    """Every path of a front, and what it takes."""
    api = Api(front)
    health = Route(api.health, "Whether requests are answered", errors=READY)

    def reads(
        kind: type[Body], handle: Callable[[Exchange, Body], Awaitable[None]], summary: str, reply: Any, **more: Any
    ) -> Route:
        """A route whose body is of that kind."""
        return Route(_reading(front, kind, handle), summary, kind, reply, **{"errors": BODY, **more})

    streams: dict[str, Any] = {"streams": True, "errors": TEXT}
    anthropic: dict[str, Any] = {"shape": anthropic_error}
    table: dict[str, dict[str, Route]] = {
        "/health": {"GET": health},
        "/ping": {"GET": health, "POST": health},
        "/version": {"GET": Route(api.version, "The server's version", reply=Version)},
        "/metrics": {"GET": Route(api.metrics, "Figures for Prometheus", reply=FIGURES, errors=READY)},
        "/load": {"GET": Route(api.load, "Requests for text that are being answered", reply=Load)},
        "/v1/models": {"GET": Route(api.models, "The names of the model", reply=Models, errors=READY)},
        "/v1/models/": {"GET": Route(api.one_model, "One of them", reply=Model, errors=(404, *READY))},
        "/v1/completions": {
            "POST": reads(CompletionBody, api.completions, "Continue a text", TextCompletion, **streams)
        },
        "/v1/chat/completions": {"POST": reads(ChatBody, api.chat, "Answer a chat", ChatCompletion, **streams)},
        "/v1/responses": {
            "POST": reads(ResponsesBody, api.responses, "Answer, as OpenAI's Responses API", Response, **streams)
        },
        "/v1/messages": {
            "POST": reads(MessagesBody, api.messages, "Answer, as Anthropic's API", Message, **streams, **anthropic)
        },
        "/v1/messages/count_tokens": {
            "POST": reads(CountBody, api.count_tokens, "Count the tokens of a chat", TokenCount, **anthropic)
        },
        "/v1/embeddings": {"POST": Route(api.embeddings, "Refused: models write text", reply=NoReturn, errors=BODY)},
        "/tokenize": {"POST": reads(TokenizeBody, api.tokenize, "The tokens of a text or a chat", Tokens)},
        "/detokenize": {"POST": reads(DetokenizeBody, api.detokenize, "The text of tokens", Text)},
    }
    if front.habits.enable_tokenizer_info_endpoint:
        info = Route(api.tokenizer_info, "The tokenizer and its chat template", reply=TokenizerInfo, errors=READY)
        table["/tokenizer_info"] = {"GET": info}
    if not front.habits.disable_web_page:
        table["/"] = {"GET": Route(WebPage(), "A page to chat with the model", reply=("text/html",))}
    if not front.habits.disable_fastapi_docs:
        documents = Documents(front, table, OPEN_ROUTES)
        table["/openapi.json"] = {"GET": Route(documents.schema, "This document", reply=("application/json",))}
        page = Route(documents.page, "The same to read", reply=("text/html",))
        table["/docs"] = table["/redoc"] = {"GET": page}
    return table


def _reading(front: Front, kind: type[Body], handle: Callable[[Exchange, Body], Awaitable[None]]) -> Handler:
    """Reads the body that it answers."""

    async def handler(exchange: Exchange) -> None:
        data = await exchange.body()
        front.ready()
        await handle(exchange, parse(data, kind))

    return handler


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
        data, headers = metrics.page(*(exchange.headers.get(name, "") for name in ("accept", "accept-encoding")))
        await exchange.reply(data, headers=headers)

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

    async def completions(self, exchange: Exchange, body: CompletionBody) -> None:
        served = self._front.ready()
        name = self._front.name(body.model)
        body.check()
        asked = (body.logprobs if body.echo else None, body.prompt_logprobs)
        scored = max((top for top in asked if top is not None), default=None)
        params = body.sampling(
            dict(served.defaults) | {"max_tokens": COMPLETION_TOKENS}, logprobs=body.logprobs, prompt_logprobs=scored
        )
        terms = body.terms()
        prompts = await _aside(exchange, lambda: completion_prompts(served, body))
        params = self._formed(params)
        await self._front.learn_forms(params)
        generation = self._front.generation(
            cut(served, body, prompts), params, terms, exchange.came_s, _name(exchange, body)
        )
        details = Details(served.texts, bool(body.return_token_ids), body.prompt_logprobs)
        texts = self._texts(served, body)
        reply = CompletionReply(
            generation,
            name,
            texts,
            details,
            body.logprobs,
            self._options(body),
            fingerprint=self._front.fingerprint,
            timed=self._front.habits.enable_per_request_metrics,
            echo=bool(body.echo),
        )
        with generation.admitted(exchange.key, exchange.told):
            await while_connected(exchange, answer(exchange, reply, bool(body.stream)))

    async def chat(self, exchange: Exchange, body: ChatBody) -> None:
        chat = await self._begin_chat(exchange, body)
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
            fingerprint=self._front.fingerprint,
            timed=self._front.habits.enable_per_request_metrics,
            role=self._front.habits.response_role,
        )
        with chat.generation.admitted(exchange.key, exchange.told):
            await while_connected(exchange, answer(exchange, reply, bool(body.stream)))

    async def responses(self, exchange: Exchange, body: ResponsesBody) -> None:
        chat = await self._begin_chat(exchange, body.chat())
        reply = ResponseReply(chat.generation, chat.name, chat.reader(), body=body)
        exchange.shape = reply.error_shape
        with chat.generation.admitted(exchange.key, exchange.told):
            await while_connected(exchange, answer_turn(exchange, reply, bool(body.stream)))

    async def messages(self, exchange: Exchange, body: MessagesBody) -> None:
        chat = await self._begin_chat(exchange, body.chat())
        reply = MessageReply(chat.generation, chat.name, chat.reader())
        with chat.generation.admitted(exchange.key, exchange.told):
            await while_connected(exchange, answer_turn(exchange, reply, bool(body.stream)))

    async def count_tokens(self, exchange: Exchange, body: CountBody) -> None:
        served = self._front.ready()
        self._front.name(body.model)
        chat = body.chat()
        tools_of(chat.tools, chat.tool_choice, chat.parallel_tool_calls, served.families)
        ids = await _aside(exchange, lambda: chat_ids(served, chat, chat.tools))
        await exchange.reply_json({"input_tokens": len(ids)})

    async def embeddings(self, exchange: Exchange) -> None:
        await exchange.body()
        self._front.ready()
        raise BadRequest("this model writes text: it makes no embeddings", param="model")

    async def _begin_chat(self, exchange: Exchange, body: ChatBody) -> _Chat:
        """A chat whose completions are checked, and not begun. Raises BadRequest, HttpError."""
        served = self._front.ready()
        name = self._front.name(body.model)
        body.check(trusted=self._front.habits.trust_request_chat_template)
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
        prompt = Prompt(None, tuple(await _aside(exchange, lambda: chat_ids(served, body, shown))))
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

    async def tokenize(self, exchange: Exchange, body: TokenizeBody) -> None:
        served = self._front.ready()
        self._front.name(body.model)
        body.check(trusted=self._front.habits.trust_request_chat_template)
        tools_of(body.tools, None if body.tools is None else "none", None, served.families)
        ids = await _aside(exchange, lambda: tokenize_ids(served, body))
        strings = [served.tokenizer.token_of(token) for token in ids] if body.return_token_strs else None
        length = served.facts.limits.max_model_len
        await exchange.reply_json({"count": len(ids), "max_model_len": length, "tokens": ids, "token_strs": strings})

    async def tokenizer_info(self, exchange: Exchange) -> None:
        """Who makes prompts from messages, and what its special tokens are."""
        served = self._front.ready()
        length = served.facts.limits.max_model_len
        await exchange.reply_json(served.tokenizer.info() | {"model_max_length": length})

    async def detokenize(self, exchange: Exchange, body: DetokenizeBody) -> None:
        served = self._front.ready()
        self._front.name(body.model)
        limit = served.facts.limits.vocab_limit
        for token in body.tokens:
            if not 0 <= token < limit:
                raise BadRequest(f"tokens has id {token}, ids are 0 to {limit - 1:,}", param="tokens")
        text = await _aside(exchange, lambda: served.tokenizer.decode(body.tokens, skip_special_tokens=False))
        await exchange.reply_json({"prompt": text})


async def _aside(exchange: Exchange, work: Callable[[], Result]) -> Result:
    """Do what may take long, for a large body, in another thread."""
    return work() if exchange.length <= INLINE_BYTES else await asyncio.to_thread(work)


def _name(exchange: Exchange, body: SamplingBody) -> str:
    """The request's: the header's, else the body's, else a new one."""
    given = body.request_id
    if given is not None and not REQUEST_ID.fullmatch(given):
        raise BadRequest("request_id must be 1 to 128 visible ASCII characters", param="request_id")
    return exchange.request_id if given is None or exchange.headers.get("x-request-id") else given


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
