"""`rvllm benchmark serve`: vLLM's `vllm bench serve`, for any OpenAI-compatible server.

Knows files and what is printed; how it is asked and timed is rvllm.bench's.
"""

from __future__ import annotations

import json
import math
import os
import uuid
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rvllm.cli.main import debug_option
from rvllm.cli.options import into_file
from rvllm.cli.talk import Talk
from rvllm.cli.traffic_options import ENDPOINTS, SAMPLING, told_options, what_options, when_options, where_options
from rvllm.cli.vllm.bench_flags import FLAGS
from rvllm.cli.vllm.command import VllmCommand
from rvllm.errors import StartError, WrongOutput

if TYPE_CHECKING:
    from rvllm.bench.client import Client
    from rvllm.bench.datasets import Prompt
    from rvllm.bench.traffic import Reply
    from rvllm.text.tokenizer import Tokenizer


@click.command(cls=VllmCommand, flags=FLAGS, short_help="As `vllm bench serve`: any server, over HTTP.")
@where_options
@what_options
@when_options
@told_options
@into_file("--plot", help="Draw the latencies' shares: .png or .svg (needs matplotlib).")
@debug_option
def serve(**options: Any) -> None:
    """As `vllm bench serve`: streams of an OpenAI-compatible server, timed where they arrive.

    Random prompts of openai and vllm are token ids: of the tokenizer's vocabulary where there is one, else from 3 to
    255, which every vocabulary has. openai-chat takes texts, so it needs a tokenizer; theirs have exactly as many
    tokens. sharegpt and custom are sent as their text, without a template. Tokens are those of the server's usage.

    A key is taken from OPENAI_API_KEY. The last line of stdout is JSON: vLLM's fields.
    """
    check(options)
    with Talk(quiet=False) as talk:
        from rvllm.bench import traffic
        from rvllm.bench.plot import check_plot

        if options["plot"]:
            check_plot(options["plot"])
        fields, lines = traffic.run(measure(options, talk))
    if options["save_result"] or options["append_result"]:
        save(options, fields)
    short = {name: value for name, value in fields.items() if name not in DETAILS}
    click.echo("\n".join([*lines, "", json.dumps(short)]))


DETAILS = (
    *("latencies", "queue_times", "input_lens", "output_lens", "ttfts", "itls", "start_times"),
    *("generated_texts", "errors", "server_queue_times", "server_ttfts", "rps_change_events"),
)
"""Lists as long as the run: they are in the file, and not in the last line."""


def check(options: Mapping[str, Any]) -> None:
    """Raises UsageError where options do not go together."""
    if not options["request_rate"] > 0 or not options["burstiness"] > 0:
        raise click.UsageError("--request-rate and --burstiness must be above 0")
    if options["dataset_name"] != "random" and not options["dataset_path"]:
        raise click.UsageError(f"--dataset-name {options['dataset_name']} needs --dataset-path")
    ends = (options["ramp_up_start_rps"], options["ramp_up_end_rps"])
    if options["ramp_up_strategy"]:
        if not math.isinf(options["request_rate"]):
            raise click.UsageError("--ramp-up-strategy and --request-rate exclude each other")
        if None in ends or not 0 < ends[0] <= ends[1]:
            raise click.UsageError("--ramp-up-start-rps and --ramp-up-end-rps must be above 0 and rise")
    elif ends != (None, None):
        raise click.UsageError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy")


