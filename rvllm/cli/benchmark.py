"""`rvllm benchmark`: the engine alone, measured: decode by batch, and vLLM's throughput and latency; beside, a server.

Knows options, and what must be there before anything is measured; how it is measured is rvllm.bench's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rvllm.cli.benchmark_serve import serve
from rvllm.cli.main import debug_option
from rvllm.cli.options import (
    Size,
    Sizes,
    chain,
    engine_settings,
    into_file,
    model_setting,
    range_ratios,
    setting,
    talk_options,
)
from rvllm.cli.talk import Talk
from rvllm.cli.vllm.command import VllmCommand
from rvllm.cli.vllm.engine_flags import ENGINE
from rvllm.cli.vllm.flag import refused
from rvllm.config import DEFAULT_MODEL

if TYPE_CHECKING:
    from rvllm.cli.measure import Ready

SEQUENCES = "1,2,4,...,256"
SEQUENCES_ON_CPU = "1,2,4"
CONTEXT, SLOPE_BETWEEN = 512, (16, 144)
WALL_INPUT, WALL_OUTPUT = 8, 32
"""Of the article that this engine answers: 8 tokens in, 32 out."""

PEERS = (
    *refused("prompts are random token ids, there is no data set", """
        --dataset-path = None
        --no-oversample/ = False
        --custom-output-len = None
        --enable-multimodal-chat/ = False
        --hf-subset = None
        --hf-split = None
        --hf-name = None
        --random-batch-size = 1
        --no-reranker/ = False
        --random-mm-base-items-per-request = 1
        --random-mm-num-mm-items-range-ratio = 0
        --random-mm-limit-mm-per-prompt = None
        --random-mm-bucket-config = None
        --asr-min-audio-len-sec = 0
        --asr-max-audio-len-sec = inf
        --prefix-repetition-prefix-len = None
        --prefix-repetition-suffix-len = None
        --prefix-repetition-num-prefixes = None
        --prefix-repetition-output-len = None
    """),
    *refused("prompts are token ids, no text is read or written", """
        --tokenizer = None
        --tokenizer-mode = auto
        --chat-template = None
    """),
    *refused("it has another name", """
        --prefix-len = 0
    """, "--random-prefix-len"),
    *refused("it belongs to another engine", """
        --hf-max-batch-size = None
        --hf-enable-torch-compile/ = False
    """),
    *refused("the engine is called directly, and all requests are there before its first step", """
        --async-engine/ = False
        --prequeue-requests/ = False
    """),
    *refused("there are no adapters", """
        --lora-path = None
        --lora-assignment = random
    """),
    *refused("beam search is not done", """
        --use-beam-search/ = False
    """),
    *refused("there is no profiler inside", """
        --profile/ = False
    """, "run the command under nsys"),
    *refused("no sampling defaults are read: tokens are drawn at temperature 1", """
        --generation-config = auto | vllm
    """),
    *refused("a benchmark keeps a cache where vLLM's does", """
        --enable-prefix-caching/--disable-prefix-caching = None
    """),
    *refused("requests are alike, they begin as they come", """
        --scheduling-policy = fcfs
    """),
)  # fmt: skip
"""Flags of vLLM's benchmarks that are refused; its engine's flags come behind them."""


class Modes(click.Group):
    """A group whose first command is meant where none is named."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ctx.help_option_names):
            args = ["decode", *args]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=Modes)
@debug_option
def benchmark() -> None:
    """Measure the engine alone, or a server. `rvllm benchmark MODEL` means `rvllm benchmark decode MODEL`.

    \b
    rvllm benchmark MODEL --n 1,2,4,...,256 --plot decode.png
    rvllm benchmark MODEL --protocol wall --input-len 128,1k,8k --output-len 32,128,512
    rvllm benchmark throughput --model MODEL --input-len 512 --output-len 128
    rvllm benchmark latency --model MODEL --batch-size 8
    rvllm benchmark serve --port 8000 --max-concurrency 64 --ignore-eos

    Before a figure of the engine there is a check: the same prompts give the same tokens, a row of a batch draws what
    it draws alone, and on a GPU the ops of a two-layer model of the same widths agree with their definitions. Where it
    fails, or a speed is beyond what the device's memory bus allows, nothing is printed and the exit code is 1.

    The last line of stdout is JSON. Prompts are random tokens, all different; a share is of the device's limit, the
    memory bus's or the arithmetic's, whichever is slower. --load-format dummy needs no more than a config.json.
    """


