"""The options of `rvllm benchmark serve`, and how their values are read. Names and defaults are vLLM's."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click

from rvllm.cli.options import Size, chain, json_object, range_ratios

METRICS = ("ttft", "tpot", "itl", "e2el", "client_queue_time", "e2el_including_client_queue")
SAMPLING = (
    ("temperature", float),
    ("top_p", float),
    ("top_k", int),
    ("min_p", float),
    ("frequency_penalty", float),
    ("presence_penalty", float),
    ("repetition_penalty", float),
)
ENDPOINTS = {"openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions"}


def pairs(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """KEY=VALUE, as often as given."""
    wrong = [value for value in values if "=" not in value]
    if wrong:
        raise click.BadParameter(f"{wrong[0]!r} is no KEY=VALUE")
    return {key.strip(): value.strip() for key, _, value in (text.partition("=") for text in values)}


def bounds(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, float]:
    """METRIC:MS, as often as given."""
    found = {}
    for text in values:
        name, _, ms = text.partition(":")
        try:
            found[name] = float(ms)
        except ValueError:
            raise click.BadParameter(f"{text!r} is no METRIC:MILLISECONDS") from None
        if name not in ("ttft", "tpot", "e2el") or not found[name] >= 0:
            raise click.BadParameter(f"{text!r}: ttft, tpot and e2el have bounds of 0 ms or more")
    return found


def metric_names(context: click.Context, parameter: click.Parameter, text: str) -> tuple[str, ...]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in METRICS:
            raise click.BadParameter(f"{name!r} is none of {', '.join(METRICS)}")
    return tuple(name for name in METRICS if name in names)


def percents(context: click.Context, parameter: click.Parameter, text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list such as 50,99,99.9") from None
    if not all(0 <= each <= 100 for each in found):
        raise click.BadParameter(f"{text!r} is not from 0 to 100")
    return found


SHOWN: dict[str, Any] = {"show_default": True}
NUMBER = click.IntRange(1)

where_options = chain(
    click.option("--backend", type=click.Choice(list(ENDPOINTS)), default="openai", **SHOWN),
    click.option("--base-url", metavar="URL", help="In place of --host and --port; without /v1."),
    click.option("--host", default="127.0.0.1", **SHOWN),
    click.option("--port", type=click.IntRange(1, 65535), default=8000, **SHOWN),
    click.option("--endpoint", help="[default: /v1/completions, or /v1/chat/completions of openai-chat]"),
    click.option("--header", multiple=True, callback=pairs, metavar="KEY=VALUE", help="Sent with every request."),
    click.option("--insecure", is_flag=True, help="Do not check the server's certificate."),
    click.option("--ready-check-timeout-sec", type=click.FloatRange(0), default=0, help="Wait so long for the server."),
    click.option("--model", help="[default: the first at /v1/models]"),
    click.option("--served-model-name", help="What requests call it.  [default: --model]"),
    click.option("--tokenizer", metavar="MODEL", help="A folder or name.  [default: --model, where it is a folder]"),
    click.option("--skip-tokenizer-init", is_flag=True, help="Read no tokenizer."),
)
what_options = chain(
    click.option("--dataset-name", type=click.Choice(["random", "sharegpt", "custom"]), default="random", **SHOWN),
    click.option("--dataset-path", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE"),
    click.option("--num-prompts", type=Size(), default=1000, **SHOWN),
    click.option("--num-warmups", type=click.IntRange(0), default=0, help="Requests before, not counted."),
    click.option("--seed", type=click.IntRange(0), default=0, help="Of prompts and arrivals."),
    click.option("--input-len", type=Size(), help="As --random-input-len."),
    click.option("--output-len", type=Size(), help="As --random-output-len, --sharegpt-output-len, ..."),
    click.option("--random-input-len", type=Size(), default=1024, **SHOWN),
    click.option("--random-output-len", type=Size(), default=128, **SHOWN),
    click.option(
        "--random-range-ratio",
        default="0.0",
        metavar="R|JSON",
        callback=lambda context, parameter, text: range_ratios(text),
        help='Lengths are from (1 - R) to (1 + R) times theirs; or {"input": R, "output": R}.',
    ),
    click.option("--random-prefix-len", type=click.IntRange(0), default=0, help="Tokens that all prompts begin with."),
    click.option("--sharegpt-output-len", type=NUMBER, help="[default: as in the data, by the tokenizer]"),
    click.option("--custom-output-len", type=int, default=256, help="-1: each line's output_tokens.", **SHOWN),
    click.option("--disable-shuffle", is_flag=True, help="custom: keep the file's order."),
    click.option("--no-oversample", is_flag=True, help="No prompt twice where a file has too few."),
    click.option("--ignore-eos", is_flag=True, help="All answers as long as asked; others count as failed."),
    *(click.option("--" + name.replace("_", "-"), type=kind) for name, kind in SAMPLING),
    click.option("--logprobs", type=click.IntRange(0)),
    click.option("--extra-body", metavar="JSON", callback=json_object, help="Further fields of every request."),
    click.option("--chat-template-kwargs", metavar="JSON", callback=json_object),
    click.option("--request-id-prefix", help="[default: bench-, then 8 random digits]"),
)
when_options = chain(
    click.option("--request-rate", type=float, default=math.inf, help="Requests a second.", **SHOWN),
    click.option("--burstiness", type=float, default=1.0, help="1: Poisson; less comes in bursts.", **SHOWN),
    click.option("--max-concurrency", type=NUMBER, help="Requests that run at once."),
    click.option("--ramp-up-strategy", type=click.Choice(["linear", "exponential"])),
    click.option("--ramp-up-start-rps", type=float),
    click.option("--ramp-up-end-rps", type=float),
)
told_options = chain(
    click.option(
        "--percentile-metrics", default="ttft,tpot,itl", callback=metric_names, help="Also e2el, ...", **SHOWN
    ),
    click.option("--metric-percentiles", default="99", callback=percents, **SHOWN),
    click.option("--goodput", multiple=True, callback=bounds, metavar="METRIC:MS", help="Bounds of ttft, tpot, e2el."),
    click.option("--save-result", is_flag=True, help="Write vLLM's JSON."),
    click.option("--save-detailed", is_flag=True, help="With each request's times and text."),
    click.option("--append-result", is_flag=True, help="Add a line to the file."),
    click.option("--result-dir", type=click.Path(file_okay=False, path_type=Path), help="Made where it is not there."),
    click.option("--result-filename", metavar="NAME"),
    click.option("--metadata", multiple=True, callback=pairs, metavar="KEY=VALUE", help="Put into the JSON."),
    click.option("--label", help="[default: the backend]"),
    click.option("--disable-tqdm", is_flag=True, help="No progress bar."),
)
