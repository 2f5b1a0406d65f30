"""Send requests to a server as they are due, and time what comes back. Knows OpenAI's streams; makes no figures."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, TypeVar

import msgspec

from rvllm.bench.client import Client, Events
from rvllm.bench.datasets import Prompt
from rvllm.errors import EngineError, StartError

Result = TypeVar("Result")
HOPELESS = (401, 403, 404)
"""Statuses that every other request would have, too."""


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    role: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    metrics: Any = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


@dataclass(slots=True)
class Reply:
    """What came of a request, filled while it comes. Times are seconds of perf_counter, gaps between them seconds.

    ttft_s, itl_s, latency_s   as vLLM's: to the first chunk with a choice, from each to the next, and to the last. A
                               chunk without text counts (its token is part of a character), unless it only opens a
                               chat by its role. Chunks that arrive together have gaps of 0
    prompt_tokens, output_tokens   by the server's usage, else what was sent, and the number of chunks
    error                      None where all went well
    queued_s                   how long it was due and waited for others to end: --max-concurrency
    server_queue_s, server_ttft_s   what the server tells of it in `metrics`; None where it does not
    """

    start_s: float
    prompt_tokens: int
    output_tokens: int = 0
    counted: bool = False
    ttft_s: float = 0.0
    itl_s: list[float] = field(default_factory=list)
    latency_s: float = 0.0
    text: str = ""
    error: str | None = None
    queued_s: float = 0.0
    server_queue_s: float | None = None
    server_ttft_s: float | None = None


class Reader:
    """Reads one stream into a reply."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.done = False
        self.chunks = 0
        self._events = Events()
        self._texts: list[str] = []

    def feed(self, data: bytes, arrived_s: float) -> None:
        """Take a piece of the body that arrived then."""
        for event in self._events.feed(data):
            if event == b"[DONE]":
                self.done = True
            else:
                self._chunk(event, arrived_s)

    def _chunk(self, event: bytes, arrived_s: float) -> None:
        reply = self.reply
        try:
            chunk = _decode(event)
        except msgspec.MsgspecError as cause:
            reply.error = reply.error or f"a chunk is none: {cause}"
            return
        if chunk.error is not None:
            reply.error = reply.error or message_of(event)
        if chunk.usage and chunk.usage.completion_tokens is not None:
            reply.output_tokens, reply.counted = chunk.usage.completion_tokens, True
            if chunk.usage.prompt_tokens is not None:
                reply.prompt_tokens = chunk.usage.prompt_tokens
        if isinstance(chunk.metrics, dict):
            reply.server_queue_s = seconds(chunk.metrics.get("queue_time_ms"), reply.server_queue_s)
            reply.server_ttft_s = seconds(chunk.metrics.get("time_to_first_token_ms"), reply.server_ttft_s)
        if not chunk.choices:
            return
        choice = chunk.choices[0]
        text = choice.text
        if choice.delta is not None:
            text = choice.delta.content or choice.delta.reasoning_content or choice.delta.reasoning
            if choice.delta.role and not text and choice.finish_reason is None and not self.chunks:
                return
        if text:
            self._texts.append(text)
        since_s = arrived_s - reply.start_s
        if self.chunks:
            reply.itl_s.append(since_s - reply.latency_s)
        else:
            reply.ttft_s = since_s
        self.chunks += 1
        reply.latency_s = since_s

    def end(self) -> None:
        """The body is over: settle what it says nothing of."""
        reply = self.reply
        reply.text = "".join(self._texts)
        if not reply.counted:
            reply.output_tokens = self.chunks
        if reply.error is None and not self.done:
            reply.error = "the stream ended without [DONE]"
        if reply.error is None and not self.chunks:
            reply.error = "the stream had no token"


def seconds(told_ms: object, known_s: float | None) -> float | None:
    """What a server tells in milliseconds; what is known where that is no number."""
    return told_ms / 1000 if isinstance(told_ms, int | float) and not isinstance(told_ms, bool) else known_s


@dataclass(frozen=True, slots=True)
class Request:
    """How each prompt is asked. exact: an answer of another number of tokens than asked for is a failure."""

    path: str
    chat: bool
    model: str
    fields: Mapping[str, Any]
    exact: bool
    id_prefix: str

    def body(self, prompt: Prompt) -> bytes:
        if self.chat:
            what: dict[str, Any] = {"messages": [{"role": "user", "content": prompt.content}]}
            what["max_completion_tokens"] = prompt.output
        else:
            what = {"prompt": prompt.content, "max_tokens": prompt.output}
        ways = {"stream": True, "stream_options": {"include_usage": True}}
        return json.dumps({"model": self.model, **what, **ways, **self.fields}).encode()