def max_num_seqs(**how: Any) -> Callable[[Any], Any]:
    return setting("max_num_seqs", **{"type": Size(), "help": "Sequences that run at once.", **how})


common = chain(
    click.argument("model_argument", metavar="[MODEL]", required=False),
    model_setting,
    click.option(
        "--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the prompts and what is drawn."
    ),
    into_file("--json", help="Write all figures there, with device, driver, versions and settings."),
    setting("max_num_batched_tokens", type=Size(), show_default=True, help="Tokens of one step."),
    engine_settings,
    talk_options,
)
"""Options of every mode."""

of_peers = chain(
    into_file("--output-json", help="Write vLLM's fields there, and nothing else."),
    click.option("--disable-detokenize", is_flag=True, help="As it always is: no text is made."),
    click.option("--skip-tokenizer-init", is_flag=True, help="As it always is: no tokenizer is read."),
)


@benchmark.command(
    cls=VllmCommand,
    flags=(*PEERS, *ENGINE),
    short_help="Decode speed by batch, beside the device's limit (the default).",
)
@click.option(
    "--n",
    "sequences",
    type=Sizes(),
    help=f"Batch sizes; ... goes on by the ratio.  [default: {SEQUENCES}, on a CPU {SEQUENCES_ON_CPU}]",
)
@click.option(
    "--protocol",
    type=click.Choice(["slope", "wall"]),
    default="slope",
    show_default=True,
    help="slope: from the difference of two output lengths, in which prefill cancels; wall: all of it, prefill too.",
)
@click.option("--context", type=Sizes(), help=f"slope: tokens of each prompt.  [default: {CONTEXT}]")
@click.option("--input-len", type=Sizes(), help=f"wall: tokens of each prompt.  [default: {WALL_INPUT}]")
@click.option(
    "--output-len",
    type=Sizes(),
    help=f"wall: tokens of each output  [default: {WALL_OUTPUT}]; slope: the two lengths  "
    "[default: {},{}, later where a batch takes longer to be read]".format(*SLOPE_BETWEEN),
)
@click.option("--repeat", type=click.IntRange(1), default=3, show_default=True, help="The figure is the median.")
@into_file("--plot", help="Draw speed and step times against batch: .png or .svg (needs matplotlib).")
@max_num_seqs(default=None, help="Sequences that run at once.  [default: the largest batch]")
@common
def decode(
    sequences: tuple[int, ...] | None,
    protocol: str,
    context: tuple[int, ...] | None,
    input_len: tuple[int, ...] | None,
    output_len: tuple[int, ...] | None,
    repeat: int,
    plot: Path | None,
    **options: Any,
) -> None:
    """Decode speed by batch size, greedy, output lengths fixed, beside the device's limit.

    "spread" is from the slowest to the fastest repeat, "ms a step" wall time between two steps' ends.
    """
    lengths = prompt_and_output(protocol, context, input_len, output_len)
    with Talk(quiet=options.pop("quiet"), verbose=options.pop("verbose")) as talk:
        from rvllm.bench import decode, report  # numpy and the engine: only once the options are known to be good
        from rvllm.bench.plot import check_plot
        from rvllm.bench.plot import plot as draw
        from rvllm.cli import measure

        if plot:
            check_plot(plot)
        file = options.pop("json")
        settings = measure.with_device(model_named(options), talk)
        batches = sequences or Sizes().convert(
            SEQUENCES_ON_CPU if settings["device"] == "cpu" else SEQUENCES, None, None
        )
        cells = [
            decode.Cell(count, prompt, outputs, settled=protocol == "wall" or output_len is not None)
            for prompt, outputs in lengths
            for count in batches
        ]
        ready = measure.prepare(settings, max(batches), max(cell.tokens for cell in cells), talk, reuse=False)
        figures = decode.measure(ready.bench, cells, repeat)
        lines = [*report.head(ready.facts, ready.card), "", *report.table(figures)]
        results = {"protocol": protocol, "repeats": repeat, "results": [figure.facts() for figure in figures]}
        if plot:
            draw(figures, f"{ready.facts['model']} on {ready.facts['device']}, {protocol}", plot)
        emit(ready, lines, results, file)


