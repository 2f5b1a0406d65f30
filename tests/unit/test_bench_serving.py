"""`rvllm benchmark serve` in parts: arrivals, data sets, timelines computed by hand, vLLM's fields and lines."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from rvllm.bench import datasets, serving
from rvllm.bench.arrivals import Rate, RateChanges, arrivals
from rvllm.bench.client import Events
from rvllm.bench.datasets import Lengths
from rvllm.bench.traffic import Reader, Reply
from rvllm.errors import StartError


def test_poisson_arrivals_have_the_rate_and_a_poisson_process_spread() -> None:
    gaps = np.diff([0, *arrivals(Rate(50), 20000, seed=1)])
    assert gaps.sum() == pytest.approx(400)  # count / rate, to which vLLM stretches them
    assert gaps.std() / gaps.mean() == pytest.approx(1, abs=0.03)  # 4 sigma of the estimate from 20,000 gaps


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_gaps_are_gamma_distributed(burstiness: float) -> None:
    gaps = np.diff([0, *arrivals(Rate(10, burstiness), 20000, seed=2)])
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.06)


def test_burstiness_leaves_the_mean_gap_of_a_ramp() -> None:
    for burstiness in (0.25, 4.0):  # a ramp is not stretched, so the gaps' own mean shows
        due = arrivals(Rate(burstiness=burstiness, ramp_up="linear", start=10, end=10), 20000, seed=4)
        assert due[-1] == pytest.approx(2000, rel=0.06)  # 4 sigma at 0.25


def test_without_a_rate_all_are_due_at_once_and_a_ramp_gets_faster() -> None:
    assert arrivals(Rate(), 3, seed=0) == [0, 0, 0]
    for strategy, middle in (("linear", 50.5), ("exponential", 10.0)):
        rate = Rate(ramp_up=strategy, start=1, end=100)
        assert [rate.at(place, 3) for place in range(3)] == pytest.approx([1, middle, 100])
        due = arrivals(rate, 1000, seed=3)
        assert due[499] - due[0] > 2 * (due[999] - due[499])


def events(*chunks: object) -> bytes:
    return b"".join(b"data: %s\n\n" % (c if isinstance(c, bytes) else json.dumps(c).encode()) for c in chunks)


def text(value: str, finish: str | None = None) -> object:
    return {"choices": [{"index": 0, "text": value, "finish_reason": finish}]}


def usage(read: int, written: int) -> object:
    return {"choices": [], "usage": {"prompt_tokens": read, "completion_tokens": written}}


def test_a_timeline_has_the_times_that_vllm_defines() -> None:
    """Two chunks in one piece have a gap of 0, one without text counts, what is not a chunk with a choice does not."""
    reader = Reader(Reply(100.0, 3))
    reader.feed(events(text("a")), 100.5)
    reader.feed(b": a comment\n\n" + events(text(""), text("b"))[:-9], 100.75)
    reader.feed(events(text(""), text("b"))[-9:] + events(usage(5, 6), b"[DONE]"), 102.0)
    reader.end()
    reply = reader.reply
    assert (reply.ttft_s, reply.itl_s, reply.latency_s) == (0.5, [0.25, 1.25], 2.0)
    assert (reply.text, reply.prompt_tokens, reply.output_tokens, reply.error) == ("ab", 5, 6, None)
    assert serving.tpot_s(reply) == (2.0 - 0.5) / 5


def test_a_chat_begins_with_its_first_token_and_not_with_its_role() -> None:
    def delta(**what: str) -> object:
        return {"choices": [{"index": 0, "delta": what, "finish_reason": None}]}

    reader = Reader(Reply(0.0, 3))
    reader.feed(events(delta(role="assistant", content="")), 1.0)
    reader.feed(events(delta(reasoning_content="r")), 2.0)
    reader.feed(events(delta(content="c"), b"[DONE]"), 4.0)
    reader.end()
    assert (reader.reply.ttft_s, reader.reply.itl_s, reader.reply.text) == (2.0, [2.0], "rc")
    assert (reader.reply.counted, reader.reply.output_tokens) == (False, 2)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (events(text("a")), "without [DONE]"),
        (events(usage(1, 0), b"[DONE]"), "no token"),
        (events(text("a"), {"error": {"message": "the engine died"}}), "the engine died"),
        (events(b"{", b"[DONE]"), "a chunk is none"),
    ],
)
def test_a_stream_that_ends_badly_is_an_error(body: bytes, error: str) -> None:
    reader = Reader(Reply(0.0, 1))
    reader.feed(body, 1.0)
    reader.end()
    assert reader.reply.error and error in reader.reply.error


def test_events_are_found_wherever_the_pieces_end() -> None:
    stream = b"event: x\r\ndata: zero\r\n\r\ndata: one\r\n\r\n: comment\n\ndata:two\ndata: three\n\n"
    for size in range(1, len(stream) + 1):
        reader = Events()
        found = [event for at in range(0, len(stream), size) for event in reader.feed(stream[at : at + size])]
        assert found == [b"zero", b"one", b"two\nthree"], size


REPLIES = [
    Reply(10.0, 4, 3, True, 0.5, [0.25, 0.25], 1.0, "abc"),
    Reply(10.5, 6, 2, True, 0.25, [1.25], 1.5, "de", queued_s=0.5),
    Reply(10.5, 9, 1, True, 0.1, [], 0.1, "f", error="HTTP 500: no"),
]
FIELDS = (
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
    "latencies",
    "queue_times",
    "max_output_tokens_per_s",
    "max_concurrent_requests",
    "rtfx",
    "mean_ttft_ms",
    "median_ttft_ms",
    "std_ttft_ms",
    "p50_ttft_ms",
    "p99.9_ttft_ms",
)


def test_figures_are_those_computed_by_hand() -> None:
    found = serving.figures(
        REPLIES, 4.0, metrics=("ttft",), percentiles=(50, 99.9), goodput_ms={"ttft": 300, "e2el": 1500}
    )
    assert tuple(found) == FIELDS
    assert (found["completed"], found["failed"], found["total_input_tokens"], found["total_output_tokens"]) == (
        2,
        1,
        10,
        5,
    )
    assert (found["request_throughput"], found["output_throughput"], found["total_token_throughput"]) == (
        0.5,
        1.25,
        3.75,
    )
    assert found["request_goodput"] == 0.25
    # Chunks at 0.5, 0.75, 1.0 and at 0.75, 2.0 seconds: three in the first second.
    assert (found["max_output_tokens_per_s"], found["max_concurrent_requests"]) == (3.0, 2)
    assert (found["mean_ttft_ms"], found["std_ttft_ms"], found["p50_ttft_ms"]) == (375, 125, 375)
    assert found["p99.9_ttft_ms"] == pytest.approx(499.75)
    assert (found["latencies"], found["queue_times"]) == ([1.0, 1.5], [0.0, 0.5])
    names = ("client_queue_time", "e2el_including_client_queue")
    queued = serving.figures(REPLIES, 4.0, metrics=names, percentiles=(99,), goodput_ms={})
    assert (queued["mean_client_queue_time_ms"], queued["mean_e2el_including_client_queue_ms"]) == (250, 1500)
    assert "Mean Client Queue Time (ms):             250.00    " in serving.lines(queued, 1.0, 1, names, (99,))


@pytest.mark.parametrize(
    ("bounds_ms", "good"),
    [({}, None), ({"ttft": 500}, 2), ({"ttft": 499}, 1), ({"tpot": 250}, 1), ({"e2el": 1000, "ttft": 250}, 0)],
)
def test_goodput_counts_replies_that_keep_every_bound_and_did_not_fail(
    bounds_ms: dict[str, float], good: int | None
) -> None:
    found = serving.figures(REPLIES, 4.0, metrics=(), percentiles=(), goodput_ms=bounds_ms)
    assert found["request_goodput"] == (None if good is None else good / 4)


def test_what_the_server_tells_of_its_times_is_kept_by_request() -> None:
    """Without one that tells any there is no such list."""
    assert not {"server_queue_times", "server_ttfts"} & set(serving.detailed(REPLIES))
    reply = Reply(0.0, 1)
    reader = Reader(reply)
    for metrics in (None, "no", {"queue_time_ms": None}, {"queue_time_ms": 0.0, "time_to_first_token_ms": 1250}):
        chunk = json.dumps({"choices": [], "metrics": metrics})
        reader.feed(f"data: {chunk}\n\n".encode(), 1.0)
    told = serving.detailed([reply, REPLIES[0]])
    assert (told["server_queue_times"], told["server_ttfts"]) == ([0.0, None], [1.25, None])


def test_a_ramp_tells_when_it_came_to_a_further_request_a_second() -> None:
    clock = iter(range(100))
    changes = RateChanges(Rate(ramp_up="linear", start=2, end=6), 9, lambda: f"t{next(clock)}")
    for place in range(9):  # 2, 2.5, 3, 3.5, ... 6 a second
        changes.sent(place)
    assert changes.events == [{"rps": 2 + step, "timestamp": f"t{step}"} for step in range(5)]
    steep = RateChanges(Rate(ramp_up="exponential", start=1, end=4), 2, lambda: "t")
    for place in range(2):
        steep.sent(place)
    assert [event["rps"] for event in steep.events] == [1, 2, 3, 4]
    level = RateChanges(Rate(5.0), 2, lambda: "t")
    level.sent(0)
    assert level.events == []


def test_lines_are_vllms() -> None:
    found = serving.figures(REPLIES, 4.0, metrics=("tpot",), percentiles=(99,), goodput_ms={})
    assert serving.lines(found, math.inf, None, ("tpot",), (99,)) == [
        "============ Serving Benchmark Result ============",
        "Successful requests:                     2         ",
        "Failed requests:                         1         ",
        "Benchmark duration (s):                  4.00      ",
        "Total input tokens:                      10        ",
        "Total generated tokens:                  5         ",
        "Request throughput (req/s):              0.50      ",
        "Output token throughput (tok/s):         1.25      ",
        "Peak output token throughput (tok/s):    3.00      ",
        "Peak concurrent requests:                2.00      ",
        "Total token throughput (tok/s):          3.75      ",
        "-----Time per Output Token (excl. 1st token)------",
        "Mean TPOT (ms):                          750.00    ",
        "Median TPOT (ms):                        750.00    ",
        "P99 TPOT (ms):                           1240.00   ",
        "==================================================",
    ]


class Letters:
    """A tokenizer of which "ab" is one token, so that texts made of ids may become shorter."""

    vocab_size, special_ids = 4, frozenset({3})

    def encode(self, text: str) -> list[int]:
        return [{"a": 0, "b": 1, "#": 2}[letter] for letter in text.replace("ab", "#")]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(("a", "b", "ab")[number] for number in ids)


def test_random_prompts_have_exact_lengths_and_a_common_beginning() -> None:
    lengths = Lengths(20, 10, 0.5, 0.25, prefix=4)
    for tokenizer in (None, Letters()):
        prompts = datasets.random_prompts(lengths, 50, 7, tokenizer, as_text=False)
        assert len({tuple(prompt.content[:4]) for prompt in prompts}) == 1
        assert all(len(p.content) == p.tokens and 14 <= len(p.content) <= 34 and 7 <= p.output <= 13 for p in prompts)
        ids = {number for prompt in prompts for number in prompt.content}
        assert ids <= ({0, 1, 2} if tokenizer else set(range(3, 256)))
    for prompt in datasets.random_prompts(lengths, 50, 7, Letters(), as_text=True):
        assert isinstance(prompt.content, str)
        assert len(Letters().encode(prompt.content)) == prompt.tokens


def test_sharegpt_is_read_filtered_and_repeated(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    turns = [["bbbba", "bbbbb"], ["b", "bbbbb"], ["bbbbb"], ["bbbb", "b"]]
    file.write_text(json.dumps([{"conversations": [{"value": turn} for turn in talk]} for talk in turns]))
    prompts = datasets.sharegpt(file, 3, 0, None, Letters(), repeat=True)
    assert [(prompt.content, prompt.tokens, prompt.output) for prompt in prompts] == [("bbbba", 5, 5)] * 3
    with pytest.raises(StartError, match="tokenizer"):
        datasets.sharegpt(file, 3, 0, None, None, repeat=True)
    assert len(datasets.sharegpt(file, 9, 0, 5, None, repeat=False)) == 3
    file.write_text('[{"id": 1}]')
    with pytest.raises(StartError, match=r"s\.json: entry 0"):
        datasets.sharegpt(file, 1, 0, 5, None, repeat=True)


@pytest.mark.parametrize(
    ("line", "said"), [("{", "line 2 is no JSON"), ('{"text": 1}', "line 2 has no text"), ('{"prompt": "a"}', "line 2")]
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "c.jsonl"
    file.write_text('{"prompt": "a", "output_tokens": 4}\n' + line)
    with pytest.raises(StartError, match=rf"c\.jsonl, {said}"):
        datasets.custom(file, 1, 0, -1, None, shuffle=False, repeat=True)


def test_custom_keeps_the_order_and_repeats(tmp_path: Path) -> None:
    file = tmp_path / "c.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n')
    prompts = datasets.custom(file, 4, 0, 8, None, shuffle=False, repeat=True)
    assert [prompt.content for prompt in prompts[:2]] == ["a", "b"] and len(prompts) == 4
    assert {prompt.output for prompt in prompts} == {8}