async def ask(client: Client, request: Request, prompt: Prompt, name: str) -> Reply:
    """One request from begin to end. Raises StartError where no other would fare better."""
    body = request.body(prompt)
    reply = Reply(time.perf_counter(), prompt.tokens or 0)
    reader = Reader(reply)
    pieces: list[bytes] = []

    def take(data: bytes, arrived_s: float) -> None:
        pieces.append(data) if len(pieces) < 16 else None  # of an error, its text is wanted
        reader.feed(data, arrived_s)

    try:
        status = await client.post(request.path, body, {"x-request-id": name}, take)
    except (OSError, EngineError, asyncio.TimeoutError) as cause:
        reader.end()
        reply.error = f"{client.base_url}: {str(cause) or type(cause).__name__}"
        return reply
    reader.end()
    if status != 200:
        reply.error = f"HTTP {status}: {message_of(b''.join(pieces))}"
        if status in HOPELESS:
            raise StartError(f"{client.base_url}{request.path} answers {reply.error}", hint=way_out(status))
    elif reply.error is None and request.exact and reply.output_tokens != prompt.output:
        reply.error = f"{prompt.output:,} tokens were asked for with --ignore-eos, {reply.output_tokens:,} came"
    return reply


def message_of(body: bytes) -> str:
    """The message of an error object, or the body's first characters."""
    try:
        found = json.loads(body)
        found = found.get("error", found)
        return str(found["message"] if isinstance(found, dict) else found)
    except (ValueError, KeyError, AttributeError):
        return body[:200].decode(errors="replace").strip() or "(nothing)"


def way_out(status: int) -> str:
    if status == 404:
        return "see --endpoint, and --model or --served-model-name"
    return "OPENAI_API_KEY, or --header 'Authorization=Bearer KEY', is the key"


async def send_all(
    client: Client,
    request: Request,
    prompts: Sequence[Prompt],
    due_s: Sequence[float],
    at_once: int | None,
    ended: Callable[[int], None],
    began: Callable[[int], None] = lambda place: None,
) -> tuple[list[Reply], float]:
    """Ask for all, each once it is due and fewer than `at_once` run; (replies in order, seconds it took).

    ended: is told how many have ended. began: is told the place of each that is due. A request's time begins
    when it is sent, as vLLM's. Raises StartError.
    """
    room = asyncio.Semaphore(at_once or len(prompts) or 1)
    begin_s = time.perf_counter()
    through = 0

    async def one(place: int) -> Reply:
        nonlocal through
        due_at_s = time.perf_counter()
        async with room:
            queued_s = time.perf_counter() - due_at_s if at_once else 0.0
            reply = await ask(client, request, prompts[place], f"{request.id_prefix}{place}")
        reply.queued_s = queued_s
        through += 1
        ended(through)
        return reply

    tasks: list[asyncio.Task[Reply]] = []
    try:
        for place, due in enumerate(due_s):
            wait_s = begin_s + due - time.perf_counter()
            if wait_s > 0:
                if tasks and tasks[0].done():
                    tasks[0].result()  # of a hopeless run the rest is not waited for
                await asyncio.sleep(wait_s)
            began(place)
            tasks.append(asyncio.create_task(one(place)))
        replies = list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return replies, time.perf_counter() - begin_s


async def models(client: Client, patience_s: float) -> list[str]:
    """The names at /v1/models, asked for until `patience_s` are over. Raises StartError."""
    end_s = time.monotonic() + patience_s
    while True:
        hint = None
        try:
            status, body = await client.get("/v1/models")
            if status == 200:
                return [str(entry["id"]) for entry in json.loads(body)["data"]]
            said = f"answers HTTP {status}: {message_of(body)}"
            hint = way_out(status) if status in HOPELESS else None
        except (OSError, EngineError, asyncio.TimeoutError) as cause:
            said, hint = f"is not reached: {str(cause) or type(cause).__name__}", "is the server up? see --base-url"
        except (ValueError, KeyError, TypeError):
            said = "answers with no list of models"
        if time.monotonic() >= end_s or "HTTP 401" in said:
            raise StartError(f"{client.base_url}/v1/models {said}", hint=hint)
        await asyncio.sleep(min(1.0, max(0.0, end_s - time.monotonic())))


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """asyncio.run, on uvloop where that is installed. An interrupt cancels the work, wherever it waits."""
    if find_spec("uvloop"):
        import uvloop

        loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    else:
        loop = asyncio.new_event_loop()
    task = loop.create_task(main)
    interrupts: list[int] = []

    def interrupt() -> None:
        interrupts.append(signal.SIGINT)
        task.cancel()

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        return loop.run_until_complete(task)
    except asyncio.CancelledError:
        if interrupts:
            raise KeyboardInterrupt from None
        raise
    finally:  # after an interrupt tasks are still there, and nobody is to be told that they were dropped
        loop.remove_signal_handler(signal.SIGINT)
        tasks = asyncio.all_tasks(loop)
        for left in tasks:
            left.cancel()
        if tasks:  # nobody's gathering would look for a loop of its own
            loop.run_until_complete(asyncio.wait(tasks))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
