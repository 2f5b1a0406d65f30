"""What engine and fronts say to each other, and the bytes of it. Knows no socket, no process, no text.

On the wire a message is its length in four bytes, big-endian, and an array in MessagePack whose first item names it.
Requests, events, limits and settings travel by their dataclasses' fields: a field added there travels with no change
here, and one of a type that msgspec cannot carry fails when this module is imported.
"""

from __future__ import annotations

import struct
import traceback
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

from rvllm.config import EngineConfig
from rvllm.engine.grammar import Vocabulary
from rvllm.engine.request import Request, TokenEvent
from rvllm.engine.scheduler import Limits
from rvllm.engine.tally import Histogram, Load
from rvllm.errors import BadRequest, EngineError, RvllmError
from rvllm.program.cost import Traffic

MOST_BYTES = 64 << 20
"""Of one message. The longest is a request: five bytes a token."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One thing said. Complete at birth; its class's name is its name on the wire."""


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """An error on its way to another process. `kind` is the name of its class, or of that one's nearest we know."""

    kind: str
    message: str
    hint: str | None
    param: str | None


class Facts(msgspec.Struct, frozen=True, array_like=True):
    """What a front has to know of the engine. `device`: "cpu", or the GPU's name.

    startup_s: what its process did until it was ready, and for how long. cache: the cache's settings, for those who
    watch it. traffic: None where it is not known. about: names and values that describe the engine to people.
    """

    model: str
    device: str
    limits: Limits
    max_logprobs: int
    startup_s: tuple[tuple[str, float], ...] = ()
    cache: tuple[tuple[str, str], ...] = ()
    traffic: Traffic | None = None
    about: tuple[tuple[str, str], ...] = ()


# --- From a front


class Start(Message, frozen=True):
    """The parent's first: load this. `vocab_limit` and `eos_ids` are the tokenizer's."""

    config: EngineConfig
    vocab_limit: int
    eos_ids: frozenset[int]


class Learn(Message, frozen=True):
    """What the tokens stand for; before the first request whose text must have a form. Once told, it stays."""

    vocabulary: Vocabulary


class Submit(Message, frozen=True):
    """Run these. Their ids must be unlike all others that the engine has, whoever sent them.

    Those for one prompt, salt and priority that stand next to each other are run together: the prompt is read once.
    """

    requests: tuple[Request, ...]


class Abort(Message, frozen=True):
    """Forget these in any state; ids that are not this front's, or not any more, are ignored."""

    ids: tuple[str, ...]


class AskStats(Message, frozen=True):
    """Answer with Stats."""


class Shutdown(Message, frozen=True):
    """The parent's last: take no more requests, let those there go on for `drain_s` seconds at the most, then end."""

    drain_s: float


# --- From the engine


class Progress(Message, frozen=True):
    """How far loading has come; to the parent."""

    label: str
    done: int
    total: int


class Note(Message, frozen=True):
    """One line that the user should know of; to the parent."""

    text: str


class Ready(Message, frozen=True):
    """The first to every front: requests may come."""

    facts: Facts


class Tokens(Message, frozen=True):
    """What one step made for this front."""

    events: list[TokenEvent]


class Failed(Message, frozen=True):
    """One request ended without a token; the others go on."""

    request_id: str
    failure: Failure


class Stats(Message, frozen=True):
    """The answer to AskStats: since the start, `steps`, the time and the tokens of each, and pauses for garbage."""

    load: Load
    steps: int
    step_s: Histogram
    step_tokens: Histogram
    gc_s: Histogram


class Stopping(Message, frozen=True):
    """The engine was told to end: it takes no more requests, and the link's end is no failure."""


class Fatal(Message, frozen=True):
    """The engine's last words, and the traceback there for those who debug."""

    failure: Failure
    trace: str


FromFront = Start | Learn | Submit | Abort | AskStats | Shutdown
FromEngine = Progress | Note | Ready | Tokens | Failed | Stats | Stopping | Fatal
Said = TypeVar("Said")

