"""A kernel launch, and what decides it: the sizes that a step is padded to, and where things are on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rvllm.backend.cuda.tuning import UNTUNED, Tuning
from rvllm.program.dtype import BF16, DType
from rvllm.program.ops import Tensor


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
    """The sizes that a step is padded to. prefills: whether any sequence may bring more than one token."""

    tokens: int
    rows: int
    sequences: int
    prefills: bool


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
    multiprocessors: int
    tier: str
    matrix_map: Callable[[int, int, int, int], int]
    """A matrix's address, rows, columns, and the rows of a box: the address of its map (t90a)."""
    tuning: Tuning = UNTUNED
    batch_invariant: bool = False
    """Whether a token has the bits that it has alone in every step: products keep `linear`'s order of sums, and tokens
    of prompts attend as decoding does."""

    @property
    def tensor_cores(self) -> bool:
        """Whether the products' builds for tensor cores (t80) are used."""
        return self.tier >= "t80"


def suffix(dtype: DType) -> str:
    """How a kernel's name ends for activations of `dtype`."""
    return "bf16" if dtype is BF16 else "f16"


def covering(count: int, size: int) -> int:
    """Pieces of `size` that cover `count`."""
    return -(-count // size)


def width_of(tensor: Tensor) -> int:
    width = tensor.shape[-1]
    assert isinstance(width, int), tensor
    return width


def rows_of(tensor: Tensor, bucket: Bucket) -> int:
    return bucket.rows if tensor.shape[0] == "rows" else bucket.tokens
