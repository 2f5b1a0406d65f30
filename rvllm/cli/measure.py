"""From a benchmark's options to an engine that has been checked and may be measured, with the facts of where it runs.

Knows machines, cards and checks; not what is measured.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime, timezone
from typing import Any, cast

import click

from rvllm.backend.cuda.check import ALLOWED
from rvllm.backend.cuda.kernels import Device as GpuDevice
from rvllm.backend.cuda.lower import FUSIONS
from rvllm.bench.decode import Bench
from rvllm.bench.limit import Limits
from rvllm.bench.runs import Workload
from rvllm.bench.trust import check_outputs
from rvllm.cli import check
from rvllm.cli.machine import commit, machine
from rvllm.cli.talk import Talk
from rvllm.config import EngineConfig
from rvllm.engine.device import choose_device
from rvllm.engine.engine import Engine
from rvllm.engine.load import gpu_dtype, load_engine
from rvllm.errors import WrongOutput
from rvllm.model.files import Progress, locate
from rvllm.model.source import Source, cache_dtype, context_length, open_source, record
from rvllm.program.cost import Device, card_named
from rvllm.program.fuse import fuse
from rvllm.version import VERSION

CHECKED_LAYERS, CHECKED_VOCABULARY = 2, 4096


@dataclass(frozen=True, slots=True)
class Ready:
    """What measures, where it does, and by which card's limits. `reuses`: whether prompts may find others' tokens.

    engine: what is measured, for its counts.
    """

    bench: Bench
    facts: dict[str, Any]
    card: Device | None
    reuses: bool
    engine: Engine

    def drafted(self) -> dict[str, Any]:
        """What has been guessed, checks and all; nothing where there are no guesses."""
        load = self.engine.load
        if self.engine.limits.speculation is None:
            return {}
        names = ("drafts", "draft_tokens", "accepted_tokens")
        return {"speculation": {name: getattr(load, name) for name in names}}


def with_device(options: Mapping[str, Any], talk: Talk) -> dict[str, Any]:
    """The options with "auto" settled: the device is "cpu" or "cuda". Raises DeviceError."""
    return {**options, "device": choose_device(options["device"], talk.note)}


def prepare(settings: Mapping[str, Any], sequences: int, tokens: int, talk: Talk, *, reuse: bool) -> Ready:
    """Load the model for `sequences` at once of `tokens` each, and check it.

    reuse: whether a prompt may go on from what another left in the cache; else that is switched off. Raises UsageError
    where the sizes do not go together, StartError, and WrongOutput where a check fails.
    """
    config = engine_config(settings, sequences, reuse)
    files = locate(config.model, offline=config.offline, progress=talk.progress)
    source = open_source(files, load_format=config.load_format, warn=talk.note)
    need_context(tokens, context_length(source.config, config.max_model_len), "raise --max-model-len or")
    facts = place_facts(config, source)
    card = check_gpu(source, config, facts, talk) if config.device == "cuda" else None
    vocab = source.config.vocab_size
    engine = load_engine(source, config, vocab_limit=vocab, eos_ids=frozenset(), progress=talk.progress, warn=talk.note)
    longest = engine.limits.max_model_len
    need_context(tokens, longest, "raise --kv-cache-memory-bytes or")
    workload = Workload(vocab, config.seed or 0)
    invariant = config.batch_invariant
    # Of a prompt that is kept for others, only whole blocks are.
    fresh = config.block_size - 1 if reuses(config) and not invariant else longest
    guesses = config.speculative_config is not None
    sizes = {"vocab": vocab, "rows": sequences, "max_tokens": longest, "max_prompt": fresh}
    equal = check_outputs(engine, workload, **sizes, batch_invariant=invariant, guesses=guesses)
    facts["checks"].insert(0, f"{equal:,} tokens equal when drawn again and alone")
    # The limits are those of a step for each token; where tokens are guessed, a step gives several.
    limits = Limits(gpu_program(source, config), card) if card and not guesses else None
    gc.collect()
    gc.freeze()  # as a server does once it is warm: what has been loaded is not looked through again
    return Ready(Bench(engine, workload, limits, longest, talk.progress), facts, card, reuses(config), engine)


def check_gpu(source: Source, config: EngineConfig, facts: dict[str, Any], talk: Talk) -> Device | None:
    """The card, if its limits are known; the facts then say what it is and that it computes right."""
    facts["device"], gpu = check.open_gpu(talk.note)
    facts["tier"] = gpu.tier
    facts["checks"].append(f"every op within {check_ops(source, config, gpu, talk.progress):.1f} roundings")
    card = card_named(facts["device"])
    facts["limits"] = card and {"card": card.name, "bytes_per_s": card.bytes_per_s, "flops_per_s": card.flops_per_s}
    return card


def engine_config(settings: Mapping[str, Any], sequences: int, reuse: bool) -> EngineConfig:
    """The engine's settings, room for `sequences` at once. Raises UsageError where fewer were asked for."""
    asked = settings["max_num_seqs"]
    if asked is not None and asked < sequences:
        raise click.UsageError(f"--max-num-seqs is {asked:,}, but {sequences:,} sequences are to run at once")
    known = {field.name for field in fields(EngineConfig)}
    chosen = {name: value for name, value in settings.items() if name in known}
    assert len(chosen) == len(settings), settings.keys() - known
    if not reuse and "enable_prefix_caching" in known:
        chosen["enable_prefix_caching"] = False
    return EngineConfig(**chosen | {"max_num_seqs": asked or sequences})


