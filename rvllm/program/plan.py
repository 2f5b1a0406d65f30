"""Give every activation a place in one arena, by liveness. Knows sizes and order; allocates nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rvllm.program.fuse import hidden
from rvllm.program.ops import Kind, Tensor, reads, writes
from rvllm.program.program import Program

ALIGNMENT_BYTES = 256


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Byte offsets in an arena of `nbytes` bytes; tensors whose lifetimes overlap never share a byte."""

    offsets: Mapping[str, int]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Lifetime:
    """An activation is written by op `first` and read last by op `last`."""

    tensor: Tensor
    first: int
    last: int


def lifetimes(program: Program) -> list[Lifetime]:
    """When each activation that needs memory lives; the output lives to the end."""
    unseen = hidden(program)
    first: dict[str, tuple[Tensor, int]] = {}
    last: dict[str, int] = {}
    for index, op in enumerate(program.ops):
        for tensor in reads(op):
            if tensor.kind is Kind.ACTIVATION:
                last[tensor.name] = index
        for tensor in writes(op):
            if tensor.name not in unseen:
                first[tensor.name] = (tensor, index)
    last[program.output.name] = len(program.ops)
    return [Lifetime(tensor, begin, last.get(name, begin)) for name, (tensor, begin) in first.items()]


def plan(program: Program, nbytes: Callable[[Tensor], int]) -> MemoryPlan:
    """Place the largest tensors first, each at the lowest offset free for its whole life; `nbytes` gives sizes."""
    placed: list[tuple[int, int, Lifetime]] = []  # begin, end, life
    for life in sorted(lifetimes(program), key=lambda life: (-nbytes(life.tensor), life.first)):
        size = -(-nbytes(life.tensor) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        begin = 0
        for other_begin, other_end, other in sorted(placed, key=lambda entry: entry[0]):
            if other.first > life.last or other.last < life.first:
                continue
            if begin + size <= other_begin:
                break
            begin = max(begin, other_end)
        placed.append((begin, begin + size, life))
    offsets = {life.tensor.name: begin for begin, _, life in placed}
    return MemoryPlan(offsets, max((end for _, end, _ in placed), default=0))
