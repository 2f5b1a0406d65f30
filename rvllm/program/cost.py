"""What each op must move and multiply at the least, and how long a device needs for it: the roofline of `explain`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from rvllm.program.fuse import hidden
from rvllm.program.ops import (
    Attention,
    Embedding,
    Kind,
    Linear,
    Op,
    Plain,
    RopeKV,
    Tensor,
    kernel_stem,
    parts,
    reads,
)
from rvllm.program.program import Program


@dataclass(frozen=True, slots=True)
class Device:
    """A card's limits. Bandwidth is the datasheet's but for those measured; FLOP/s are dense f16/bf16 with f32 sums."""

    name: str
    memory_bytes: int
    bytes_per_s: float
    flops_per_s: float

    def seconds(self, nbytes: int, flops: int) -> float:
        """Roofline time: the slower of moving the bytes and doing the arithmetic."""
        return max(nbytes / self.bytes_per_s, flops / self.flops_per_s)


def _device(name: str, gib: float, tb_per_s: float, tflops: float) -> Device:
    return Device(name, int(gib * 2**30), tb_per_s * 1e12, tflops * 1e12)


# h200: read stream and 8192^3 product measured on one; the rest from NVIDIA's datasheets.
DEVICES = {
    device.name: device
    for device in (
        _device("v100", 32, 0.90, 112),
        _device("t4", 15, 0.32, 65),
        _device("a10", 22.5, 0.60, 125),
        _device("a100-40gb", 39.5, 1.555, 312),
        _device("a100-80gb", 79.2, 2.04, 312),
        _device("l4", 22.5, 0.30, 121),
        _device("l40s", 44.7, 0.864, 362),
        _device("rtx3090", 23.7, 0.936, 71),
        _device("rtx4090", 23.6, 1.008, 165),
        _device("rtx5090", 31.5, 1.792, 209),
        _device("h100", 79.2, 3.35, 989),
        _device("h200", 139.8, 4.68, 775),
        _device("b200", 178.0, 8.0, 2250),
    )
}


def card_named(name: str) -> Device | None:
    """The card that a driver's device name means, such as "NVIDIA A100-SXM4-80GB"; None for an unknown one."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    if "laptop" in words:  # another chip under the same number
        return None
    known = {*words, *(first + second for first, second in zip(words, words[1:]))}
    return next((card for key, card in DEVICES.items() if known.issuperset(key.split("-"))), None)


@dataclass(frozen=True, slots=True)
class Traffic:
    """What steps must read at the least: `weight_bytes` each, and `token_bytes` for a token in the cache.

    bytes_per_s: what the device's memory gives at the most, where that is known.
    """

    weight_bytes: int
    token_bytes: float
    bytes_per_s: float | None

    @classmethod
    def of(cls, program: Program, device: str, context: int) -> Traffic:
        """Of a program on the device of that name; windows count at the mean of sequences of `context` tokens."""
        short, long = cost(program, Load(1, 1, 1)), cost(program, Load(1, 1, context + 1))
        card = card_named(device)
        grown = sum(op.nbytes for op in long) - sum(op.nbytes for op in short)
        return cls(sum(op.weight_bytes for op in short), grown / context, card.bytes_per_s if card else None)


@dataclass(frozen=True, slots=True)
class Load:
    """The step that is costed: `tokens` new ones over `sequences` equal sequences of `context` tokens at its end."""

    tokens: int
    sequences: int
    context: int

    @property
    def sizes(self) -> dict[str, int]:
        return {
            "tokens": self.tokens,
            "rows": self.sequences,
            "sequences": self.sequences,
            "sequences+1": self.sequences + 1,
            "max_blocks": -(-self.context // 32),
        }


@dataclass(frozen=True, slots=True)
class Cost:
    """One op's least work: bytes read and written in device memory, and floating-point operations."""

    kernel: str
    out: Tensor
    weight_bytes: int
    nbytes: int
    flops: int


def cost(program: Program, load: Load) -> list[Cost]:
    """The cost of each op, in order. What a fused op keeps to itself costs no bytes."""
    unseen = hidden(program)
    return [_cost(op, load, unseen) for op in program.ops]


def tensor_bytes(tensor: Tensor, sizes: dict[str, int]) -> int:
    """Bytes of a tensor at these run-time sizes."""
    return tensor.dtype.nbytes(math.prod(tensor.sizes(sizes)))


def _cost(op: Op, load: Load, unseen: frozenset[str]) -> Cost:
    moved: dict[str, int] = {}
    weights: dict[str, int] = {}
    for part in parts(op):
        for tensor, nbytes in _traffic(part, load):
            if tensor.name not in unseen:
                moved[tensor.name] = max(nbytes, moved.get(tensor.name, 0))
            if tensor.kind is Kind.WEIGHT:
                weights[tensor.name] = nbytes
    flops = sum(_flops(part, load) for part in parts(op))
    out = parts(op)[-1].out
    dtype = out.dtype if not isinstance(parts(op)[-1], Linear) else parts(op)[0].out.dtype
    return Cost(f"{kernel_stem(op)}_{dtype}", out, sum(weights.values()), sum(moved.values()), flops)


def _traffic(op: Plain, load: Load) -> list[tuple[Tensor, int]]:
    """(tensor, bytes) that the op reads or writes."""
    found = [(op.out, tensor_bytes(op.out, load.sizes))]
    for tensor in reads(op):
        if tensor.kind is Kind.CACHE:
            found.append((tensor, _cached_tokens(op, load) * _token_bytes(tensor)))
        elif isinstance(op, Embedding) and tensor.kind is Kind.WEIGHT:
            found.append((tensor, load.tokens * tensor.dtype.nbytes(_width(tensor))))
        else:
            found.append((tensor, tensor_bytes(tensor, load.sizes)))
    return found


def _cached_tokens(op: Plain, load: Load) -> int:
    """Cached tokens the op touches: RopeKV writes the new ones, Attention reads every visible one once a sequence."""
    if isinstance(op, RopeKV):
        return load.tokens
    assert isinstance(op, Attention), op
    new = load.tokens // load.sequences
    visible = load.context if op.window is None else min(load.context, op.window - 1 + new)
    return load.sequences * visible


def _token_bytes(cache: Tensor) -> int:
    """Bytes of one token in a cache or in its scales: all sizes but "blocks.GROUP" and "block"."""
    return cache.dtype.nbytes(math.prod(size for size in cache.shape if isinstance(size, int)))


def _width(tensor: Tensor) -> int:
    width = tensor.shape[-1]
    assert isinstance(width, int), tensor
    return width


def _flops(op: Plain, load: Load) -> int:
    """Multiply-adds count two; elementwise ops are bound by bytes everywhere and count one an output element."""
    outputs = math.prod(op.out.sizes(load.sizes))
    if isinstance(op, Linear):
        return 2 * outputs * _width(op.weights[0])
    if isinstance(op, Attention):
        return 4 * _width(op.q) * load.sequences * _visible_pairs(load, op.window)
    return outputs


def _visible_pairs(load: Load, window: int | None) -> int:
    """(query, key) pairs that one sequence's causal mask leaves."""
    new = load.tokens // load.sequences
    longest = range(load.context - new + 1, load.context + 1)
    if window is None:
        return (longest[0] + longest[-1]) * new // 2
    return sum(min(seen, window) for seen in longest)
