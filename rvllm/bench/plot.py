"""Charts: speed against batch with the device's limit and the steps' percentiles; latencies. Knows matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

from rvllm.bench.decode import Figure
from rvllm.errors import StartError

FORMATS = (".png", ".svg")


def check_plot(path: Path) -> None:
    """Raise StartError where no chart could be drawn into `path`: to be asked before anything is measured."""
    if path.suffix.lower() not in FORMATS:
        raise StartError(f"--plot {path} is no {' or '.join(FORMATS)} file", hint=f"name it {path.stem}.png")
    if find_spec("matplotlib") is None:
        raise StartError("--plot needs matplotlib, which is not installed", hint="pip install 'rvllm[plot]'")


def plot(figures: Sequence[Figure], title: str, path: Path) -> None:
    """Draw the figures into a PNG or SVG file, a line for each prompt and output length."""
    from matplotlib.figure import Figure as Canvas  # without pyplot: no state, no window

    canvas = Canvas(figsize=(8, 8), layout="constrained")
    speeds, steps = canvas.subplots(2, 1, sharex=True)
    canvas.suptitle(title)
    for key, group in groupby(sorted(figures, key=_lengths), key=_lengths):
        _draw(speeds, steps, key, sorted(group, key=lambda figure: figure.cell.sequences))
    speeds.set(xscale="log", yscale="log", ylabel="tokens/s")
    steps.set(xscale="log", xlabel="sequences", ylabel="ms a step")
    ticks = sorted({figure.cell.sequences for figure in figures})
    steps.set_xticks(ticks, labels=[str(tick) for tick in ticks], minor=False)
    steps.set_xticks([], minor=True)
    steps.set_ylim(bottom=0)
    for axes in (speeds, steps):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    canvas.savefig(path, dpi=150)


def _lengths(figure: Figure) -> tuple[int, tuple[int, ...]]:
    """What a line is drawn for. A slope's lengths may be later for large batches: the prompt is what they share."""
    return figure.cell.prompt, figure.cell.outputs if len(figure.cell.outputs) == 1 else ()


def _draw(speeds: Any, steps: Any, key: tuple[int, tuple[int, ...]], figures: Sequence[Figure]) -> None:
    prompt, outputs = key
    name = f"{prompt:,} in" + "".join(f", {length:,} out" for length in outputs)
    batches = [figure.cell.sequences for figure in figures]
    (line,) = speeds.plot(batches, [figure.speed.tokens_per_s for figure in figures], marker="o", label=name)
    limits = [figure.limit_tokens_per_s for figure in figures]
    if None not in limits:
        speeds.plot(batches, limits, linestyle="--", color=line.get_color(), label=f"{name}: the device's limit")
    for percentile, style in (("p50", "-"), ("p95", "--"), ("p99", ":")):
        values = [getattr(figure.steps, percentile) for figure in figures]
        label = f"{name}, {percentile.upper()}"
        steps.plot(batches, values, linestyle=style, marker=".", color=line.get_color(), label=label)


def plot_latencies(samples: Mapping[str, Sequence[float]], title: str, path: Path) -> None:
    """Draw, for each metric by its name, which share of its seconds is no longer than so many milliseconds."""
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(8, 5), layout="constrained")
    axes = canvas.subplots()
    canvas.suptitle(title)
    for name, seconds in samples.items():
        if seconds:
            axes.ecdf([1000 * each for each in seconds], label=f"{name}, {len(seconds):,}")
    axes.set(xscale="log", xlabel="ms", ylabel="share that is no longer")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    canvas.savefig(path, dpi=150)
