"""The meaning of every op, in numpy: whole models run on these, and every kernel is held to them.

Arrays are float32 whatever a program's activation dtype; `dtype` says what each result is rounded to, at the points
where transformers' eager code rounds. Sums are float32. A decoding row's bits depend on no row beside it (`linear`).
Caches alone hold elements of their own format (`program.dtype.STORED`), since they must not take more memory.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from rvllm.program.dtype import BF16, E4M3_LARGEST, F32, DType, Float32, Stored, f32_to_e4m3, load, round_to, store
from rvllm.program.program import Int32

# One float32 panel of a weight that stays in a core's L2 cache while every decode row passes over it.
PANEL_BYTES = 4 << 20
# Rows of one matrix product of prefill tokens: always this many, padded with zeros.
BLOCK_ROWS = 16
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
    root: Float32 = np.sqrt(mean + np.float32(epsilon))
    normed = round_to(x / root, dtype)
    return round_to(normed * weight, dtype)


def linear(x: Float32, weight: Float32, bias: Float32 | None, decode_rows: int, dtype: DType) -> Float32:
    """x @ weight.T + bias. x: (rows, in); weight: (out, in) contiguous -> (rows, out).

    BLAS may sum in another order when the number of rows differs, so that number is fixed: the first `decode_rows`
    rows are one matrix-vector product each, panel by panel; the others go in blocks of BLOCK_ROWS. These are the
    columns of the product: BLAS's kernels take so many side by side, and what lies so has the same order of summation.
    """
    out = np.empty((len(x), len(weight)), dtype=np.float32)
    _decode_rows(x[:decode_rows], weight, out[:decode_rows])
    for start in range(decode_rows, len(x), BLOCK_ROWS):
        rows = x[start : start + BLOCK_ROWS]
        count = len(rows)
        if count < BLOCK_ROWS:
            rows = np.concatenate([rows, np.zeros((BLOCK_ROWS - count, x.shape[1]), dtype=np.float32)])
        out[start : start + count] = np.matmul(weight, rows.T).T[:count]
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
    qkv: Float32,
    angles: Float32,
    slots: Int32,
    cache: Stored,
    heads: int,
    dtype: DType,
    scales: Float32 | None = None,
) -> Float32:
    """Rotate q and k, write k and v to the cache's slots in its dtype, return q; shapes as in ops.RopeKV.

    With `scales` the cache's elements are codes (`encode`). What is rotated is rounded once, to the cache's format.
    """
    _, _, kv_heads, block_size, head_dim = cache.shape
    tokens = len(qkv)
    q, k, v = np.split(qkv, [heads * head_dim, (heads + kv_heads) * head_dim], axis=1)
    rotated_q = rotate(q.reshape(tokens, heads, head_dim), angles)
    rotated_k = rotate(k.reshape(tokens, kv_heads, head_dim), angles)
    kept = slots >= 0
    blocks, places = np.divmod(slots[kept], block_size)
    for kind, rows in enumerate((rotated_k, v.reshape(tokens, kv_heads, head_dim))):
        if scales is None:
            cache[kind, blocks, :, places] = store(rows[kept], cache.dtype)
        else:
            cache[kind, blocks, :, places], scales[kind, blocks, :, places] = encode(rows[kept])
    return round_to(rotated_q, dtype).reshape(tokens, heads * head_dim)


def encode(rows: Float32) -> tuple[Stored, Float32]:
    """E4M3 codes of rows (..., head_dim) and a scale a row, (...): a row stands for codes * scale.

    scale = float32(largest |x| / 448); code = E4M3(float32(x / scale)), 0 where the scale is 0. Where a row holds
    anything that is no finite number, scale and codes are NaN: no score of such a key is a number.
    """
    largest: Float32 = np.abs(rows).max(axis=-1)
    scales: Float32 = np.where(np.isfinite(largest), largest / E4M3_LARGEST, np.float32(np.nan))
    with np.errstate(invalid="ignore", divide="ignore"):
        codes = f32_to_e4m3(rows / scales[..., None])
    codes[scales == 0] = 0
    return codes, scales


def rotate(x: Float32, angles: Float32) -> Float32:
    """Rotate each pair (i, i + rotary/2) of every head. x: (tokens, heads, dim); angles: (tokens, 2, rotary/2)."""
    cos, sin = angles[:, None, 0], angles[:, None, 1]
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def attention(
    q: Float32,
    cache: Stored,
    block_tables: Int32,
    query_starts: Int32,
    kv_lengths: Int32,
    heads: int,
    scale: float,
    window: int | None,
    dtype: DType,
    scales: Float32 | None = None,
    at_once: int = BLOCK_QUERIES,
) -> Float32:
    """Causal attention over the paged cache, sequence by sequence; shapes as in ops.Attention.

    Weights are rounded to `dtype` before they meet the values, and so is the result. With `scales` the cache holds
    codes: a score is multiplied by its key's scale, and a weight by its value's before that rounding, which is to bf16
    then, for half's exponents do not reach down to such products (but with float32 there is none, as ever).
    at_once: queries of a sequence that attend together, which is part of the bits; with 1, they follow from a query's
    own position.
    """
    out = np.empty_like(q)
    for sequence, kv_length in enumerate(kv_lengths.tolist()):
        begin, end = query_starts[sequence], query_starts[sequence + 1]
        for start in range(begin, end, at_once):
            stop = min(start + at_once, end)
            seen = kv_length - (end - stop)  # tokens up to the last query of this block
            first = 0 if window is None else max(0, seen - (stop - start) - window + 1)
            pages = load(_gather(cache, block_tables[sequence], first, seen))
            units = None if scales is None else _gather(scales, block_tables[sequence], first, seen)
            out[start:stop] = _attend(q[start:stop], pages, units, heads, scale, window, dtype)
    return out


def _gather(cache: Stored, table: Int32, first: int, seen: int) -> Stored:
    """What the cache has of positions [first, seen), from the start of first's block: (2, kv_heads, n, ...)."""
    kv_heads, block_size = cache.shape[2:4]
    start = first // block_size
    blocks = table[start : -(-seen // block_size)]
    count = seen - start * block_size
    return cache[:, blocks].swapaxes(1, 2).reshape(2, kv_heads, -1, *cache.shape[4:])[:, :, :count]


def _attend(
    q: Float32,
    pages: Float32,
    units: Float32 | None,
    heads: int,
    scale: float,
    window: int | None,
    dtype: DType,
) -> Float32:
    """Queries at the last of the n positions of pages (2, kv_heads, n, head_dim), units (2, kv_heads, n)."""
    keys, values = pages
    queries, kv_heads = len(q), len(keys)
    group, head_dim = heads // kv_heads, keys.shape[-1]
    packed = (
        q.reshape(queries, kv_heads, group, head_dim).transpose(1, 2, 0, 3).reshape(kv_heads, group * queries, head_dim)
    )
    scores = np.matmul(packed, keys.transpose(0, 2, 1)) * np.float32(scale)
    if units is not None:
        scores *= units[0][:, None]
    scores = scores.reshape(kv_heads, group, queries, -1)
    if queries > 1 or window is not None:
        scores = np.where(_visible(queries, keys.shape[1], window), scores, np.float32(-np.inf))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    if units is not None:
        weights *= units[1][:, None, None]
    weights = round_to(weights, dtype if units is None or dtype is F32 else BF16)
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
