"""`rvllm doctor --check`: a model's ops on this machine's GPU, each beside its definition in numpy.

Knows which steps are worth running; what an op means, and when it is wrong, is rvllm.backend.cuda.check's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from rvllm.backend.cuda.check import ALLOWED, Checker, Difference
from rvllm.backend.cuda.kernels import Device, Gpu
from rvllm.backend.cuda.lower import FUSIONS
from rvllm.backend.cuda.model import CudaModel, StepLimits
from rvllm.engine.block_pool import blocks_for
from rvllm.engine.load import gpu_dtype
from rvllm.engine.request import Request, Sequence
from rvllm.engine.scheduler import Chunk
from rvllm.engine.step import build_step
from rvllm.model.files import Progress
from rvllm.model.source import Source, cache_dtype, context_length, record, weights_for
from rvllm.program.fuse import fuse
from rvllm.program.program import Program, Step
from rvllm.sampling.params import SamplingParams

PROMPT, FIRST_CHUNK = 100, 72  # tokens; the first chunk is long enough for tiled products, the second is not
DECODES = 2  # steps of decoding after the prompts
BLOCK_SIZE = 16
SEQUENCES = 2


@dataclass(frozen=True, slots=True)
class KernelReport:
    """The worst of a kernel's ops, in roundings."""

    kernel: str
    ops: int
    roundings: float


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What a check found. `wrong` is the first op that disagrees: later ones had its output."""

    device: str
    tier: str
    dtype: str
    kv_cache_dtype: str
    kernels: tuple[KernelReport, ...]
    wrong: Difference | None


def open_gpu(warn: Callable[[str], None]) -> tuple[str, Device]:
    """The first GPU and its name. Raises DeviceError with the driver's reason."""
    gpu = Gpu(0, warn)
    return gpu.gpu.name, gpu


def check_model(
    source: Source,
    dtype: str,
    kv_cache_dtype: str,
    name: str,
    device: Device,
    progress: Progress | None = None,
    *,
    batch_invariant: bool = False,
) -> CheckReport:
    """Run the canned steps op by op on `device`, called `name`; settings are EngineConfig's. Raises StartError."""
    activations = gpu_dtype(dtype, source.config.dtype)
    length = context_length(source.config, min(PROMPT + DECODES + 1, source.config.max_position))
    kv_dtype = cache_dtype(kv_cache_dtype, activations)
    program = fuse(record(source, dtype=activations, kv_dtype=kv_dtype, max_length=length), FUSIONS)
    checkpoint = weights_for(source, program)
    most = blocks_for(length, BLOCK_SIZE)
    model = CudaModel(
        program,
        checkpoint,
        device,
        limits=StepLimits(FIRST_CHUNK + SEQUENCES, SEQUENCES, most),
        blocks=(SEQUENCES * most,) * len(program.cache_groups),
        block_size=BLOCK_SIZE,
        vocab_limit=source.config.vocab_size,
        eager=True,
        batch_invariant=batch_invariant,
        progress=progress,
    )
    checker = Checker(model, checkpoint)
    found: list[Difference] = []
    steps = list(canned_steps(program, length, source.config.vocab_size))
    for step in steps:
        for difference in checker.differences(step):
            found.append(difference)
            if progress:
                progress("checking ops", len(found), len(steps) * len(program.ops))
    wrong = next((difference for difference in found if difference.wrong), None)
    return CheckReport(name, device.tier, activations.name, kv_dtype.name, by_kernel(found), wrong)


def canned_steps(program: Program, length: int, vocab: int) -> Iterator[Step]:
    """A prompt in two chunks beside a one-token one that then decodes, and both decoding; `length` bounds each."""
    ids = np.random.default_rng(0).integers(0, vocab, PROMPT + 1 + SEQUENCES * (DECODES + 2)).tolist()
    prompts = [ids[:1], ids[1 : 1 + min(PROMPT, length - DECODES - 1)]]
    spare = iter(ids[1 + PROMPT :])
    rows = [_sequence(prompt, place, length) for place, prompt in enumerate(prompts)]
    for tokens in (FIRST_CHUNK, PROMPT, *(1,) * DECODES):
        chunks = [Chunk(row, min(row.pending, tokens)) for row in rows]
        chunks.sort(key=lambda chunk: chunk.tokens > 1)
        yield build_step(chunks, BLOCK_SIZE, len(program.cache_groups))
        for chunk in chunks:
            chunk.sequence.computed += chunk.tokens
            if not chunk.sequence.pending:
                chunk.sequence.token_ids.append(next(spare))


def _sequence(prompt: list[int], place: int, length: int) -> Sequence:
    """Its blocks lie between the other's, from the end backwards: a wrong table shows."""
    numbers = [SEQUENCES * page + place for page in reversed(range(blocks_for(length, BLOCK_SIZE)))]
    request = Request(str(place), tuple(prompt), SamplingParams(), 0)
    return Sequence(request, length, numbers, list(prompt))


def by_kernel(found: list[Difference]) -> tuple[KernelReport, ...]:
    """The worst of each kernel, in order of first use. NaN is worse than any number."""
    reports = []
    for kernel in dict.fromkeys(difference.kernel for difference in found):
        roundings = [difference.roundings for difference in found if difference.kernel == kernel]
        worst = math.nan if any(map(math.isnan, roundings)) else max(roundings)
        reports.append(KernelReport(kernel, len(roundings), worst))
    return tuple(reports)


def check_lines(report: CheckReport) -> list[str]:
    """A report for people: a line a kernel, then the verdict."""
    rows = [
        f"{entry.kernel:20}{entry.ops:6,} ops{entry.roundings:10.2f} roundings at the worst" for entry in report.kernels
    ]
    cache = "" if report.kv_cache_dtype == report.dtype else f" with a cache of {report.kv_cache_dtype}"
    head = f"{report.device}, {report.tier} kernels, {report.dtype}{cache}; up to {ALLOWED:.0f} roundings are allowed"
    return [head, *rows, verdict(report)]


def verdict(report: CheckReport) -> str:
    wrong = report.wrong
    if wrong is None:
        return "every op agrees with its definition"
    return (
        f"WRONG: op {wrong.op}, kernel {wrong.kernel}, is {wrong.roundings:.2f} roundings from its definition, "
        f"{ALLOWED:.0f} are allowed"
    )


def check_facts(report: CheckReport) -> dict[str, Any]:
    """A report for scripts. What is no finite number is null."""
    wrong = report.wrong
    return {
        "device": report.device,
        "tier": report.tier,
        "dtype": report.dtype,
        "kv_cache_dtype": report.kv_cache_dtype,
        "allowed_roundings": ALLOWED,
        "kernels": [
            {"kernel": entry.kernel, "ops": entry.ops, "roundings": _finite(entry.roundings)}
            for entry in report.kernels
        ],
        "agrees": wrong is None,
        "wrong": wrong and {"op": wrong.op, "kernel": wrong.kernel, "roundings": _finite(wrong.roundings)},
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
