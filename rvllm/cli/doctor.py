"""`rvllm doctor`: what this machine offers, whether a model fits it or a named card, and computes right on it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import click

from rvllm.cli.fit import RUNTIME_BYTES, Fit, on_cpu, on_gpu
from rvllm.cli.gpus import gpu_option
from rvllm.cli.machine import Facts, free_memory, machine
from rvllm.cli.model import OpenedModel, open_model
from rvllm.cli.options import Size, in_gib, json_option, kv_cache_dtype_option, setting, talk_options
from rvllm.cli.talk import Talk
from rvllm.config import DTYPES, LOAD_FORMATS, EngineConfig
from rvllm.errors import StartError
from rvllm.model.files import locate
from rvllm.model.source import open_source
from rvllm.program.cost import DEVICES


@dataclass(frozen=True, slots=True)
class Place:
    """Where a model is to run. `on_cpu` means this machine's memory; else a card's."""

    name: str
    memory_bytes: int
    on_cpu: bool


@click.command()
@click.argument("model", required=False)
@gpu_option
@click.option("--gpu-memory", type=Size(), help="A card with this memory, such as 24GiB.")
@setting("dtype", type=click.Choice(DTYPES), show_default=True, help="Of activations on a card.")
@kv_cache_dtype_option
@setting("load_format", type=click.Choice(LOAD_FORMATS), show_default=True, help="dummy: config.json is enough.")
@click.option("--check", is_flag=True, help="Run MODEL's ops on this machine's GPU, each beside numpy.")
@setting("offline", is_flag=True, help="Never fetch the default model.")
@json_option
@talk_options
def doctor(
    model: str | None,
    gpu: str | None,
    gpu_memory: int | None,
    dtype: str,
    kv_cache_dtype: str,
    load_format: str,
    check: bool,
    offline: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Show what this machine offers and, given MODEL, whether that fits: weights, cache, contexts.

    The card is the one named, else the first one found, else the CPU's memory is reckoned with. The exit code is 1 if
    MODEL does not fit or is broken.

    --check computes a few steps of MODEL on the first GPU and holds every op to its definition, on the GPU's own
    inputs; the exit code is 1 if one disagrees, and the first that does is named.
    """
    if check:
        if model is None or gpu or gpu_memory:
            raise click.UsageError("--check runs MODEL on this machine's GPU: name it, without --gpu and --gpu-memory")
        with Talk(quiet=quiet, verbose=verbose) as talk:
            check_on_gpu(model, dtype, kv_cache_dtype, load_format, offline, as_json, talk)
        return
    facts = machine()
    if model is None:
        if gpu or gpu_memory:
            raise click.UsageError("--gpu and --gpu-memory say where MODEL is to fit: name one")
        show(facts, None, as_json)
        return
    place = chosen_place(facts, gpu, gpu_memory)
    with Talk(quiet=quiet, verbose=verbose) as talk:
        opened = open_model(
            model,
            dtype="float32" if place.on_cpu else dtype,
            kv_cache_dtype=kv_cache_dtype,
            load_format=load_format,
            max_model_len=None,
            offline=offline,
            progress=talk.progress,
            warn=talk.note,
        )
    fit = (on_cpu if place.on_cpu else on_gpu)(opened, place.memory_bytes)
    show(facts, (opened, place, fit), as_json)
    if not fit.fits:
        click.get_current_context().exit(1)


def check_on_gpu(
    model: str, dtype: str, kv_cache_dtype: str, load_format: str, offline: bool, as_json: bool, talk: Talk
) -> None:
    """Print how MODEL's ops compare with their definitions; exits with 1 where one is wrong. Raises StartError."""
    from rvllm.cli import check  # the whole CUDA backend: only for those who ask

    name, device = check.open_gpu(talk.note)
    files = locate(model, offline=offline, progress=talk.progress)
    source = open_source(files, load_format=load_format, warn=talk.note)
    report = check.check_model(source, dtype, kv_cache_dtype, name, device, talk.progress)
    if as_json:
        import json

        click.echo(json.dumps({"model": files.name, **check.check_facts(report)}))
    else:
        click.echo("\n".join(check.check_lines(report)))
    if report.wrong:
        click.get_current_context().exit(1)


def chosen_place(facts: Facts, gpu: str | None, gpu_memory: int | None) -> Place:
    """The card by name or memory, the first one found, or this machine's memory. Raises UsageError, StartError."""
    if gpu and gpu_memory:
        raise click.UsageError("give --gpu or --gpu-memory, not both")
    if gpu_memory:
        return Place(f"a card of {in_gib(gpu_memory)}", gpu_memory, False)
    if gpu:
        return Place(gpu, DEVICES[gpu].memory_bytes, False)
    if facts["nvidia"]["gpus"]:
        found = facts["nvidia"]["gpus"][0]
        return Place(found["name"], found["memory"], False)
    free = free_memory(facts["memory"])
    if free is None:
        raise StartError("this machine does not say how much memory is free", hint="give --gpu or --gpu-memory")
    return Place("this machine's CPU", free, True)


Report = tuple[OpenedModel, Place, Fit]