def reuses(config: EngineConfig) -> bool:
    """Whether the engine keeps a prompt's tokens for later prompts that begin alike."""
    return bool(getattr(config, "enable_prefix_caching", False))


def need_context(tokens: int, limit: int, way_out: str) -> None:
    if tokens > limit:
        raise click.UsageError(
            f"prompt and output have {tokens:,} tokens, the context is {limit:,}: {way_out} shorten them"
        )


def place_facts(config: EngineConfig, source: Source) -> dict[str, Any]:
    """What makes a figure comparable with another: versions, place and settings."""
    found = machine()
    on_gpu = config.device == "cuda"
    return {
        "rvllm": VERSION,
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "model": config.model,
        "dummy_weights": source.checkpoint is None,
        "dtype": gpu_dtype(config.dtype, source.config.dtype).name if on_gpu else "f32",
        "device": found["cpu"]["model"] or "a CPU",
        "tier": None,
        "driver": found["nvidia"]["driver"] if on_gpu else None,
        "cuda": found["nvidia"]["cuda"] if on_gpu else None,
        "python": found["python"]["version"],
        "limits": None,
        "checks": [],
        "settings": {
            name: getattr(config, name)
            for name in (
                *("device", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "enforce_eager"),
                *("batch_invariant", "kv_cache_dtype", "kv_cache_memory_bytes", "gpu_memory_utilization", "seed"),
            )
        }
        | {"speculative_config": config.speculative_config and asdict(config.speculative_config)},
    }


def gpu_program(source: Source, config: EngineConfig) -> Any:
    """The program as the engine runs it."""
    dtype = gpu_dtype(config.dtype, source.config.dtype)
    length = context_length(source.config, config.max_model_len)
    kv_dtype = cache_dtype(config.kv_cache_dtype, dtype)
    return fuse(record(source, dtype=dtype, kv_dtype=kv_dtype, max_length=length), FUSIONS)


def check_ops(source: Source, config: EngineConfig, gpu: GpuDevice, progress: Progress) -> float:
    """Hold each op of two layers to its definition; the worst, in roundings. Raises WrongOutput.

    The device's memory is free again afterwards: a second model beside the measured one would slow it down.
    """
    lent = Lent(gpu)
    try:
        few, device = two_layers(source), cast(GpuDevice, lent)
        dtypes, invariant = (config.dtype, config.kv_cache_dtype), config.batch_invariant
        report = check.check_model(few, *dtypes, "", device, progress, batch_invariant=invariant)
    finally:
        lent.give_back()
    if report.wrong:
        wrong = report.wrong
        raise WrongOutput(
            f"op {wrong.op}, kernel {wrong.kernel}, is {wrong.roundings:.2f} roundings from its definition, "
            f"{ALLOWED:.0f} are allowed",
            hint="no figure is printed; see `rvllm doctor --check MODEL`",
        )
    return max(kernel.roundings for kernel in report.kernels)


def two_layers(source: Source) -> Source:
    """The model with its first and its last layer's kind of window; of a dummy's vocabulary a part is enough."""
    config = source.config
    layers = min(CHECKED_LAYERS, config.layers)
    windows = (config.windows[0], config.windows[-1])[:layers]
    vocab = min(CHECKED_VOCABULARY, config.vocab_size) if source.checkpoint is None else config.vocab_size
    return replace(source, config=replace(config, layers=layers, windows=windows, vocab_size=vocab))


class Lent:
    """A device whose memory is given back as a whole."""

    def __init__(self, device: GpuDevice) -> None:
        self._device = device
        self._held: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def allocate(self, nbytes: int) -> int:
        address = self._device.allocate(nbytes)
        self._held.add(address)
        return address

    def free(self, address: int) -> None:
        self._held.discard(address)
        self._device.free(address)

    def give_back(self) -> None:
        """Free what is still held."""
        self._device.synchronize()
        while self._held:
            self._device.free(self._held.pop())
