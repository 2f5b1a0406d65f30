"""Messages between engine and fronts: every field arrives, and no bytes do more than end their link."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rvllm import errors
from rvllm.cli.failure import explain
from rvllm.config import EngineConfig
from rvllm.engine.request import Request, TokenEvent
from rvllm.engine.scheduler import Limits
from rvllm.link.messages import (
    MOST_BYTES,
    Abort,
    Facts,
    Frames,
    FromFront,
    Malformed,
    Message,
    Ready,
    Start,
    Submit,
    Tokens,
    error_of,
    failure_of,
    frame,
    from_engine,
    from_front,
)
from rvllm.link.server import _shared
from rvllm.sampling.params import SamplingParams

SAMPLING: dict[str, Any] = {
    "n": 2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "repetition_penalty": 1.5,
    "temperature": 0.75,
    "top_p": 0.5,
    "top_k": 7,
    "min_p": 0.125,
    "seed": -(2**63),
    "stop": ("a", "ü"),
    "stop_token_ids": (3, 2**40),
    "ignore_eos": True,
    "max_tokens": 9,
    "min_tokens": 4,
    "logprobs": 3,
    "prompt_logprobs": 2,
    "detokenize": True,
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "logit_bias": {5: -1.5, 6: 100.0},
    "bad_words": ("no",),
    "bad_words_token_ids": ((3,), (4, 5)),
    "allowed_token_ids": (1, 2, 3),
    "speculate": False,
}


def across(message: Message) -> Any:
    """What arrives of a message at the other end."""
    front = isinstance(message, FromFront)
    frames: Frames[Any] = Frames(from_front if front else from_engine)
    (arrived,) = frames.feed(frame(message))
    return arrived


def test_every_sampling_parameter_arrives() -> None:
    # A parameter added to the class must be added above, with a value that is not its default.
    assert {*SAMPLING, "structured_outputs"} == {field.name for field in fields(SamplingParams)}
    plain = SamplingParams()
    assert [name for name, value in SAMPLING.items() if getattr(plain, name) == value] == ["detokenize"]
    assert across(Submit((Request("a", (1,), SamplingParams(**SAMPLING), 7),))).requests[0].params == SamplingParams(
        **SAMPLING
    )
    # Alone because strings to stop at need it true, and allowed_token_ids no form.
    for form in ({"json": {"type": "object"}, "disable_any_whitespace": True}, {"choice": ["a", "ü"]}):
        off = SamplingParams(detokenize=False, max_tokens=None, structured_outputs=form)  # type: ignore[arg-type]
        assert off.structured_outputs is not None and not isinstance(off.structured_outputs, dict)
        assert across(Submit((Request("a", (1,), off, 7),))).requests[0].params == off


def some(hint: Any) -> Any:
    """A value of a type that is nothing's default."""
    if hint in SOME:
        return SOME[hint]
    if is_dataclass(hint) or hasattr(hint, "_fields") or hasattr(hint, "__struct_fields__"):
        return filled(hint)
    origin, parts = get_origin(hint), get_args(hint)
    if type(None) in parts:
        return some(next(part for part in parts if part is not type(None)))
    if origin is tuple and Ellipsis in parts:
        return (some(parts[0]),) * 2
    if origin is tuple:
        return tuple(map(some, parts))
    assert origin in (frozenset, list), f"{hint} is new here: say what some value of it is"
    return origin([some(parts[0])])


def defaults(kind: type[Any]) -> dict[str, Any]:
    """A dataclass's, struct's or named tuple's fields with their defaults."""
    if is_dataclass(kind):
        return {field.name: field.default for field in fields(kind)}
    if issubclass(kind, msgspec.Struct):
        return {field.name: field.default for field in msgspec.structs.fields(kind)}
    return {name: kind._field_defaults.get(name, MISSING) for name in kind._fields}


def filled(kind: type[Any]) -> Any:
    """An instance with no field at its default."""
    hints, known = get_type_hints(kind), defaults(kind)
    made = kind(**{name: not known[name] if hints[name] is bool else some(hints[name]) for name in known})
    assert not [name for name, default in known.items() if getattr(made, name) == default], made
    return made


SOME: dict[Any, Any] = {
    bool: True,
    int: 1,  # what any limits allow each other
    float: 0.1,
    str: "ü\0\U0001f336",
    SamplingParams: SamplingParams(**SAMPLING),
}


def test_every_field_of_requests_events_limits_and_settings_arrives() -> None:
    request, event, limits, config = map(filled, (Request, TokenEvent, Limits, EngineConfig))
    assert across(Submit((request, request))).requests == (request, request)
    assert across(Tokens([event, event])).events == [event, event]
    assert across(Ready(Facts("m", "cpu", limits, 1))).facts.limits == limits
    assert across(Start(config, 5, frozenset({1}))) == Start(config, 5, frozenset({1}))


