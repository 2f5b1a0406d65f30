"""Figures for people and for scripts. Knows how they are shown; not how they came about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rvllm.bench.decode import Figure
from rvllm.bench.figures import StepTimes
from rvllm.bench.latency import PERCENTILES, Latency
from rvllm.bench.throughput import Throughput
from rvllm.program.cost import Device

Facts = Mapping[str, Any]


def head(facts: Facts, card: Device | None) -> list[str]:
    """What was measured, where, and what it is measured by."""
    if card:
        limit = f"{card.name}: {card.bytes_per_s / 1e12:.2f} TB/s, {card.flops_per_s / 1e12:,.0f} TFLOP/s"
    else:
        limit = f"unknown for {facts['device']}: no shares are given"
    place = [facts["device"], *(f"{facts[name]} kernels" for name in ("tier",) if facts[name])]
    place += [f"driver {facts['driver']}"] if facts["driver"] else []
    return [
        f"model   {facts['model']}, {facts['dtype']}{', dummy weights' if facts['dummy_weights'] else ''}",
        f"device  {', '.join(place)}",
        f"limit   {limit}",
        f"checks  {'; '.join(facts['checks'])}",
    ]


COLUMNS = ("N", "in", "out", "tok/s", "spread", "ms a step P50", "P95", "P99", "limit tok/s", "share")


def table(figures: Sequence[Figure]) -> list[str]:
    """A line a figure, aligned to the right."""
    rows = [COLUMNS, *map(_row, figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    return ["  ".join(f"{value:>{width}}" for value, width in zip(row, widths)) for row in rows]


def _row(figure: Figure) -> tuple[str, ...]:
    cell, limit = figure.cell, figure.limit_tokens_per_s
    return (
        f"{cell.sequences:,}",
        f"{cell.prompt:,}",
        "-".join(f"{length:,}" for length in cell.outputs),
        f"{figure.speed.tokens_per_s:,.1f}",
        f"{figure.speed.spread:.1%}",
        *(f"{value:,.3f}" for value in (figure.steps.p50, figure.steps.p95, figure.steps.p99)),
        "-" if limit is None else f"{limit:,.0f}",
        _share(figure.share),
    )


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def throughput_lines(result: Throughput) -> list[str]:
    """vLLM's three rates, the steps, and the share of the limit."""
    seconds = result.run.seconds
    total = result.prompt_tokens + result.output_tokens
    rates = f"{result.requests / seconds:,.2f} requests/s, {total / seconds:,.2f} total tokens/s"
    return [
        f"{result.requests:,} requests in {seconds:,.3f} s: {rates}, {result.output_tokens_per_s:,.2f} output tokens/s",
        f"tokens: {result.prompt_tokens:,} of prompts, {result.output_tokens:,} of outputs",
        _steps_line(result.steps),
        _limit_line(result.limit_seconds, result.share),
    ]


def latency_lines(result: Latency) -> list[str]:
    """The mean and vLLM's percentiles, the steps, and the share of the limit."""
    found = result.vllm("")
    return [
        f"latency: {found['avg_latency']:.4f} s in the mean of {len(result.runs):,}",
        ", ".join(f"P{percent} {found['percentiles'][str(percent)]:.4f} s" for percent in PERCENTILES),
        _steps_line(result.steps),
        _limit_line(result.limit_seconds, result.share),
    ]


def beside_vllms(steps: StepTimes, share: float | None) -> dict[str, Any]:
    """What our JSON has that vLLM's has not."""
    return {"step_ms": asdict(steps), "share_of_limit": share}


def _steps_line(steps: StepTimes) -> str:
    return f"steps: P50 {steps.p50:,.3f} ms, P95 {steps.p95:,.3f} ms, P99 {steps.p99:,.3f} ms"


def _limit_line(limit_seconds: float | None, share: float | None) -> str:
    if limit_seconds is None:
        return "limit: unknown"
    return f"limit: {limit_seconds:,.4f} s, {_share(share)} of it reached"
