"""What kernels do before the grid before them has ended (programmatic dependent launch): nothing with what it writes.

That memory holds NaN on the host until all threads of a block have waited; one launch with and one without must agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from rvllm.sampling.params import SamplingParams
from rvllm.sampling.sampler import SamplingRow
from tests.kernels import sample_batch, shim
from tests.kernels.device import ShimMemory
from tests.kernels.elements import ELEMENTS
from tests.kernels.paged import Shape, decode_items, paged, ring_bytes, token_items, work_list

RNG = np.random.default_rng(31)
BF16 = ELEMENTS[1]
Array = np.ndarray[Any, Any]


@dataclass
class Call:
    """A launch: its arguments, of which `out` is an array that is zero before, and the memory that is late."""

    stem: str
    entry: str
    grid: tuple[int, ...]
    block: int
    args: Sequence[Any]
    out: Array
    late: Sequence[Array]
    shared_bytes: int = 0
    kept: Sequence[Array] = ()  # what arguments point to

    def run(self, late: Sequence[Array], schedule: str) -> Array:
        self.out[...] = 0
        values = [arg.ctypes.data if isinstance(arg, np.ndarray) else arg for arg in self.args]
        tier = shim.tiers_of(self.stem)[-1]
        shim.launch(
            self.stem, self.entry, self.grid, self.block, values, self.shared_bytes, schedule, tier=tier, late=late
        )
        return self.out.copy()


def attention(head_dim: int) -> Call:
    """Sequences whose newest key and value are late; one has four splits for an item, and one block finds no item."""
    shape, lengths = Shape(3, 1, head_dim, block=32), [35, 128, 520]
    held = paged(RNG, BF16, shape, lengths)
    q, out = BF16.normal(RNG, 3, 3 * head_dim), np.zeros((3, 3 * head_dim), dtype=np.uint16)
    items = decode_items(lengths, most=4)
    work = work_list(items, len(items) + 1)
    workspace, counters = np.zeros(3 * 3 * 32 * (head_dim + 2), dtype=np.float32), np.zeros(3, dtype=np.uint32)
    last = [(held.tables[i, (n - 1) // 32], (n - 1) % 32) for i, n in enumerate(lengths)]
    newest = [held.cache[side, page, 0, place] for page, place in last for side in (0, 1)]
    args = [q, *held.cached, held.tables, work, out, workspace, counters, *held.arguments, shape.scale, 0]
    entry = f"attention_decode_d{head_dim}_bf16"
    return Call("attention_decode", entry, (len(items) + 1, 1), 128, args, out, [q, *newest], ring_bytes(shape, "t90"))


def chunk_of_a_prompt() -> Call:
    """A prompt whose last 40 tokens decode, each by itself; the keys and values of all of them are late."""
    shape, length, count = Shape(3, 1, 64, block=32), 520, 40
    held = paged(RNG, BF16, shape, [length])
    q, out = BF16.normal(RNG, count, 3 * 64), np.zeros((count, 3 * 64), dtype=np.uint16)
    items = token_items([length], [count])
    work = work_list(items, count)
    workspace, counters = np.zeros(3 * 32 * 66, dtype=np.float32), np.zeros(1, dtype=np.uint32)
    pages = [(held.tables[0, 15], slice(0, 32)), (held.tables[0, 16], slice(0, 8))]
    newest = [held.cache[side, page, 0, places] for page, places in pages for side in (0, 1)]
    args = [q, *held.cached, held.tables, work, out, workspace, counters, *held.arguments, shape.scale, 0]
    shared = ring_bytes(shape, "t90")
    return Call("attention_decode", "attention_decode_d64_bf16", (count, 1), 128, args, out, [q, *newest], shared)


def product(stem: str, depth: int) -> Call:
    tokens, rows = 3, 48
    x, weight = BF16.normal(RNG, tokens, depth), BF16.normal(RNG, rows, depth)
    width = rows // 2 if stem == "linear_act_mul" else rows
    out = np.zeros((tokens, width), dtype=np.uint16)
    others = [BF16.normal(RNG, tokens, rows)] if stem == "linear_add" else []
    sizes = [tokens, width, depth, *([0] if stem == "linear_act_mul" else [])]
    args = [x, weight, 0, *others, out, *sizes, np.zeros(4096, dtype=np.float32), np.zeros(8, dtype=np.uint32)]
    return Call(stem, f"{stem}_bf16_m8", (3, 1), 256, args, out, [x, *others], 4096 * 3 * 6)


def product_by_rings(kind: str, depth: int, stages: int) -> Call:
    tokens, rows = 3, 64
    x, weight = BF16.normal(RNG, tokens, depth), BF16.normal(RNG, rows, depth)
    width, box_rows = (rows // 2, 8) if kind == "_act_mul" else (rows, 16)
    out = np.zeros((tokens, width), dtype=np.uint16)
    others = [BF16.normal(RNG, tokens, rows)] if kind == "_add" else []
    room = np.zeros(192, dtype=np.uint8)
    told = room[-room.ctypes.data % 64 :][:128]
    told[:] = ShimMemory().matrix_map(weight.ctypes.data, rows, depth, box_rows)
    args = [x, told, 0, *others, out, tokens, width, depth, 0 if kind == "_act_mul" else 16, stages]
    shared = 9216 + 16384 * stages + tokens * (128 * -(-depth // 64) + 16)
    stem = f"linear{kind}_t90a"
    return Call(stem, f"{stem}_bf16", (3,), 256, args, out, [x, *others], shared, [weight])


def norm() -> Call:
    x, weight, out = BF16.normal(RNG, 2, 96), BF16.normal(RNG, 96), np.zeros((2, 96), dtype=np.uint16)
    return Call("norm", "norm_bf16", (2,), 32, [x, weight, 1e-6, out, 96], out, [x])


CALLS = {
    "attention, 64": lambda: attention(64),
    "attention, 128": lambda: attention(128),
    "attention, a chunk of a prompt": chunk_of_a_prompt,
    "linear, two stages early": lambda: product("linear", 8 * 32 * 6),
    "linear, all stages early": lambda: product("linear", 8 * 32 * 13),
    "linear, rows that start anywhere": lambda: product("linear", 777),
    "linear_add": lambda: product("linear_add", 8 * 32 * 13),
    "linear_act_mul": lambda: product("linear_act_mul", 8 * 32 * 6),
    "linear_t90a, more than its rings hold": lambda: product_by_rings("", 8 * 64 * 3, 2),
    "linear_t90a, rings that hold it all": lambda: product_by_rings("_act_mul", 8 * 64, 12),
    "linear_add_t90a": lambda: product_by_rings("_add", 8 * 64 + 8, 4),
    "norm": norm,
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("schedule", ["round robin", "one warp"])
def test_what_the_grid_before_writes_is_read_behind_the_wait(name: str, schedule: str) -> None:
    call = CALLS[name]()
    expected = call.run([], schedule)
    assert expected.any()
    assert np.array_equal(call.run(call.late, schedule), expected)


SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"logprobs": 3},
    {"top_k": 5, "presence_penalty": 0.5},
    {"top_k": 400, "logit_bias": {7: 4.0}},
    {"top_p": 0.9, "allowed_token_ids": tuple(range(0, 3000, 3))},
]


def sampler(late: bool, schedule: str) -> list[bytes]:
    """What the sampling kernels draw; each finds late what the step and the kernels before it have written."""
    units, count = 4, len(SAMPLED)
    vocab, rng = units * sample_batch.UNIT - 20, np.random.default_rng(8)
    logits, positions = rng.standard_normal((count, vocab)).astype(np.float32) * 3, np.arange(count, dtype=np.uint32)
    rows = [SamplingRow(SamplingParams(**rule), 3, place, (), {5: 1}) for place, rule in enumerate(SAMPLED)]
    slots, edits = sample_batch.slots_of(rows, vocab)
    parameters = sample_batch.parameters_of(rows, vocab, edits, {name: a.ctypes.data for name, a in slots.items()})
    work, counters = np.zeros_like(sample_batch.workspace(count, vocab)), np.zeros(count, np.uint32)
    tokens, next_ids, top_ids = (np.zeros(size, np.int32) for size in (count, count, 20 * count))
    logprobs, tops = np.zeros(count, np.float32), np.zeros(20 * count, np.float32)
    step = [logits, positions, parameters, slots["bias"], slots["masks"]]
    slices, maxima = work[80 * count :][: 32 * units * count], work[-1024 * units * count :]
    sizes, head = [count, vocab, vocab], [logits, parameters, positions, work]
    launches: list[tuple[str, tuple[int, ...], int, list[Any], list[Array]]] = [
        ("scan", (units, count), 256, [*head, counters, tokens, next_ids, *sizes], step),
        ("bound", (count,), 512, [logits, parameters, work, tokens, next_ids, *sizes], [*step, slices, maxima]),
        ("weigh", (units, count), 256, [logits, parameters, work, *sizes], step),
        (
            "finish",
            (count,),
            512,
            [*head, tokens, next_ids, logprobs, top_ids, tops, units, *sizes],
            [*step, slices, maxima],
        ),
    ]
    for name, grid, block, args, writes in launches:
        values = [arg.ctypes.data if isinstance(arg, np.ndarray) else arg for arg in args]
        entry, tier = f"sample_{name}", shim.tiers_of("sample")[-1]
        shim.launch("sample", entry, grid, block, values, 0, schedule, tier=tier, late=writes if late else [])
    assert (tokens >= 0).all()
    return [array.tobytes() for array in (tokens, next_ids, logprobs, top_ids, tops, slots["bits"])]


@pytest.mark.parametrize("schedule", ["round robin", "one warp"])
def test_what_a_sampler_reads_of_the_step_is_read_behind_the_wait(schedule: str) -> None:
    assert sampler(True, schedule) == sampler(False, schedule)


@pytest.mark.parametrize("name", ["attention, 64", "linear, two stages early"])
def test_what_is_read_before_the_wait_shows(name: str) -> None:
    call = CALLS[name]()
    expected = call.run([], "round robin")
    _, held, tables = call.args[:3]
    # The first page of keys of the longest sequence, or weights.
    early = held[0, tables[2, 0]] if name.startswith("attention") else held
    found = call.run([early], "round robin")
    assert not np.array_equal(found, expected)


def test_a_block_that_does_not_wait_is_an_error() -> None:
    values, sums = np.ones(64, dtype=np.float32), np.zeros(1, dtype=np.float32)
    with pytest.raises(shim.LaunchFailed, match="ended before the grid before it"):
        shim.launch("probe", "probe_block_sum", (1,), 64, [values.ctypes.data, sums.ctypes.data], late=[values])
