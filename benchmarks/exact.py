"""What a kernel should give, in float64, and how far roundings may take it from there. Knows numpy, and no device.

Arguments are float32, exactly what the 16-bit elements are. Each function gives the largest error of an output as a
share of what is allowed: above 1, or NaN, it is wrong. Allowed is one rounding to bf16 wherever
rvllm/backend/definitions.py has one, and float32 sums in any order. With `rough`, it is eight roundings of the largest
of a token's outputs, as in rvllm/backend/cuda/check.py: another library may add up parts of a sum in bf16.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

ROUNDING = 2.0**-8  # to bf16: half a unit in the last place
SUMS = 2.0**-19  # of the magnitudes of a sum's terms: 32 roundings of float32, since tensor cores truncate
ROUGH = 8 * ROUNDING
STEEPEST = 1.1  # slope of silu


def linear(found: Float32, x: Float32, weight: Float32, *, rough: bool = False) -> float:
    """x W^T rounded once. found (tokens, rows); x (tokens, depth); weight (rows, depth)."""
    exact, off = _product(x, weight)
    return _share(found, exact, ROUNDING * np.abs(exact) + off, rough)


def linear_f32(found: Float32, x: Float32, weight: Float32, *, rough: bool = False) -> float:
    """The same, kept in float32."""
    exact, off = _product(x, weight)
    return _share(found, exact, off, rough)


def linear_add(found: Float32, x: Float32, weight: Float32, addend: Float32) -> float:
    """addend + x W^T: the product is rounded, and so is the sum. addend: as found."""
    exact, off = _product(x, weight)
    off += ROUNDING * np.abs(exact)
    total = addend + exact
    return _share(found, total, off + ROUNDING * (np.abs(total) + off))


def linear_act_mul(found: Float32, x: Float32, weight: Float32, *, rough: bool = False) -> float:
    """silu(gate) * up: both are rounded, and so are silu and product. weight (2 rows, depth), gate's rows then up's."""
    (gate, up), (gate_off, up_off) = (np.split(part, 2, axis=1) for part in _product(x, weight))
    acted = gate / (1 + np.exp(-gate))
    exact = acted * up
    gate_off += ROUNDING * np.abs(gate)
    up_off += ROUNDING * np.abs(up)
    acted_off = STEEPEST * gate_off * (1 + ROUNDING) + (ROUNDING + SUMS) * np.abs(acted) + SUMS * np.abs(gate)
    off = np.abs(acted) * up_off + (np.abs(up) + up_off) * acted_off
    return _share(found, exact, off + ROUNDING * (np.abs(exact) + off), rough)


def norm(found: Float32, x: Float32, weight: Float32, epsilon: float) -> float:
    """RMSNorm, rounded before and after its weight. found, x (tokens, hidden); weight (hidden)."""
    rows = x.astype(np.float64)
    exact = rows / np.sqrt(np.mean(np.square(rows), axis=1, keepdims=True) + epsilon) * weight
    return _share(found, exact, (2 * ROUNDING + ROUNDING**2 + SUMS) * np.abs(exact))


def attention(
    found: Float32, q: Float32, keys: Float32, values: Float32, positions: npt.NDArray[np.int64], scale: float
) -> float:
    """softmax(scale q k^T) v: weights are rounded, and so is the result. A query at position p sees keys up to p.

    found, q (queries, heads, dim); keys, values (n, kv_heads, dim); positions (queries).
    """
    kv_heads, dim = keys.shape[1:]
    grouped = q.astype(np.float64).reshape(len(q), kv_heads, -1, dim).transpose(1, 2, 0, 3)
    kept, mixed = (part.astype(np.float64).transpose(1, 0, 2)[:, None] for part in (keys, values))
    scores = grouped @ kept.swapaxes(-1, -2) * scale
    scores[..., np.arange(len(keys))[None, :] > positions[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    exact, mass = ((weights @ part).transpose(2, 0, 1, 3).reshape(q.shape) for part in (mixed, np.abs(mixed)))
    return _share(found, exact, ROUNDING * np.abs(exact) + (ROUNDING + 2.0**-15) * mass)


def argmax(found: npt.NDArray[Any], logits: Float32) -> float:
    """The place of each row's largest. found (rows); logits (rows, vocabulary)."""
    return 0.0 if np.array_equal(found, logits.argmax(axis=1)) else np.inf


def _product(x: Float32, weight: Float32) -> tuple[Float64, Float64]:
    """x W^T, and how far its float32 sums may be off: far less than the worst order of summation could be."""
    tokens, matrix = x.astype(np.float64), weight.astype(np.float64)
    return tokens @ matrix.T, SUMS * (np.abs(tokens) @ np.abs(matrix).T)


def _share(found: Float32, exact: Float64, allowed: Float64, rough: bool = False) -> float:
    assert found.shape == exact.shape, (found.shape, exact.shape)
    if rough:
        allowed = np.broadcast_to(ROUGH * np.abs(exact).max(axis=1, keepdims=True), exact.shape)
    off = np.abs(found - exact)
    with np.errstate(invalid="ignore", divide="ignore"):
        return float(np.where(off == 0, 0, off / allowed).max())  # NaN stays
