"""What a model function calls. Checks shapes as it goes; computes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rvllm.program.dtype import E4M3, F32, I32, DType, Float32
from rvllm.program.ops import (
    ActMul,
    Add,
    Attention,
    Embedding,
    Kind,
    Linear,
    Norm,
    Op,
    RopeAngles,
    RopeKV,
    SelectRows,
    Size,
    Tensor,
)
from rvllm.program.program import CacheGroup, Program


class Recorder:
    """Records ops in call order. Activations are `dtype`; a weight has the format the checkpoint stores it in.

    `formats` names the checkpoint's element format of each weight; `weight_dtype` stands for those it does not name.
    """

    def __init__(self, dtype: DType, kv_dtype: DType, formats: Mapping[str, DType], *, weight_dtype: DType) -> None:
        self.dtype = dtype
        self._kv_dtype = kv_dtype
        self._formats = formats
        self._weight_dtype = weight_dtype
        self._ops: list[Op] = []
        self._constants: dict[str, Float32] = {}
        self._groups: list[CacheGroup] = []
        self._names: set[str] = set()
        self.ids = _input("ids", "tokens")
        self.positions = _input("positions", "tokens")
        self.lengths = _input("lengths", "tokens")
        self.rows = _input("rows", "rows")
        self._query_starts = _input("query_starts", "sequences+1")
        self._kv_lengths = _input("kv_lengths", "sequences")

    def weight(self, name: str, *shape: int) -> Tensor:
        """A checkpoint tensor by its Hugging Face name."""
        return Tensor(name, shape, self._formats.get(name, self._weight_dtype), Kind.WEIGHT)

    def cache(self, layer: int, *, window: int | None, kv_heads: int, head_dim: int) -> tuple[Tensor, int]:
        """The layer's key/value cache and the index of the group it belongs to."""
        for group, known in enumerate(self._groups):
            if (known.window, known.kv_heads, known.head_dim) == (window, kv_heads, head_dim):
                self._groups[group] = CacheGroup(window, kv_heads, head_dim, self._kv_dtype, known.layers + 1)
                break
        else:
            group = len(self._groups)
            self._groups.append(CacheGroup(window, kv_heads, head_dim, self._kv_dtype, 1))
        shape = (2, f"blocks.{group}", kv_heads, "block", head_dim)
        return Tensor(f"cache.{layer}", shape, self._kv_dtype, Kind.CACHE), group

    def embedding(self, table: Tensor) -> Tensor:
        out = self._activation("embedding", "tokens", table.shape[1])
        self._ops.append(Embedding(self.ids, table, out))
        return out

    def rope_angles(self, name: str, inv_freq: Float32, threshold: int, scale: float) -> Tensor:
        constant = Tensor(f"{name}.inv_freq", inv_freq.shape, F32, Kind.CONSTANT)
        self._constants[constant.name] = inv_freq
        out = self._activation(name, "tokens", 2, inv_freq.shape[1], dtype=F32)
        self._ops.append(RopeAngles(self.positions, self.lengths, constant, threshold, scale, out))
        return out

    def norm(self, name: str, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        assert weight.shape == x.shape[1:], (name, x, weight)
        out = self._activation(name, *x.shape)
        self._ops.append(Norm(x, weight, epsilon, out))
        return out

    def linear(
        self,
        name: str,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor] = (),
        *,
        dtype: DType | None = None,
    ) -> Tensor:
        assert all(weight.shape[1] == x.shape[1] for weight in weights), (name, x, weights)
        rows = [_number(weight.shape[0]) for weight in weights]
        assert not biases or [bias.shape for bias in biases] == [(count,) for count in rows], (name, biases)
        out = self._activation(name, x.shape[0], sum(rows), dtype=dtype)
        self._ops.append(Linear(x, tuple(weights), tuple(biases), out))
        return out

    def rope_kv(self, name: str, qkv: Tensor, angles: Tensor, cache: Tensor, group: int, heads: int) -> Tensor:
        kv_heads, head_dim = _number(cache.shape[2]), _number(cache.shape[4])
        assert qkv.shape[1] == (heads + 2 * kv_heads) * head_dim, (name, qkv, heads, cache)
        out = self._activation(name, "tokens", heads * head_dim)
        slots = _input(f"slots.{group}", "tokens")
        self._ops.append(RopeKV(qkv, angles, slots, cache, _scales(cache), heads, kv_heads, head_dim, out))
        return out

    def attention(
        self, name: str, q: Tensor, cache: Tensor, group: int, *, heads: int, scale: float, window: int | None
    ) -> Tensor:
        out = self._activation(name, *q.shape)
        tables = _input(f"block_tables.{group}", "sequences", "max_blocks")
        starts, lengths = self._query_starts, self._kv_lengths
        self._ops.append(Attention(q, cache, _scales(cache), tables, starts, lengths, heads, scale, window, out))
        return out

    def act_mul(self, name: str, x: Tensor, activation: str) -> Tensor:
        width = _number(x.shape[1])
        assert width % 2 == 0, (name, x)
        out = self._activation(name, "tokens", width // 2)
        self._ops.append(ActMul(x, activation, out))
        return out

    def add(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        assert x.shape == y.shape, (name, x, y)
        out = self._activation(name, *x.shape)
        self._ops.append(Add(x, y, out))
        return out

    def select_rows(self, name: str, x: Tensor) -> Tensor:
        out = self._activation(name, "rows", x.shape[1])
        self._ops.append(SelectRows(x, self.rows, out))
        return out

    def finish(self, output: Tensor) -> Program:
        """The program whose result is `output`, (rows, vocab) f32."""
        assert output.shape[0] == "rows" and output.dtype is F32, output
        return Program(tuple(self._ops), output, self._constants, tuple(self._groups))

    def _activation(self, name: str, *shape: Size, dtype: DType | None = None) -> Tensor:
        assert name not in self._names, f"{name} is recorded twice"
        self._names.add(name)
        return Tensor(name, shape, dtype or self.dtype, Kind.ACTIVATION)


def _scales(cache: Tensor) -> Tensor | None:
    """The tensor of a cache's scales, one a row of head_dim codes; None where it holds no codes."""
    if cache.dtype is not E4M3:
        return None
    return Tensor(f"{cache.name}.scales", cache.shape[:-1], F32, Kind.CACHE)


def _input(name: str, *shape: Size) -> Tensor:
    return Tensor(name, shape, I32, Kind.INPUT)


def _number(size: Size) -> int:
    assert isinstance(size, int), size
    return size
