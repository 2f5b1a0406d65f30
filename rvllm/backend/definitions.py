"""The meaning of every op, in numpy: whole models run on these, and every kernel is held to them.

Arrays are float32 whatever a program's activation dtype; `dtype` says what each result is rounded to, at the points
where transformers' eager code rounds. Sums are float32. A row's bits do not depend on the rows beside it (`linear`).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from rvllm.program.dtype import DType, Float32, round_to
from rvllm.program.program import Int32

# One float32 panel of a weight that stays in a core's L2 cache while every decode row passes over it.
PANEL_BYTES = 4 << 20
# Rows of one matrix product of prefill tokens: always this many, padded with zeros.
BLOCK_ROWS = 32
# Queries that attend at a time, which bounds the score matrix.
BLOCK_QUERIES = 256


def embedding(ids: Int32, table: Float32, dtype: DType) -> Float32:
    """table[ids]. ids: (tokens,); table: (vocab, hidden) -> (tokens, hidden)."""
    return round_to(table[ids], dtype)


def rope_angles(positions: Int32, lengths: Int32, inv_freq: Float32, threshold: int, scale: float) -> Float32:
    """cos and sin of position * inv_freq[variant], (tokens, 2, rotary/2); a float32 product, as in transformers."""
    variant = np.clip(lengths - threshold, 0, len(inv_freq) - 1)
    angles = positions[:, None].astype(np.float32) * inv_freq[variant]
    return np.stack([np.cos(angles), np.sin(angles)], axis=1) * np.float32(scale)


def norm(x: Float32, weight: Float32, epsilon: float, dtype: DType) -> Float32:
    """RMSNorm of each row: weight * X(x / sqrt(mean(x^2) + epsilon))."""
    mean = np.mean(np.square(x), axis=-1, keepdims=True)
    normed = round_to(x / np.sqrt(mean + np.float32(epsilon)), dtype)
    return round_to(normed * weight, dtype)


def linear(x: Float32, weight: Float32, bias: Float32 | None, decode_rows: int, dtype: DType) -> Float32:
    """x @ weight.T + bias. x: (rows, in); weight: (out, in) contiguous -> (rows, out).

    BLAS may sum in another order when the number of rows differs, so that number is fixed: the first `decode_rows`
    rows are one matrix-vector product each, panel by panel; the others go in blocks of BLOCK_ROWS.
    """
    out = np.empty((len(x), len(weight)), dtype=np.float32)
    _decode_rows(x[:decode_rows], weight, out[:decode_rows])
    for start in range(decode_rows, len(x), BLOCK_ROWS):
        rows = x[start : start + BLOCK_ROWS]
        if len(rows) == BLOCK_ROWS:
            np.matmul(rows, weight.T, out=out[start : start + BLOCK_ROWS])
        else:
            padded = np.zeros((BLOCK_ROWS, x.shape[1]), dtype=np.float32)
            padded[: len(rows)] = rows
            out[start:] = np.matmul(padded, weight.T)[: len(rows)]
    if bias is not None:
        out += bias
    return round_to(out, dtype)


def _decode_rows(x: Float32, weight: Float32, out: Float32) -> None:
    panels = -(-weight.nbytes // PANEL_BYTES)
    edges = [len(weight) * panel // panels for panel in range(panels + 1)]
    for begin, end in zip(edges, edges[1:]):
        panel = weight[begin:end]
        for row in range(len(x)):
            np.dot(panel, x[row], out=out[row, begin:end])


def rope_kv(
    qkv: Float32, angles: Float32, slots: Int32, cache: Float32, heads: int, dtype: DType, cache_dtype: DType
) -> Float32:
    """Rotate q and k, write k and v to the cache's slots in its dtype, return q; shapes as in ops.RopeKV."""
    _, _, kv_heads, block_size, head_dim = cache.shape
    tokens = len(qkv)
    q, k, v = np.split(qkv, [heads * head_dim, (heads + kv_heads) * head_dim], axis=1)
    rotated_q = rotate(q.reshape(tokens, heads, head_dim), angles)
    rotated_k = rotate(k.reshape(tokens, kv_heads, head_dim), angles)
    kept = slots >= 0
    blocks, places = np.divmod(slots[kept], block_size)
    cache[0, blocks, :, places] = round_to(rotated_k, cache_dtype)[kept]
    cache[1, blocks, :, places] = round_to(v.reshape(tokens, kv_heads, head_dim), cache_dtype)[kept]
    return round_to(rotated_q, dtype).reshape(tokens, heads * head_dim)