async def measure(options: Mapping[str, Any], talk: Talk) -> tuple[dict[str, Any], list[str]]:
    """vLLM's fields, all of them, and its lines. Raises StartError and WrongOutput."""
    from rvllm.bench import serving, traffic
    from rvllm.bench.arrivals import Rate, RateChanges, arrivals
    from rvllm.bench.client import Client

    key = os.environ.get("OPENAI_API_KEY")
    headers = {**({"authorization": f"Bearer {key}"} if key else {}), **options["header"]}
    host = f"[{options['host']}]" if ":" in options["host"] else options["host"]
    url = options["base_url"] or f"http://{host}:{options['port']}"
    client = Client(url, headers, insecure=options["insecure"])
    model = options["model"]
    if not model or options["ready_check_timeout_sec"]:
        served = await traffic.models(client, options["ready_check_timeout_sec"])
        if not served and not model:
            raise StartError(f"{url}/v1/models names no model", hint="give --model")
        model = model or served[0]
    tokenizer = open_tokenizer(options, model)
    chat = options["backend"] == "openai-chat"
    prompts = make_prompts(options, tokenizer, chat)
    request = traffic.Request(
        options["endpoint"] or ENDPOINTS[options["backend"]],
        chat,
        options["served_model_name"] or model,
        body_fields(options, chat),
        options["ignore_eos"],
        options["request_id_prefix"] or f"bench-{uuid.uuid4().hex[:8]}-",
    )
    await warm_up(client, request, prompts, options)
    ramp = options["ramp_up_strategy"]
    ends = (options["ramp_up_start_rps"] or 0.0, options["ramp_up_end_rps"] or 0.0)
    rate = Rate(options["request_rate"], options["burstiness"], ramp, *ends)
    due_s = arrivals(rate, len(prompts), options["seed"])

    def ended(count: int) -> None:
        if not options["disable_tqdm"]:
            talk.progress("requests", count, len(prompts))

    changes = RateChanges(rate, len(prompts), lambda: datetime.now().isoformat())
    limit = options["max_concurrency"]
    replies, took_s = await traffic.send_all(client, request, prompts, due_s, limit, ended, changes.sent)
    client.close()
    tell_failures(replies, talk)
    metrics, percentiles = known_metrics(options), options["metric_percentiles"]
    found = serving.figures(replies, took_s, metrics=metrics, percentiles=percentiles, goodput_ms=options["goodput"])
    fields = run_fields(options, model, len(prompts)) | found
    if changes.events:
        fields["rps_change_events"] = changes.events
    if options["save_detailed"]:
        fields |= serving.detailed(replies)
    if options["plot"]:
        from rvllm.bench.plot import plot_latencies

        well = serving.samples([reply for reply in replies if reply.error is None])
        title = f"{model}: {fields['output_throughput']:,.1f} tokens/s of {fields['completed']:,} requests"
        plot_latencies({serving.TITLES[name][1]: well[name] for name in metrics}, title, options["plot"])
    return fields, serving.lines(found, rate.per_s, options["max_concurrency"], metrics, percentiles)