def prompt_and_output(
    protocol: str,
    context: tuple[int, ...] | None,
    input_len: tuple[int, ...] | None,
    output_len: tuple[int, ...] | None,
) -> list[tuple[int, tuple[int, ...]]]:
    """(tokens of the prompt, lengths of the output) of each part of the grid. Raises UsageError."""
    if protocol == "wall":
        if context:
            raise click.UsageError("--context is for --protocol slope, wall has --input-len")
        return [(prompt, (output,)) for prompt in input_len or (WALL_INPUT,) for output in output_len or (WALL_OUTPUT,)]
    if input_len:
        raise click.UsageError("--input-len is for --protocol wall, slope has --context")
    outputs = output_len or SLOPE_BETWEEN
    if len(outputs) != 2:
        raise click.UsageError(f"--output-len has {len(outputs)} lengths, a slope is between two, as in 16,144")
    return [(prompt, outputs) for prompt in context or (CONTEXT,)]


@benchmark.command(cls=VllmCommand, flags=(*PEERS, *ENGINE), short_help="As `vllm bench throughput`.")
@click.option("--backend", type=click.Choice(["vllm"]), default="vllm", help="This engine stands in for it.")
@click.option("--dataset-name", type=click.Choice(["random"]), default="random", show_default=True)
@click.option("--num-prompts", type=Size(), default=1000, show_default=True)
@click.option("--input-len", type=Size(), help="Tokens of a prompt.  [default: --random-input-len]")
@click.option("--output-len", type=Size(), help="Tokens of an output.  [default: --random-output-len]")
@click.option("--random-input-len", type=Size(), default=1024, show_default=True)
@click.option("--random-output-len", type=Size(), default=128, show_default=True)
@click.option(
    "--random-range-ratio",
    default="0.0",
    show_default=True,
    metavar="R|JSON",
    callback=lambda context, parameter, text: range_ratios(text),
    help='Lengths are from (1 - R) to (1 + R) times theirs; or {"input": R, "output": R}.',
)
@click.option("--random-prefix-len", type=click.IntRange(0), default=0, help="Tokens that all prompts begin with.")
@click.option("--n", "copies", type=click.IntRange(1), default=1, show_default=True, help="Outputs of each prompt.")
@click.option("--num-warmups", type=click.IntRange(0), default=0, show_default=True, help="Requests before.")
@of_peers
@max_num_seqs(show_default=True)
@common
def throughput(
    num_prompts: int,
    input_len: int | None,
    output_len: int | None,
    random_input_len: int,
    random_output_len: int,
    random_range_ratio: tuple[float, float],
    random_prefix_len: int,
    copies: int,
    num_warmups: int,
    output_json: Path | None,
    **options: Any,
) -> None:
    """As `vllm bench throughput`: random requests, all at once, drawn at temperature 1; options and JSON are its own.

    Not in the time, and in vLLM's: making text of tokens.
    """
    drop_peers_words(options)
    if num_warmups > num_prompts:
        raise click.UsageError(f"--num-warmups is {num_warmups:,}, there are {num_prompts:,} prompts")
    with Talk(quiet=options.pop("quiet"), verbose=options.pop("verbose")) as talk:
        from rvllm.bench import report, throughput
        from rvllm.cli import measure

        file, seed = options.pop("json"), options["seed"]
        asked = throughput.Requests(
            num_prompts,
            input_len or random_input_len,
            output_len or random_output_len,
            *random_range_ratio,
            shared=random_prefix_len,
            copies=copies,
        )
        settings = measure.with_device(model_named(options), talk)
        at_once = settings["max_num_seqs"]
        most = min(at_once, num_prompts * copies)
        ready = measure.prepare(settings, most, asked.most_tokens, talk, reuse=True)
        result = throughput.throughput(
            ready.bench, asked, warmups=num_warmups, seed=seed, at_once=at_once, reuses=ready.reuses
        )
        fields = result.vllm(ready.facts["model"])
        lines = [*report.head(ready.facts, ready.card), "", *report.throughput_lines(result)]
        extra = {
            "output_tokens_per_second": result.output_tokens_per_s,
            **report.beside_vllms(result.steps, result.share),
        }
        emit(ready, lines, fields | extra, file, output_json, fields)


