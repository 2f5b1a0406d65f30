"""`rvllm explain`: every op of a model's step, what it must move and compute, and the least time that takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from rvllm.cli.gpus import card_for, gpu_option
from rvllm.cli.model import OpenedModel, open_model
from rvllm.cli.options import Size, in_gib, json_option, kv_cache_dtype_option, setting, talk_options
from rvllm.cli.talk import Talk
from rvllm.config import DTYPES, LOAD_FORMATS
from rvllm.program.cost import Cost, Device, Load, cost
from rvllm.program.fuse import ALL_KERNELS, fuse

Item = TypeVar("Item")

DEFAULT_CONTEXT = 512


@click.command()
@click.argument("model")
@click.option("--tokens", type=Size(), help="New tokens of the step, all sequences together.  [default: one each]")
@click.option("--sequences", "--batch", type=Size(), default=1, show_default=True, help="That run at once.")
@click.option("--context", type=Size(), help=f"Tokens of each at the step's end.  [default: {DEFAULT_CONTEXT}]")
@gpu_option
@setting("dtype", type=click.Choice(DTYPES), show_default=True, help="Of activations.")
@kv_cache_dtype_option
@setting("load_format", type=click.Choice(LOAD_FORMATS), show_default=True, help="dummy: config.json is enough.")
@setting("offline", is_flag=True, help="Never fetch the default model.")
@click.option("--unfused", is_flag=True, help="Show every op by itself.")
@json_option
@talk_options
def explain(
    model: str,
    tokens: int | None,
    sequences: int,
    context: int | None,
    gpu: str | None,
    dtype: str,
    kv_cache_dtype: str,
    load_format: str,
    offline: bool,
    unfused: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Show what each op of MODEL's step moves and computes, and the least time a GPU needs for it.

    One step of decoding by default; for a prompt of 512 tokens say --tokens 512. The limit is the slower of memory bus
    and arithmetic, op by op. No weight is read and no GPU is needed.
    """
    load = step_load(tokens, sequences, context)
    with Talk(quiet=quiet, verbose=verbose) as talk:
        opened = open_model(
            model,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            load_format=load_format,
            max_model_len=None,
            offline=offline,
            progress=talk.progress,
            warn=talk.note,
        )
    limit = opened.source.config.max_position
    if load.context > limit:
        raise click.UsageError(f"--context is {load.context:,}, the model's limit is {limit:,}")
    program = opened.program if unfused else fuse(opened.program, ALL_KERNELS)
    roofline = Roofline(cost(program, load), load, card_for(gpu))
    if as_json:
        print_json(opened, roofline)
    else:
        click.echo("\n".join(table(opened, roofline)))


def step_load(tokens: int | None, sequences: int, context: int | None) -> Load:
    """The step to cost. Raises UsageError where its sizes do not go together."""
    tokens = tokens or sequences
    if tokens % sequences:
        raise click.UsageError(f"--tokens is {tokens:,}, it must be a multiple of --sequences, which is {sequences:,}")
    each = tokens // sequences
    context = context or max(DEFAULT_CONTEXT, each)
    if context < each:
        raise click.UsageError(f"--context is {context:,}, but each sequence brings {each:,} new tokens")
    return Load(tokens, sequences, context)


@dataclass(frozen=True, slots=True)
class Roofline:
    """The costs of a step's ops on a card, one after the other."""

    ops: Sequence[Cost]
    load: Load
    card: Device

    def seconds(self, op: Cost) -> float:
        return self.card.seconds(op.nbytes, op.flops)

    def bound(self, op: Cost) -> str:
        """What the op waits for: "bytes" | "FLOPs"."""
        return "bytes" if op.nbytes / self.card.bytes_per_s >= op.flops / self.card.flops_per_s else "FLOPs"

    @property
    def total_s(self) -> float:
        return sum(map(self.seconds, self.ops))

    @property
    def tokens_per_s(self) -> float:
        return self.load.tokens / self.total_s


@dataclass(frozen=True, slots=True)
class Run:
    """Ops `first` to `first + length - 1`, and `times - 1` more stretches just like them right after."""

    first: int
    length: int
    times: int


def fold(items: Sequence[Item], key: Callable[[Item], Any]) -> list[Run]:
    """Cut `items` into runs, so that stretches that repeat with equal keys are told once. Greedy from the front."""
    keys = [key(item) for item in items]
    runs: list[Run] = []
    place = 0
    while place < len(keys):
        run = _longest_run(keys, place)
        if run.times == 1 and runs and runs[-1].times == 1:  # single ops in a row are one stretch
            runs[-1] = Run(runs[-1].first, runs[-1].length + 1, 1)
        else:
            runs.append(run)
        place += run.length * run.times
    return runs