def test_the_largest_numbers_arrive() -> None:
    for seed in (-(2**63), 2**63 - 1):
        request = Request("a", (0, 2**31 - 1, 2**63 - 1), SamplingParams(seed=seed), seed)
        assert across(Submit((request,))).requests == (request,)


def test_what_floats_may_be_arrives() -> None:
    for value in (float("-inf"), 1e-300, -0.0):
        event = TokenEvent("a", 1, value, ((2, value),), None, None)
        assert across(Tokens([event])).events == [event]


# --- Bytes


@settings(deadline=None)  # a busy machine is no fault
@given(cuts=st.lists(st.integers(0, 200), max_size=20))
def test_messages_are_whole_however_their_bytes_are_cut(cuts: list[int]) -> None:
    said = [Abort(("a",)), Abort(()), Abort(("b" * 50, "c"))]
    data = b"".join(map(frame, said))
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    frames = Frames(from_front)
    assert [one for a, b in zip(places, places[1:]) for one in frames.feed(data[a:b])] == said


def test_a_message_longer_than_the_limit_is_refused_at_both_ends() -> None:
    with pytest.raises(errors.BadRequest, match=r"67,108,8\d\d bytes, the limit is 67,108,864"):
        frame(Abort(("x" * MOST_BYTES,)))
    with pytest.raises(Malformed, match=r"67,108,865 bytes, the limit is 67,108,864"):
        list(Frames(from_front).feed((MOST_BYTES + 1).to_bytes(4, "big")))


WRONG = {
    "no msgpack": b"\xc1",
    "nothing": b"",
    "no array": msgspec.msgpack.encode({"a": 1}),
    "no such message": msgspec.msgpack.encode(["Nonsense"]),
    "an engine's message": frame(Tokens([]))[4:],
    "a field too few": msgspec.msgpack.encode(["Shutdown"]),
    "another type": msgspec.msgpack.encode(["Shutdown", "soon"]),
    "bytes that are no text": b"\x92\xa5Abort\x91\xa2\xff\xfe",
    "an array longer than its bytes": b"\x92\xa5Abort\xdd\xff\xff\xff\xff",
    "an array too deep": b"\x91" * 100_000,
    "bytes after its end": frame(Abort(()))[4:] + b"\x00",
    "a parameter out of range": frame(Submit((Request("a", (1,), SamplingParams(top_p=0.5), 0),)))[4:].replace(
        msgspec.msgpack.encode(0.5), msgspec.msgpack.encode(1.5)
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_message_is_malformed_and_those_before_it_count(wrong: str) -> None:
    body = WRONG[wrong]
    arrived = []
    with pytest.raises(Malformed):
        for message in Frames(from_front).feed(frame(Abort(("a",))) + len(body).to_bytes(4, "big") + body):
            arrived.append(message)
    assert arrived == [Abort(("a",))]


def test_a_message_with_any_byte_changed_is_a_message_or_malformed() -> None:
    chance = random.Random(0)
    whole = frame(Submit((Request("a", (1, 2, 3), SamplingParams(**SAMPLING), 7),)))
    for _ in range(5000):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 3)):
            data[chance.randrange(4, len(data))] = chance.randrange(256)
        with suppress(Malformed):
            list(Frames(from_front).feed(bytes(data)))


# --- Errors


class NumpysMemoryError(MemoryError):
    """numpy raises a class of its own where there is not enough memory."""


def family(kind: type[errors.RvllmError]) -> list[type[errors.RvllmError]]:
    return [kind, *(one for child in kind.__subclasses__() for one in family(child))]


@pytest.mark.parametrize("kind", family(errors.RvllmError))
def test_every_error_of_ours_arrives_as_what_it_was(kind: type[errors.RvllmError]) -> None:
    more = {"param": "prompt"} if issubclass(kind, errors.BadRequest) else {}
    error = kind("what, the limit", hint="the way out", **more)
    arrived = error_of(failure_of(error))
    assert type(arrived) is kind and str(arrived) == str(error)
    assert getattr(arrived, "param", None) == more.get("param")


@pytest.mark.parametrize(
    "raised",
    [
        OSError(2, "No such file", "a/b"),
        MemoryError("4 GiB"),
        KeyError("x"),
        MemoryError(),
        NumpysMemoryError("1 GiB"),
        FileNotFoundError(2, "No such file"),
    ],
)
def test_errors_of_others_are_told_in_the_same_words_as_in_one_process(raised: Exception) -> None:
    assert explain(error_of(failure_of(raised))) == explain(raised)


def test_neighbours_share_the_reading_of_a_prompt_but_where_it_is_scored() -> None:
    plain, scored = SamplingParams(n=2), SamplingParams(prompt_logprobs=3)
    same = [_shared(Request(name, (1, 2), plain, 0)) for name in "ab"]
    assert same[0] == same[1] != _shared(Request("c", (1, 3), plain, 0))
    alone = [_shared(Request(name, (1, 2), scored, 0)) for name in "ab"]
    assert len({*same, *alone}) == 3
