"""A recorded program: ops over named tensors with symbolic sizes. Data; a backend gives it life."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rvllm.program.dtype import E4M3, F32, DType, Float32
from rvllm.program.ops import Embedding, Kind, Linear, Norm, Op, RopeAngles, Tensor, parts, reads

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers whose cached tokens share one block table: same shape, same window.

    A layer's cache is (2, blocks, kv_heads, block, head_dim), keys then values: a (block, head) tile is contiguous. One
    of E4M3 codes has a second tensor, of scales: (2, blocks, kv_heads, block) f32.
    """

    window: int | None
    kv_heads: int
    head_dim: int
    dtype: DType
    layers: int

    def token_bytes(self) -> int:
        """Bytes that one cached token takes in all the group's layers."""
        row = self.dtype.nbytes(self.head_dim) + (F32.nbytes(1) if self.dtype is E4M3 else 0)
        return 2 * self.kv_heads * row * self.layers


@dataclass(frozen=True, slots=True)
class Program:
    """Ops in order, from the step block's inputs to `output`: (rows, vocab) f32 logits."""

    ops: tuple[Op, ...]
    output: Tensor
    constants: Mapping[str, Float32]
    cache_groups: tuple[CacheGroup, ...]

    @property
    def weights(self) -> dict[str, Tensor]:
        """Every checkpoint tensor the program reads, by name, in order of first use."""
        return self._by_kind(Kind.WEIGHT)

    @property
    def caches(self) -> dict[str, Tensor]:
        """Every tensor that lives across steps, (2, blocks.GROUP, ...): each layer's cache, and its scales if any."""
        return self._by_kind(Kind.CACHE)

    def _by_kind(self, kind: Kind) -> dict[str, Tensor]:
        return {tensor.name: tensor for op in self.ops for tensor in reads(op) if tensor.kind is kind}


@dataclass(frozen=True, slots=True)
class Step:
    """What one step computes: the inputs of a program, by the names its tensors have.

    Sequences that bring one token come first (`decode_tokens` of them), then those that bring more. `slots` and
    `block_tables` have one entry a cache group. `lengths` is, for each token, the length that rope scaling goes by.
    All arrays are int32; shapes as in rvllm.program.ops.
    """

    ids: Int32
    positions: Int32
    lengths: Int32
    query_starts: Int32
    kv_lengths: Int32
    slots: tuple[Int32, ...]
    block_tables: tuple[Int32, ...]
    rows: Int32
    decode_tokens: int

    @property
    def sizes(self) -> dict[str, int]:
        """The run-time sizes that tensors' shapes name."""
        return {"tokens": len(self.ids), "rows": len(self.rows), "sequences": len(self.kv_lengths)}

    def inputs(self) -> dict[str, Int32]:
        """Every input by its tensor's name."""
        plain = ("ids", "positions", "lengths", "query_starts", "kv_lengths", "rows")
        named = {name: getattr(self, name) for name in plain}
        for group, (slots, tables) in enumerate(zip(self.slots, self.block_tables)):
            named |= {f"slots.{group}": slots, f"block_tables.{group}": tables}
        return named


def matrices(program: Program) -> dict[str, tuple[Tensor, ...]]:
    """What the program reads from the checkpoint, by joined name: a tensor, or several whose rows make one matrix."""
    wanted: dict[str, tuple[Tensor, ...]] = {}
    for op in program.ops:
        for part in parts(op):
            match part:
                case Embedding():
                    wanted[part.table.name] = (part.table,)
                case Norm():
                    wanted[part.weight.name] = (part.weight,)
                case Linear():
                    wanted[joined_name(part.weights)] = part.weights
                    if part.biases:
                        wanted[joined_name(part.biases)] = part.biases
    return wanted


def joined_name(segments: tuple[Tensor, ...]) -> str:
    """The name under which a linear op's segments are held as one matrix."""
    return "+".join(segment.name for segment in segments)


def length_independent(program: Program) -> int | None:
    """Up to which length of its sequence a token's keys are the same whatever that length is; None: always.

    Dynamic rope scaling turns a prompt's keys by the length of the whole prompt, from its threshold on.
    """
    ropes = [part for op in program.ops for part in parts(op) if isinstance(part, RopeAngles)]
    return min((rope.threshold for rope in ropes if rope.inv_freq.sizes({})[0] > 1), default=None)


def unfused(program: Program) -> Program:
    """The same program with every fused op taken apart again."""
    ops = tuple(part for op in program.ops for part in parts(op))
    return Program(ops, program.output, program.constants, program.cache_groups)
