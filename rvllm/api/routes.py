"""The endpoints: a body becomes prompts and parameters, a generation a reply. Knows no socket and no process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from rvllm.api.front import Front, Generation, Prompt, Served
from rvllm.api.http import DONE, Exchange, Routes, event, while_connected
from rvllm.api.messages import CountBody, MessageReply, MessagesBody
from rvllm.api.messages import error_shape as anthropic_error
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
from rvllm.errors import BadRequest, PromptTooLong
from rvllm.sampling.params import SamplingParams
from rvllm.text.answer import AnswerReader
from rvllm.text.tool_formats import Mistral
from rvllm.version import VERSION

OPEN_ROUTES = ("/health", "/ping")
"""They need no key."""

COMPLETION_TOKENS = 16
"""max_tokens of a completion that brings none, as in OpenAI's API."""

INLINE_BYTES = 1 << 14
"""Of a body: above, its text is encoded in a thread of its own, so that others' tokens go on."""

PROMPT_END = 64
"""Tokens of a prompt that say whether what follows are thoughts."""

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
        scored = body.logprobs if body.echo else None
        params = body.sampling(
            dict(served.defaults) | {"max_tokens": COMPLETION_TOKENS}, logprobs=body.logprobs, prompt_logprobs=scored
        )
        terms = body.terms()
        prompts = await _aside(data, lambda: completion_prompts(served, body))
        await self._front.learn_forms(params)
        generation = self._front.generation(_cut(served, body, prompts), params, terms)
        reply = CompletionReply(generation, name, served.texts, body.logprobs, _options(body), echo=bool(body.echo))
        await while_connected(exchange, _answer(exchange, reply, bool(body.stream)))

    async def chat(self, exchange: Exchange) -> None:
        data = await exchange.body()
        body = parse(data, ChatBody)
        chat = await self._begin_chat(data, body)
        reply = ChatReply(
            chat.generation,
            chat.name,
            chat.served.texts,
            chat.top,
            _options(body),
            reader=chat.reader,
            named=chat.tools.named,
            thoughts=body.include_reasoning is not False,
            short_ids=chat.served.families.calls is Mistral,
        )
        await while_connected(exchange, _answer(exchange, reply, bool(body.stream)))

    async def responses(self, exchange: Exchange) -> None:
        data = await exchange.body()
        body = parse(data, ResponsesBody)
        chat = await self._begin_chat(data, body.chat())
        reply = ResponseReply(chat.generation, chat.name, chat.reader(), body=body)
        exchange.shape = reply.error_shape
        await while_connected(exchange, _answer_turn(exchange, reply, bool(body.stream)))

    async def messages(self, exchange: Exchange) -> None:
        exchange.shape = anthropic_error
        data = await exchange.body()
        body = parse(data, MessagesBody)
        chat = await self._begin_chat(data, body.chat())
        reply = MessageReply(chat.generation, chat.name, chat.reader())
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

    async def _begin_chat(self, data: bytes, body: ChatBody) -> _Chat:
        """A chat whose completions are checked, and not begun. Raises BadRequest, HttpError."""
        served = self._front.ready()
        name = self._front.name(body.model)
        body.check()
        top = _top_logprobs(served, body)
        tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        if (body.max_completion_tokens or 0) < 0:
            raise BadRequest(f"max_completion_tokens is {tokens}, the limit is 0", param="max_completion_tokens")
        tools = tools_of(body.tools, body.tool_choice, body.parallel_tool_calls, served.families)
        params = body.sampling({"max_tokens": None} | dict(served.defaults), logprobs=top, max_tokens=tokens)
        terms = body.terms()
        shown = None if tools.choice == "none" and self._front.hides_tools else body.tools
        prompt = Prompt(None, tuple(await _aside(data, lambda: chat_ids(served, body, shown))))
        prompt_end = served.texts.decode(prompt.ids[-PROMPT_END:], skip_special_tokens=False)
        params = _for_tools(served, params, tools, prompt_end, shows_special=body.skip_special_tokens is None)
        await self._front.learn_forms(params)
        try:
            generation = self._front.generation(_cut(served, body, [prompt]), params, terms)
        except BadRequest as cause:
            cause.param = "messages" if cause.param == "prompt" else cause.param
            raise
        return _Chat(served, name, generation, tools, top, lambda: reader_for(served.families, tools, prompt_end))

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
    async with aclosing(reply.generation.deltas()) as batches:
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
    async with aclosing(reply.generation.deltas()) as batches:
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


def _options(body: SamplingBody) -> StreamOptions:
    return body.stream_options or StreamOptions()


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


def chat_ids(served: Served, body: ChatBody | TokenizeBody, tools: Any = None) -> list[int]:
    """A conversation's ids through the chat template. Raises BadRequest."""
    more = dict(body.chat_template_kwargs or {})
    if clash := sorted(set(more).intersection(_TEMPLATE_ARGUMENTS)):
        raise BadRequest(f"chat_template_kwargs must not set {clash[0]}", param="chat_template_kwargs")
    if isinstance(body, ChatBody):
        more |= {"documents": body.documents}
        if body.reasoning_effort is not None:
            more["reasoning_effort"] = body.reasoning_effort
    if body.messages is None:
        raise BadRequest("messages is missing", param="messages")
    goes_on = bool(body.continue_final_message)
    begins = not goes_on if body.add_generation_prompt is None else body.add_generation_prompt
    return served.tokenizer.apply_chat_template(
        body.messages, tools=tools, add_generation_prompt=begins, continue_final_message=goes_on, **more
    )


def tokenize_ids(served: Served, body: TokenizeBody) -> list[int]:
    if body.prompt is None:
        return chat_ids(served, body)
    return encoded(served, body.prompt, body.add_special_tokens is not False)


def _cut(served: Served, body: SamplingBody, prompts: list[Prompt]) -> list[Prompt]:
    """The prompts' last truncate_prompt_tokens tokens; -1: as many as leave room for one more."""
    most = body.truncate_prompt_tokens
    if most is None:
        return prompts
    room = served.facts.limits.max_model_len - 1
    if most != -1 and not 1 <= most <= room:
        raise BadRequest(
            f"truncate_prompt_tokens is {most}, the limit is 1 to {room:,}, or -1", param="truncate_prompt_tokens"
        )
    most = room if most == -1 else most
    return [prompt if len(prompt.ids) <= most else Prompt(None, prompt.ids[-most:]) for prompt in prompts]


def _wrong_prompt() -> BadRequest:
    return BadRequest(
        "prompt must be a text, a list of texts, a list of token ids, or a list of lists of them, and not empty",
        param="prompt",
    )