def _longest_run(keys: Sequence[Any], place: int) -> Run:
    """The repetition from `place` on that covers most; of equals the shortest stretch. One op where none repeats."""
    best = Run(place, 1, 1)
    for length in range(1, (len(keys) - place) // 2 + 1):
        stretch = keys[place : place + length]
        times = 1
        while keys[place + times * length : place + (times + 1) * length] == stretch:
            times += 1
        if times > 1 and times * length > best.times * best.length:
            best = Run(place, length, times)
    return best


def _key(op: Cost) -> tuple[object, ...]:
    return op.kernel, op.out.shape, op.nbytes, op.flops


def table(opened: OpenedModel, roofline: Roofline) -> list[str]:
    """The report as lines of text."""
    load, card = roofline.load, roofline.card
    config = opened.source.config
    weights = ", ".join(f"{in_gib(nbytes)} {name}" for name, nbytes in opened.weight_bytes.items())
    lines = [
        f"{opened.source.files.name}: {config.architecture}, {config.layers} layers; weights {weights}; "
        f"cache {opened.kv_token_bytes:,} bytes a token",
        f"step: {load.tokens:,} new tokens, {load.sequences:,} sequences of {load.context:,} tokens",
        f"card: {card.name}, {card.bytes_per_s / 1e12:.2f} TB/s, {card.flops_per_s / 1e12:,.0f} TFLOP/s",
        "",
        f"{'':7}{'kernel':32}{'out':30}{'MB':>11}{'GFLOP':>11}{'limit us':>11}  bound",
    ]
    for run in fold(roofline.ops, _key):
        stretch = roofline.ops[run.first : run.first + run.length]
        for number, op in enumerate(stretch):
            lines.append(_row(_margin(number, run), op, roofline))
    total = roofline.total_s
    lines += [
        f"{'':7}{f'{len(roofline.ops)} ops':62}{sum(op.nbytes for op in roofline.ops) / 1e6:11,.2f}"
        f"{sum(op.flops for op in roofline.ops) / 1e9:11,.2f}{total * 1e6:11,.1f}",
        "",
        f"limit: {total * 1e3:,.3f} ms a step, {roofline.tokens_per_s:,.0f} tok/s",
    ]
    return lines


def _margin(number: int, run: Run) -> str:
    """A bracket in front of ops that repeat, with how often."""
    if run.times == 1:
        return ""
    if number > 0:
        return "      │"
    return f"{run.times:>3} x " + ("┌" if run.length > 1 else "")


def _row(margin: str, op: Cost, roofline: Roofline) -> str:
    shape = " x ".join(map(str, op.out.shape))
    return (
        f"{margin:7}{op.kernel:32}{shape + ' ' + op.out.dtype.name:30}{op.nbytes / 1e6:11,.3f}"
        f"{op.flops / 1e9:11,.3f}{roofline.seconds(op) * 1e6:11,.2f}  {roofline.bound(op)}"
    )


def print_json(opened: OpenedModel, roofline: Roofline) -> None:
    """The same, and every op with its name, as one JSON object."""
    import json

    load, card = roofline.load, roofline.card
    result = {
        "model": opened.source.files.name,
        "architecture": opened.source.config.architecture,
        "weight_bytes": opened.weight_bytes,
        "kv_token_bytes": opened.kv_token_bytes,
        "step": {"tokens": load.tokens, "sequences": load.sequences, "context": load.context},
        "card": {"name": card.name, "bytes_per_s": card.bytes_per_s, "flops_per_s": card.flops_per_s},
        "ops": [
            {
                "kernel": op.kernel,
                "out": op.out.name,
                "shape": op.out.shape,
                "dtype": op.out.dtype.name,
                "weight_bytes": op.weight_bytes,
                "bytes": op.nbytes,
                "flops": op.flops,
                "limit_s": roofline.seconds(op),
                "bound": roofline.bound(op),
            }
            for op in roofline.ops
        ],
        "bytes": sum(op.nbytes for op in roofline.ops),
        "flops": sum(op.flops for op in roofline.ops),
        "limit_s": roofline.total_s,
        "tokens_per_s": roofline.tokens_per_s,
    }
    click.echo(json.dumps(result))