def rotate(x: Float32, angles: Float32) -> Float32:
    """Rotate each pair (i, i + rotary/2) of every head. x: (tokens, heads, dim); angles: (tokens, 2, rotary/2)."""
    cos, sin = angles[:, None, 0], angles[:, None, 1]
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def attention(
    q: Float32,
    cache: Float32,
    block_tables: Int32,
    query_starts: Int32,
    kv_lengths: Int32,
    heads: int,
    scale: float,
    window: int | None,
    dtype: DType,
) -> Float32:
    """Causal attention over the paged cache, sequence by sequence; shapes as in ops.Attention."""
    out = np.empty_like(q)
    for sequence, kv_length in enumerate(kv_lengths.tolist()):
        begin, end = query_starts[sequence], query_starts[sequence + 1]
        for start in range(begin, end, BLOCK_QUERIES):
            stop = min(start + BLOCK_QUERIES, end)
            seen = kv_length - (end - stop)  # tokens up to the last query of this block
            first = 0 if window is None else max(0, seen - (stop - start) - window + 1)
            keys, values, first = _gather(cache, block_tables[sequence], first, seen)
            out[start:stop] = _attend(q[start:stop], keys, values, first, heads, scale, window, dtype)
    return out


def _gather(cache: Float32, table: Int32, first: int, seen: int) -> tuple[Float32, Float32, int]:
    """Keys and values of positions [first, seen), from the start of first's block: (kv_heads, n, head_dim) each."""
    _, _, kv_heads, block_size, head_dim = cache.shape
    start = first // block_size
    blocks = table[start : -(-seen // block_size)]
    count = seen - start * block_size
    pages = cache[:, blocks].transpose(0, 2, 1, 3, 4).reshape(2, kv_heads, -1, head_dim)[:, :, :count]
    return pages[0], pages[1], start * block_size


def _attend(
    q: Float32,
    keys: Float32,
    values: Float32,
    first: int,
    heads: int,
    scale: float,
    window: int | None,
    dtype: DType,
) -> Float32:
    """Queries at the last positions of `keys`, whose first one is position `first`."""
    queries, kv_heads = len(q), len(keys)
    group, head_dim = heads // kv_heads, keys.shape[-1]
    packed = (
        q.reshape(queries, kv_heads, group, head_dim).transpose(1, 2, 0, 3).reshape(kv_heads, group * queries, head_dim)
    )
    scores = np.matmul(packed, keys.transpose(0, 2, 1)) * np.float32(scale)
    scores = scores.reshape(kv_heads, group, queries, -1)
    if queries > 1 or window is not None:
        scores = np.where(_visible(queries, keys.shape[1], window), scores, np.float32(-np.inf))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = round_to(weights / weights.sum(axis=-1, keepdims=True), dtype)
    mixed = np.matmul(weights.reshape(kv_heads, group * queries, -1), values)
    mixed = mixed.reshape(kv_heads, group, queries, head_dim).transpose(2, 0, 1, 3)
    return round_to(mixed.reshape(queries, heads * head_dim), dtype)


def _visible(queries: int, keys: int, window: int | None) -> npt.NDArray[np.bool_]:
    """(queries, keys): the query of row i is at the key of column keys - queries + i."""
    age = (keys - queries + np.arange(queries))[:, None] - np.arange(keys)[None, :]
    return (age >= 0) if window is None else (age >= 0) & (age < window)


def act_mul(x: Float32, activation: str, dtype: DType) -> Float32:
    """X(act(gate)) * up. x: (tokens, 2 width) -> (tokens, width)."""
    gate, up = np.split(x, 2, axis=1)
    return round_to(round_to(ACTIVATIONS[activation](gate), dtype) * up, dtype)


def silu(x: Float32) -> Float32:
    """x / (1 + exp(-x)), written through tanh so that no exponential overflows."""
    return x * (np.float32(0.5) * np.tanh(np.float32(0.5) * x) + np.float32(0.5))


def gelu_tanh(x: Float32) -> Float32:
    """0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) (Hendrycks and Gimpel 2016)."""
    inner = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x * x * x)
    return np.float32(0.5) * x * (1 + np.tanh(inner))


def gelu(x: Float32) -> Float32:
    """x Phi(x), Phi the normal distribution function; the error function in float64."""
    erf = _ERF(x / np.sqrt(np.float32(2))).astype(np.float64)
    return (0.5 * x * (1 + erf)).astype(np.float32)


_ERF = np.frompyfunc(math.erf, 1, 1)
ACTIVATIONS = {"silu": silu, "gelu_tanh": gelu_tanh, "gelu": gelu}


def add(x: Float32, y: Float32, dtype: DType) -> Float32:
    """x + y, the residual stream."""
    return round_to(x + y, dtype)
