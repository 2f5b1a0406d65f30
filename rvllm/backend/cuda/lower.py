"""From ops to launches: kernel, geometry and arguments of each. Knows the kernels' head blocks; launches nothing.

A program is lowered once for a bucket. The addresses in a launch are those of the arena, the weights, the caches and
the step block, and stay what they are for the life of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import singledispatch

from rvllm.program.dtype import BF16, DType
from rvllm.program.ops import (
    ActMul,
    Add,
    Attention,
    Embedding,
    Fused,
    Linear,
    Norm,
    Op,
    RopeAngles,
    RopeKV,
    SelectRows,
    Tensor,
)

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
WIDTH_A_BLOCK = 2048  # elements of a row that one block of the element-wise kernels does
FUSIONS = frozenset({"linear_add", "linear_act_mul"})
"""The fused kernels there are."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch. `values` are in the order of the kernel's arguments."""

    stem: str
    entry: str
    grid: tuple[int, ...]
    block: int
    shared_bytes: int
    values: tuple[int | float, ...]


@dataclass(frozen=True, slots=True)
class Bucket:
    """The sizes of a step as far as launches depend on them.

    The first `decodes` of the `sequences` bring one token each, the others at most `longest` tokens.
    """

    tokens: int
    rows: int
    sequences: int
    decodes: int
    longest: int


@dataclass(frozen=True, slots=True)
class Target:
    """Where things are, and what the caches look like. `address` knows every tensor, joined weights by joined name."""

    address: Callable[[str], int]
    bucket: Bucket
    max_blocks: int
    blocks: tuple[int, ...]
    block_size: int
    workspace: int
    counters: int


def lower(op: Op, target: Target) -> list[Launch]:
    """The launches that compute `op` for the target's bucket."""
    if isinstance(op, Fused):
        return _FUSED[op.kernel](op, target)
    return _plain(op, target)
