"""The op set: what a model may record. Each op is worth one kernel, or a part of a fused one. Data only.

A field that is a `Tensor` (or a tuple of them) is read, but for `out`, which is written; a `cache` and its `scales` are
both. Shapes are (tokens, ...) unless said otherwise; X is the program's activation dtype, and an op's output is rounded
to its dtype.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, fields

from rvllm.program.dtype import DType

Size = int | str  # a number, or the name of a size known only at run time: "tokens", "rows", "sequences", "blocks" ...


class Kind(enum.Enum):
    """Who fills a tensor."""

    INPUT = "input"  # the step block
    WEIGHT = "weight"  # the checkpoint, by its Hugging Face name
    CONSTANT = "constant"  # computed from the configuration
    CACHE = "cache"  # lives across steps
    ACTIVATION = "activation"  # an op; lives in the arena


@dataclass(frozen=True, slots=True)
class Tensor:
    """A named value of a program. Names are unique in a program."""

    name: str
    shape: tuple[Size, ...]
    dtype: DType
    kind: Kind

    def sizes(self, known: dict[str, int]) -> tuple[int, ...]:
        """The shape with its run-time sizes filled in."""
        return tuple(known[size] if isinstance(size, str) else size for size in self.shape)

    def __str__(self) -> str:
        return f"{self.name}[{','.join(map(str, self.shape))}]:{self.dtype}"


@dataclass(frozen=True, slots=True)
class Embedding:
    """out = table[ids]. ids: (tokens,) i32; table: (vocab, hidden); out: (tokens, hidden) X."""

    ids: Tensor
    table: Tensor
    out: Tensor


@dataclass(frozen=True, slots=True)
class RopeAngles:
    """cos and sin of every token's rotation, once a step for all layers that share it.

    angle = position * inv_freq[clamp(length - threshold, 0, variants - 1)], all float32 as in transformers; the length
    is the sequence's at the time the token was computed, so that dynamic scaling is a row of the table.
    positions, lengths: (tokens,) i32; inv_freq: (variants, rotary/2) f32; out: (tokens, 2, rotary/2) f32, cos, sin,
    both times `scale` (YaRN's attention factor).
    """

    positions: Tensor
    lengths: Tensor
    inv_freq: Tensor
    threshold: int
    scale: float
    out: Tensor


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm: out = weight * X(x / sqrt(mean(x^2) + epsilon)) (Zhang and Sennrich 2019); statistics in float32."""

    x: Tensor
    weight: Tensor
    epsilon: float
    out: Tensor


@dataclass(frozen=True, slots=True)
class Linear:
    """out = x @ concat(weights).T + concat(biases). Each weight is a segment of rows with its own element format.

    x: (tokens, in) X; weights: (out_i, in) each; biases: (out_i,) each, or none at all; out: (tokens, sum of out_i) X,
    or f32 for logits.
    """

    x: Tensor
    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]
    out: Tensor


@dataclass(frozen=True, slots=True)
class RopeKV:
    """Rotate q and k, write k and v to the cache, hand on q.

    qkv: (tokens, (heads + 2 kv_heads) * head_dim) X, rows q | k | v; dimension i pairs with i + rotary/2.
    slots: (tokens,) i32, block * block_size + place in it; a negative slot writes nothing.
    cache: (2, blocks, kv_heads, block, head_dim), and where that holds E4M3 codes, scales: (2, blocks, kv_heads, block)
    f32; out: (tokens, heads * head_dim) X.
    """

    qkv: Tensor
    angles: Tensor
    slots: Tensor
    cache: Tensor
    scales: Tensor | None
    heads: int
    kv_heads: int
    head_dim: int
    out: Tensor


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal attention of each sequence's new tokens over its cached ones: softmax(scale q k^T) v.

    q: (tokens, heads * head_dim) X; block_tables: (sequences, max_blocks) i32; query_starts: (sequences + 1,) i32;
    kv_lengths: (sequences,) i32, cached tokens with the new ones. A query at position p sees positions j <= p, and with
    a window only j > p - window. cache, scales: as in RopeKV.
    """

    q: Tensor
    cache: Tensor
    scales: Tensor | None
    block_tables: Tensor
    query_starts: Tensor
    kv_lengths: Tensor
    heads: int
    scale: float
    window: int | None
    out: Tensor


@dataclass(frozen=True, slots=True)
class ActMul:
    """out = X(act(gate)) * up. x: (tokens, 2 width) X, gate then up; `activation`: "silu" | "gelu_tanh" | "gelu"."""

    x: Tensor
    activation: str
    out: Tensor


@dataclass(frozen=True, slots=True)
class Add:
    """out = x + y: the residual stream."""

    x: Tensor
    y: Tensor
    out: Tensor


@dataclass(frozen=True, slots=True)
class SelectRows:
    """out = x[rows]: the positions whose logits are wanted. rows: (rows,) i32; out: (rows, hidden) X."""

    x: Tensor
    rows: Tensor
    out: Tensor


Plain = Embedding | RopeAngles | Norm | Linear | RopeKV | Attention | ActMul | Add | SelectRows


@dataclass(frozen=True, slots=True)
class Fused:
    """Several plain ops in one kernel. Its meaning is theirs, in order, with all their rounding points."""

    kernel: str
    parts: tuple[Plain, ...]

    @property
    def out(self) -> Tensor:
        return self.parts[-1].out


Op = Plain | Fused


def parts(op: Op) -> tuple[Plain, ...]:
    """The plain ops that an op stands for."""
    return op.parts if isinstance(op, Fused) else (op,)


def kernel_stem(op: Op) -> str:
    """The name that the op's kernel, its launch and its tests share, without the dtype."""
    return op.kernel if isinstance(op, Fused) else _STEMS[type(op)]


_STEMS: dict[type, str] = {
    Embedding: "embedding",
    RopeAngles: "rope_angles",
    Norm: "norm",
    Linear: "linear",
    RopeKV: "rope_kv",
    Attention: "attention",
    ActMul: "act_mul",
    Add: "add",
    SelectRows: "select_rows",
}


def reads(op: Op) -> Iterator[Tensor]:
    """Every tensor the op takes from outside itself, in field order."""
    made: set[str] = set()
    for part in parts(op):
        for field in fields(part):
            value = getattr(part, field.name)
            for tensor in value if isinstance(value, tuple) else (value,):
                if isinstance(tensor, Tensor) and field.name != "out" and tensor.name not in made:
                    yield tensor
        made.add(part.out.name)


def writes(op: Op) -> tuple[Tensor, ...]:
    """Every activation the op's parts make; for a fused op that includes those that never leave it."""
    return tuple(part.out for part in parts(op))
