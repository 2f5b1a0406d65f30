"""A generation's way into its reply: whole at its end, or as events while it comes. Knows no body and no prompt."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass

from rvllm.api.front import Choice, Teller
from rvllm.api.http import DONE, Exchange, encode_json, event
from rvllm.api.replies import Reply
from rvllm.api.turns import TurnReply, typed_event


@dataclass(frozen=True, slots=True)
class _AtOnce:
    """Writes a text's event without waking its `answer`, which would do nothing else with it."""

    exchange: Exchange
    reply: Reply

    def teller(self, choice: Choice) -> Teller | None:
        if not self.reply.goes_on(choice):
            return None
        return _Texts(self.exchange, *self.reply.frame(choice)).tell


@dataclass(frozen=True, slots=True)
class _Texts:
    """Events in which all but the text stays: what is before it and after it."""

    exchange: Exchange
    before: bytes
    after: bytes

    def tell(self, text: str, came_s: float) -> bool:
        return not text or self.exchange.write(self.before + encode_json(text) + self.after, came_s)


async def answer(exchange: Exchange, reply: Reply, stream: bool) -> None:
    """Reply with what a generation brings, as it comes or at its end."""
    # Whether a text can have the form that is asked for is known with its first token.
    if stream and not reply.generation.formed:
        await exchange.begin_events()
    at_once = _AtOnce(exchange, reply) if stream and reply.usual else None
    async with aclosing(reply.generation.batches(stream, at_once)) as batches:
        async for batch in batches:
            if stream and not exchange.begun:
                await exchange.begin_events()
            if stream and (data := reply.events(batch)):
                await exchange.events(data)
    if not stream:
        await exchange.reply_json(reply.whole())
        return
    last = reply.last_chunk()
    await exchange.end((b"" if last is None else event(last)) + DONE)


async def answer_turn(exchange: Exchange, reply: TurnReply, stream: bool) -> None:
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