def show(facts: Facts, report: Report | None, as_json: bool) -> None:
    """Print the facts and, with a model, how it fits."""
    if as_json:
        import json

        click.echo(json.dumps({**facts, "model": model_facts(*report) if report else None}))
        return
    lines = machine_lines(facts)
    if report:
        lines += ["", *model_lines(*report)]
    click.echo("\n".join(lines))


def model_facts(opened: OpenedModel, place: Place, fit: Fit) -> dict[str, Any]:
    """How a model fits, for scripts."""
    return {
        "name": opened.source.files.name,
        "architecture": opened.source.config.architecture,
        "context": opened.max_length,
        "stored_bytes": opened.weight_bytes,
        "place": asdict(place),
        "fits": fit.fits,
        **asdict(fit),
    }


def machine_lines(facts: Facts) -> list[str]:
    """The machine's facts for people, one a line."""
    python, cpu, memory, cache = facts["python"], facts["cpu"], facts["memory"], facts["cache"]
    limit = f", a container's limit is {in_gib(memory['limit'])}" if memory["limit"] else ""
    rows = [
        ("rvllm", facts["rvllm"]),
        ("Python", f"{python['version']} {python['implementation']}, {python['executable']}"),
        ("platform", f"{facts['platform']}, glibc {facts['glibc'] or 'not found'}"),
        ("CPU", f"{cpu['model'] or 'unknown'}, {cpu['usable_cores']} of {cpu['cores']} cores usable"),
        ("", " ".join(cpu["features"]) or "no vector features known"),
        ("memory", f"{_size(memory['available'])} available of {_size(memory['total'])}{limit}"),
        ("cache", f"{cache['folder']}, {_usable(cache)}"),
        (facts["default_model"]["name"], facts["default_model"]["path"] or facts["default_model"]["problem"]),
        ("numpy", "{version}, BLAS {blas} {blas_version}".format(**facts["numpy"])),
        *gpu_rows(facts["nvidia"]),
    ]
    return [f"{name:10}{value}" for name, value in rows]


def gpu_rows(nvidia: Facts) -> list[tuple[str, str]]:
    """The driver and each GPU, or why there is none."""
    version = f"driver {nvidia['driver'] or 'of unknown version'}, CUDA {nvidia['cuda']}"
    rows = [("NVIDIA", version)] if nvidia["cuda"] else []
    for gpu in nvidia["gpus"]:
        kernels = f"{gpu['kernels']} kernels" if gpu["kernels"] else "too old: needs compute capability 7.0"
        rows.append(
            (
                f"GPU {gpu['index']}",
                f"{gpu['name']}, compute capability {gpu['compute_capability']}, {in_gib(gpu['memory'])}, {kernels}",
            )
        )
    if nvidia["problem"]:
        rows.append(("" if rows else "NVIDIA", nvidia["problem"]))
        rows += [("", f"hint: {nvidia['hint']}")] if nvidia["hint"] else []
    return rows


def model_lines(opened: OpenedModel, place: Place, fit: Fit) -> list[str]:
    """How a model fits, for people."""
    stored = ", ".join(f"{in_gib(nbytes)} {name}" for name, nbytes in opened.weight_bytes.items())
    share = "free" if place.on_cpu else f"{EngineConfig().gpu_memory_utilization:.0%} of {in_gib(place.memory_bytes)}"
    rows = [
        ("model", f"{opened.source.files.name}, {opened.source.config.architecture}"),
        ("weights", f"{stored}{f'; {in_gib(fit.weight_bytes)} in float32' if place.on_cpu else ''}"),
        ("place", f"{place.name}: {in_gib(fit.usable_bytes)} usable ({share})"),
        ("workspace", f"{in_gib(fit.workspace_bytes)}, an estimate: {_workspace(place)}"),
        ("KV cache", f"{fit.kv_token_bytes:,} bytes a token; {in_gib(fit.cache_bytes)} to use"),
    ]
    if not fit.fits:
        missing = fit.weight_bytes + fit.workspace_bytes - fit.usable_bytes
        rows.append(("verdict", f"does not fit: {in_gib(max(missing, 0))} and a cache's worth are missing"))
    else:
        rows.append(("verdict", f"fits; one sequence can have {fit.largest_context:,} of {opened.max_length:,} tokens"))
        rows += [("", f"{count:,} at once with {tokens:,} tokens each") for tokens, count in fit.concurrency.items()]
    return [f"{name:10}{value}" for name, value in rows]


def _workspace(place: Place) -> str:
    """What the workspace is made of."""
    step = f"activations of {EngineConfig().max_num_batched_tokens:,} tokens"
    return step if place.on_cpu else f"{step}, and {in_gib(RUNTIME_BYTES)} for CUDA's context"


def _size(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else in_gib(nbytes)


def _usable(cache: Facts) -> str:
    """Whether the cache folder serves its purpose."""
    state = "exists" if cache["exists"] else "not made yet"
    write = "can be written" if cache["writable"] else "CANNOT BE WRITTEN (set RVLLM_CACHE)"
    run = "is mounted noexec (set RVLLM_CACHE)" if cache["executable"] is False else "programs run from it"
    return f"{state}, {write}, {run}, {_size(cache['free'])} free"