def known_metrics(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Those that are asked for and mean something, as vLLM's: nobody queues without --max-concurrency."""
    limited, paced = options["max_concurrency"] is not None, not math.isinf(options["request_rate"])
    told = {"client_queue_time": limited, "e2el_including_client_queue": limited and paced}
    names: tuple[str, ...] = options["percentile_metrics"]
    return tuple(name for name in names if told.get(name, True))


def open_tokenizer(options: Mapping[str, Any], model: str) -> Tokenizer | None:
    """The tokenizer, named or beside a model that is a folder here; None where there is none."""
    named = options["tokenizer"] or (model if Path(model).is_dir() else None)
    if not named or options["skip_tokenizer_init"]:
        return None
    from rvllm.text.tokenizer import Tokenizer

    return Tokenizer.from_pretrained(named)


def make_prompts(options: Mapping[str, Any], tokenizer: Tokenizer | None, chat: bool) -> list[Prompt]:
    """Raises StartError and UsageError."""
    from rvllm.bench import datasets

    count, seed, name = options["num_prompts"], options["seed"], options["dataset_name"]
    output, path, repeat = options["output_len"], options["dataset_path"], not options["no_oversample"]
    if name == "sharegpt":
        return datasets.sharegpt(path, count, seed, output or options["sharegpt_output_len"], tokenizer, repeat=repeat)
    if name == "custom":
        length, shuffle = output or options["custom_output_len"], not options["disable_shuffle"]
        return datasets.custom(path, count, seed, length, tokenizer, shuffle=shuffle, repeat=repeat)
    if chat and tokenizer is None:
        raise click.UsageError("random texts of openai-chat need --tokenizer, the model's folder")
    input_ratio, output_ratio = options["random_range_ratio"]
    lengths = datasets.Lengths(
        options["input_len"] or options["random_input_len"],
        output or options["random_output_len"],
        input_ratio,
        output_ratio,
        options["random_prefix_len"],
    )
    return datasets.random_prompts(lengths, count, seed, tokenizer, as_text=chat)


def body_fields(options: Mapping[str, Any], chat: bool) -> dict[str, Any]:
    """The fields of a request that are the same for all."""
    fields = {name: options[name] for name, _ in SAMPLING if options[name] is not None}
    if options["logprobs"] is not None:
        fields |= {"logprobs": True, "top_logprobs": options["logprobs"]} if chat else {"logprobs": options["logprobs"]}
    if options["ignore_eos"]:
        fields["ignore_eos"] = True
    if options["chat_template_kwargs"]:
        fields["chat_template_kwargs"] = options["chat_template_kwargs"]
    return fields | (options["extra_body"] or {})


async def warm_up(client: Client, request: Any, prompts: list[Prompt], options: Mapping[str, Any]) -> None:
    """Requests that are not counted. Raises StartError where one fails."""
    from rvllm.bench import traffic

    some = [prompts[place % len(prompts)] for place in range(options["num_warmups"])]
    no_wait = [0.0] * len(some)
    replies, _ = await traffic.send_all(client, request, some, no_wait, options["max_concurrency"], lambda count: None)
    for reply in replies:
        if reply.error:
            raise StartError(f"a warm-up request failed: {reply.error}")


def tell_failures(replies: list[Reply], talk: Talk) -> None:
    """Say how many failed and why the first did. Raises WrongOutput where all did."""
    failed = [reply.error for reply in replies if reply.error]
    if len(failed) == len(replies):
        raise WrongOutput(f"every one of {len(replies):,} requests failed, the first with: {failed[0]}")
    if failed:
        talk.note(f"{len(failed):,} of {len(replies):,} requests failed, the first with: {failed[0]}")
    if not all(reply.counted for reply in replies if not reply.error):
        talk.note("the server tells no usage: output tokens are counted as chunks, which may hold several")


def run_fields(options: Mapping[str, Any], model: str, count: int) -> dict[str, Any]:
    """What was asked for, as vLLM names it."""
    rate = options["request_rate"]
    fields = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": options["backend"],
        "backend": options["backend"],
        "label": options["label"],
        "model_id": model,
        "tokenizer_id": options["tokenizer"] or model,
        "num_prompts": count,
        **options["metadata"],
        "request_rate": "inf" if math.isinf(rate) else rate,
        "burstiness": options["burstiness"],
        "max_concurrency": options["max_concurrency"],
    }
    if options["ramp_up_strategy"]:
        fields |= {name: options[name] for name in ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")}
    return fields


def save(options: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """Write the file, one line, as vLLM names it."""
    rate, at_once = options["request_rate"], options["max_concurrency"]
    limit = "" if at_once is None else f"-concurrency{at_once}"
    base = str(fields["model_id"]).rstrip("/").split("/")[-1]
    label = options["label"] or options["backend"]
    name = options["result_filename"] or f"{label}-{rate}qps{limit}-{base}-{fields['date']}.json"
    path = (options["result_dir"] or Path()) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    add = options["append_result"]
    with path.open("a" if add else "w", encoding="utf-8") as file:
        # vLLM's readers take one object a line where results are added to a file.
        file.write(json.dumps(fields) + ("\n" if add else ""))