_HEAD = struct.Struct(">I")
_ENCODER = msgspec.msgpack.Encoder()
# Made now, not at first use: a field that cannot travel is to be found by whoever adds it.
from_front: msgspec.msgpack.Decoder[FromFront] = msgspec.msgpack.Decoder(FromFront)
from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


class Malformed(Exception):
    """Bytes that are none of our messages; str() says why. The link they came by is of no more use."""


def frame(message: Message) -> bytes:
    """A message's bytes. Raises BadRequest for one longer than any receiver takes."""
    body = _ENCODER.encode(message)
    if len(body) > MOST_BYTES:
        raise BadRequest(f"a message has {len(body):,} bytes, the limit is {MOST_BYTES:,}", hint="send less at once")
    return _HEAD.pack(len(body)) + body


class Frames(Generic[Said]):
    """Cuts what a link delivers into messages. more: whether more has come behind the last."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Said]) -> None:
        self._decoder = decoder
        self._data = bytearray()
        self.more = False

    def feed(self, data: bytes) -> Iterator[Said]:
        """The messages that `data` completes. Raises Malformed; before it come those that were well formed."""
        self._data += data
        begin = 0
        try:
            while (end := self._end(begin)) is not None:
                body = self._data[begin + _HEAD.size : end]
                begin = end
                self.more = len(self._data) > end
                yield self._decode(body)
        finally:
            del self._data[:begin]

    def _end(self, begin: int) -> int | None:
        """Where the message at `begin` ends; None while it is not all there."""
        if len(self._data) - begin < _HEAD.size:
            return None
        (size,) = _HEAD.unpack_from(self._data, begin)
        if size > MOST_BYTES:
            raise Malformed(f"a message of {size:,} bytes, the limit is {MOST_BYTES:,}")
        end = begin + _HEAD.size + size
        return end if len(self._data) >= end else None

    def _decode(self, body: bytearray) -> Said:
        try:
            return self._decoder.decode(body)
        except Exception as cause:  # whatever another process's bytes lead to, it is their fault
            raise Malformed(f"{type(cause).__name__}: {cause}") from None


# --- Errors


class EngineTrace(Exception):
    """Stands for an exception in the engine process; str() is its traceback there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def failure_of(error: BaseException) -> Failure:
    """An error as it travels."""
    message, hint, param = str(error), None, None
    if isinstance(error, RvllmError):
        message, hint = error.message, error.hint
        param = error.param if isinstance(error, BadRequest) else None
    elif isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename is not None else ""
        message = f"{place}{error.strerror or error}"
    # The nearest class that the other end knows: numpy has a MemoryError of its own.
    kind = next((one.__name__ for one in type(error).__mro__ if one.__name__ in _KINDS), type(error).__name__)
    return Failure(kind, message, hint, param)


def fatal(error: BaseException) -> Fatal:
    """The last words of an engine that ends by an error."""
    return Fatal(failure_of(error), "".join(traceback.format_exception(error)))


def error_of(failure: Failure) -> Exception:
    """The error that a failure was made of, as far as the command line or a server tells errors apart."""
    kind = _KINDS.get(failure.kind)
    if kind is None:
        hint = "this is a fault of rvllm; run it again with --debug and report what that shows"
        return EngineError(f"unexpected {failure.kind}: {failure.message}", hint=hint)
    if issubclass(kind, BadRequest):
        return kind(failure.message, param=failure.param, hint=failure.hint)
    if issubclass(kind, RvllmError):
        return kind(failure.message, hint=failure.hint)
    return kind(failure.message)


def _family(parent: type[Any]) -> Iterator[type[Any]]:
    yield parent
    for child in parent.__subclasses__():
        yield from _family(child)


_KINDS: dict[str, type[Exception]] = {kind.__name__: kind for kind in _family(RvllmError)}
# An OSError says its file and reason itself; a MemoryError has words of its own on the command line.
_KINDS |= {kind.__name__: OSError for kind in _family(OSError)} | {"MemoryError": MemoryError}