@benchmark.command(cls=VllmCommand, flags=(*PEERS, *ENGINE), short_help="As `vllm bench latency`.")
@click.option("--input-len", type=Size(), default=32, show_default=True, help="Tokens of a prompt.")
@click.option("--output-len", type=Size(), default=128, show_default=True, help="Tokens of an output.")
@click.option("--batch-size", type=Size(), default=8, show_default=True, help="Prompts at once.")
@click.option("--n", "copies", type=click.IntRange(1), default=1, show_default=True, help="Outputs of each prompt.")
@click.option("--num-iters-warmup", type=click.IntRange(0), default=10, show_default=True)
@click.option("--num-iters", type=click.IntRange(1), default=30, show_default=True)
@of_peers
@max_num_seqs(default=None, help="Sequences that run at once.  [default: the batch]")
@common
def latency(
    input_len: int,
    output_len: int,
    batch_size: int,
    copies: int,
    num_iters_warmup: int,
    num_iters: int,
    output_json: Path | None,
    **options: Any,
) -> None:
    """As `vllm bench latency`: one batch again and again, drawn at temperature 1; options and JSON are its own.

    The prompts are new each time, and no cache is kept between them. Not in the time, and in vLLM's: making text.
    """
    drop_peers_words(options)
    with Talk(quiet=options.pop("quiet"), verbose=options.pop("verbose")) as talk:
        from rvllm.bench import latency, report
        from rvllm.cli import measure

        file = options.pop("json")
        batch = latency.Batch(batch_size, input_len, output_len, copies)
        settings = measure.with_device(model_named(options), talk)
        ready = measure.prepare(settings, batch.sequences, input_len + output_len, talk, reuse=False)
        result = latency.latency(ready.bench, batch, warmups=num_iters_warmup, iterations=num_iters)
        fields = result.vllm(ready.facts["model"])
        lines = [*report.head(ready.facts, ready.card), "", *report.latency_lines(result)]
        emit(ready, lines, fields | report.beside_vllms(result.steps, result.share), file, output_json, fields)


benchmark.add_command(serve)


def model_named(options: dict[str, Any]) -> dict[str, Any]:
    """The options with the model in its place, named as an argument or by --model. Raises UsageError."""
    named = options.pop("model_argument")
    if named and options["model"] != DEFAULT_MODEL:
        raise click.UsageError(f"the model is {named} and --model {options['model']}: give one")
    return options | {"model": named or options["model"]}


def drop_peers_words(options: dict[str, Any]) -> None:
    """Take out what changes nothing here."""
    for name in ("backend", "dataset_name", "disable_detokenize", "skip_tokenizer_init"):
        options.pop(name, None)


def emit(
    ready: Ready,
    lines: list[str],
    results: Mapping[str, Any],
    file: Path | None,
    peers_file: Path | None = None,
    peers_fields: Mapping[str, Any] | None = None,
) -> None:
    """Write the files, then the lines and, last, all of it as one line of JSON."""
    everything = {**ready.facts, **ready.drafted(), **results}
    if file:
        file.write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")
    if peers_file:
        peers_file.write_text(json.dumps(peers_fields, indent=4), encoding="utf-8")
    click.echo("\n".join([*lines, "", json.dumps(everything)]))
