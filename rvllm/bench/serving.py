"""vLLM's serving figures from replies: its JSON fields and console lines. Knows no server and no clock."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rvllm.bench.traffic import Reply

TITLES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client Queue Time"),
    "e2el_including_client_queue": ("E2EL incl. Client Queue", "End-to-end Latency incl. Client Queue"),
}


def tpot_s(reply: Reply) -> float | None:
    """Seconds a token behind the first; None where there is no other."""
    return (reply.latency_s - reply.ttft_s) / (reply.output_tokens - 1) if reply.output_tokens > 1 else None


def samples(replies: Sequence[Reply]) -> dict[str, list[float]]:
    """Seconds of each metric, of the replies that went well."""
    return {
        "ttft": [reply.ttft_s for reply in replies],
        "tpot": [each for reply in replies if (each := tpot_s(reply)) is not None],
        "itl": [gap for reply in replies for gap in reply.itl_s],
        "e2el": [reply.latency_s for reply in replies],
        "client_queue_time": [reply.queued_s for reply in replies],
        "e2el_including_client_queue": [reply.latency_s + reply.queued_s for reply in replies],
    }


def peaks(replies: Sequence[Reply]) -> tuple[float, int]:
    """(most chunks in a second, most requests in a second) of seconds counted from the first request, as vLLM's."""
    begin_s = min(reply.start_s for reply in replies)
    seconds = math.ceil(max(reply.start_s + reply.latency_s for reply in replies) - begin_s) + 1
    tokens, running = np.zeros(seconds), np.zeros(seconds, dtype=np.int64)
    for reply in replies:
        start_s = reply.start_s - begin_s
        times = start_s + np.cumsum([reply.ttft_s, *reply.itl_s])
        np.add.at(tokens, np.minimum(times.astype(np.int64), seconds - 1), 1)
        running[int(start_s) : int(start_s + reply.latency_s) + 1] += 1
    return float(tokens.max()), int(running.max())


def good(reply: Reply, bounds_ms: Mapping[str, float]) -> bool:
    """Whether a reply keeps all bounds."""
    had = {"ttft": reply.ttft_s, "tpot": tpot_s(reply) or 0.0, "e2el": reply.latency_s}
    return all(had[name] * 1000 <= bound for name, bound in bounds_ms.items())


def figures(
    replies: Sequence[Reply],
    duration_s: float,
    *,
    metrics: Sequence[str],
    percentiles: Sequence[float],
    goodput_ms: Mapping[str, float],
) -> dict[str, Any]:
    """vLLM's fields of a run in which some reply went well, in its order."""
    well = [reply for reply in replies if reply.error is None]
    read, written = (sum(getattr(reply, name) for reply in well) for name in ("prompt_tokens", "output_tokens"))
    most_tokens, most_requests = peaks(well)
    fields: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(well),
        "failed": len(replies) - len(well),
        "total_input_tokens": read,
        "total_output_tokens": written,
        "request_throughput": len(well) / duration_s,
        "request_goodput": sum(good(reply, goodput_ms) for reply in well) / duration_s if goodput_ms else None,
        "output_throughput": written / duration_s,
        "total_token_throughput": (read + written) / duration_s,
        "latencies": [reply.latency_s for reply in well],
        "queue_times": [reply.queued_s for reply in well],
        "max_output_tokens_per_s": most_tokens,
        "max_concurrent_requests": most_requests,
        "rtfx": 0.0,  # of audio
    }
    found = samples(well)
    for name in metrics:
        ms = np.array(found[name] or [0.0]) * 1000
        fields |= {f"mean_{name}_ms": float(ms.mean()), f"median_{name}_ms": float(np.median(ms))}
        fields |= {f"std_{name}_ms": float(ms.std())}
        fields |= {f"p{word(each)}_{name}_ms": float(np.percentile(ms, each)) for each in percentiles}
    return fields


def detailed(replies: Sequence[Reply]) -> dict[str, Any]:
    """vLLM's fields of --save-detailed, one entry a request."""
    return {
        "input_lens": [reply.prompt_tokens for reply in replies],
        "output_lens": [reply.output_tokens if reply.error is None else 0 for reply in replies],
        "ttfts": [reply.ttft_s for reply in replies],
        "itls": [reply.itl_s for reply in replies],
        "start_times": [reply.start_s for reply in replies],
        "generated_texts": [reply.text for reply in replies],
        "errors": [reply.error or "" for reply in replies],
    } | server_times(replies)


def server_times(replies: Sequence[Reply]) -> dict[str, Any]:
    """Seconds that the server tells of its requests, one entry each; nothing of one that tells none."""
    queued_s, first_s = [reply.server_queue_s for reply in replies], [reply.server_ttft_s for reply in replies]
    if all(each is None for each in (*queued_s, *first_s)):
        return {}
    return {"server_queue_times": queued_s, "server_ttfts": first_s}


def word(percentile: float) -> str:
    """99, or 99.9."""
    return str(int(percentile)) if percentile == int(percentile) else str(percentile)


def lines(
    fields: Mapping[str, Any],
    rate: float,
    at_once: int | None,
    metrics: Sequence[str],
    percentiles: Sequence[float],
) -> list[str]:
    """vLLM's console block."""
    said = [f"{' Serving Benchmark Result ':=^50}"]

    def add(label: str, value: Any) -> None:
        said.append(f"{label:<40} {value:<10.2f}" if isinstance(value, float) else f"{label:<40} {value:<10}")

    add("Successful requests:", fields["completed"])
    add("Failed requests:", fields["failed"])
    if at_once is not None:
        add("Maximum request concurrency:", at_once)
    if not math.isinf(rate):
        add("Request rate configured (RPS):", float(rate))
    add("Benchmark duration (s):", fields["duration"])
    add("Total input tokens:", fields["total_input_tokens"])
    add("Total generated tokens:", fields["total_output_tokens"])
    add("Request throughput (req/s):", fields["request_throughput"])
    if fields["request_goodput"] is not None:
        add("Request goodput (req/s):", fields["request_goodput"])
    add("Output token throughput (tok/s):", fields["output_throughput"])
    add("Peak output token throughput (tok/s):", fields["max_output_tokens_per_s"])
    add("Peak concurrent requests:", float(fields["max_concurrent_requests"]))
    add("Total token throughput (tok/s):", fields["total_token_throughput"])
    for name in metrics:
        short, title = TITLES[name]
        said.append(f"{title:-^50}")
        add(f"Mean {short} (ms):", fields[f"mean_{name}_ms"])
        add(f"Median {short} (ms):", fields[f"median_{name}_ms"])
        for each in percentiles:
            add(f"P{word(each)} {short} (ms):", fields[f"p{word(each)}_{name}_ms"])
    return [*said, "=" * 50]
