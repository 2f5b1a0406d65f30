"""Rotary position tables for every kind of scaling we do. Knows the formulas; not who asks.

All arithmetic that transformers does in float32 is float32 here too: at long positions a float64 table would differ
from the numbers the models were trained and checked with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rvllm.program.dtype import Float32


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How positions beyond the trained length are handled.

    `kind`: "default" | "linear" | "dynamic" | "llama3" | "yarn".
    """

    kind: str = "default"
    factor: float = 1.0
    original_length: int = 0  # tokens; the trained context
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # yarn: multiplies cos and sin
    truncate: bool = True  # yarn: whole correction dimensions
    frequency_factors: tuple[float, ...] = ()  # a GGUF's precomputed divisors (llama3), one a pair


@dataclass(frozen=True, slots=True)
class RopeTable:
    """inv_freq: (variants, rotary/2) f32; a token of sequence length n uses row clamp(n - threshold, 0, variants-1)."""

    inv_freq: Float32
    threshold: int
    scale: float


def rope_table(theta: float, rotary_dim: int, scaling: RopeScaling, max_length: int) -> RopeTable:
    """The table for a context of `max_length` tokens. Formulas: transformers' modeling_rope_utils."""
    base: Float32 = _inv_freq(theta, rotary_dim)
    if scaling.frequency_factors:
        base = np.divide(base, np.array(scaling.frequency_factors, dtype=np.float32))
    if scaling.kind == "linear":
        base = base / np.float32(scaling.factor)
    elif scaling.kind == "llama3":
        base = _llama3(base, scaling)
    elif scaling.kind == "yarn":
        base = _yarn(theta, rotary_dim, scaling)
    elif scaling.kind == "dynamic":
        return _dynamic(theta, rotary_dim, scaling, max_length)
    return RopeTable(base[None, :], 0, scaling.attention_factor)


def _inv_freq(theta: float, rotary_dim: int) -> Float32:
    """theta^(-2i/d) for each pair i, float32 (Su et al. 2021)."""
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    return (np.float32(1.0) / np.power(np.float32(theta), exponents)).astype(np.float32)


def _llama3(base: Float32, scaling: RopeScaling) -> Float32:
    """Llama 3.1: long wavelengths are divided by the factor, short ones kept, those between blended."""
    wavelength = 2 * math.pi / base
    blend = (scaling.original_length / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - blend) * base / scaling.factor + blend * base
    scaled = np.where(wavelength > scaling.original_length / scaling.low_freq_factor, base / scaling.factor, base)
    between = (wavelength <= scaling.original_length / scaling.low_freq_factor) & (
        wavelength >= scaling.original_length / scaling.high_freq_factor
    )
    return np.where(between, blended, scaled).astype(np.float32)


def _yarn(theta: float, rotary_dim: int, scaling: RopeScaling) -> Float32:
    """YaRN (Peng et al. 2023, eq. 21-23): interpolate low frequencies, keep high ones, a linear ramp between."""

    def correction_dim(rotations: float) -> float:
        length = scaling.original_length / (rotations * 2 * math.pi)
        return rotary_dim * math.log(length) / (2 * math.log(theta))

    low, high = correction_dim(scaling.beta_fast), correction_dim(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    span = high - low if high != low else 0.001
    ramp = np.clip((np.arange(rotary_dim // 2, dtype=np.float32) - low) / span, 0, 1)
    kept = _inv_freq(theta, rotary_dim)
    interpolated = kept / np.float32(scaling.factor)
    return (interpolated * ramp + kept * (1 - ramp)).astype(np.float32)


def _dynamic(theta: float, rotary_dim: int, scaling: RopeScaling, max_length: int) -> RopeTable:
    """Dynamic NTK: a base of its own for every length beyond the trained one; cached keys keep theirs."""
    trained = scaling.original_length
    lengths = np.arange(trained, max(max_length, trained) + 1)
    growth = scaling.factor * lengths / trained - (scaling.factor - 1)
    bases = theta * growth ** (rotary_dim / (rotary_dim - 2))
    rows = np.stack([_inv_freq(base, rotary_dim) for base in bases])
    return RopeTable(rows, trained, scaling.attention_factor)
