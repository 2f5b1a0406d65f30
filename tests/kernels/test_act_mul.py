"""act_mul against its definition and against the formulas in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rvllm.backend import definitions as define
from tests.kernels.device import Device
from tests.kernels.elements import Bits, Element, poison, ulps

STEM = "act_mul"
NAMES = ("silu", "gelu_tanh", "gelu")
RNG = np.random.default_rng(6)


def run(device: Device, element: Element, x: Bits, activation: str, tier: str) -> Bits:
    tokens, width = x.shape[0], x.shape[1] // 2
    out = poison(tokens, width)
    args = [x, out, width, NAMES.index(activation)]
    device.run(STEM, f"act_mul_{element.name}", (tokens, -(-width // 2048)), 256, args, tier=tier)
    return out


def every_number(element: Element) -> Bits:
    """Each finite value of the format, as (16, width), but for those so large that their product with 1 is all there is."""
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    values = element.decode(bits)
    kept = bits[np.isfinite(values) & (np.abs(np.nan_to_num(values)) <= 100)]
    return kept[: len(kept) // 16 * 16].reshape(16, -1)


def truth(activation: str, x: np.ndarray) -> np.ndarray:
    if activation == "silu":
        return x / (1 + np.exp(-x))
    if activation == "gelu":
        return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def lost(product: np.ndarray) -> np.ndarray:
    """What cancels in 1 + tanh or 1 + erf of a float, in the kernel, the definition and Hugging Face's code alike."""
    return np.abs(product) * np.float32(2.0**-23)


@pytest.mark.parametrize("activation", NAMES)
def test_every_number_is_activated_to_one_place(device: Device, element: Element, tier: str, activation: str) -> None:
    """Float arithmetic has 13 or more bits to spare, so at most a tie falls the other way: one place of X."""
    gate = every_number(element)
    one = np.broadcast_to(element.encode(np.ones(1, dtype=np.float32)), gate.shape)
    out = run(device, element, np.ascontiguousarray(np.concatenate([gate, one], axis=1)), activation, tier)
    x = element.decode(gate)
    with np.errstate(over="ignore", under="ignore"):
        exact = truth(activation, x.astype(np.float64)).astype(np.float32)
        defined = define.act_mul(np.concatenate([x, np.ones_like(x)], axis=1), activation, element.dtype)
        for expected in (element.encode(exact), element.encode(defined)):
            assert np.all(
                (ulps(out, expected) <= 1) | (np.abs(element.decode(out) - element.decode(expected)) <= lost(x))
            )


@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize(("tokens", "width"), [(1, 8), (9, 50), (2, 40), (2, 1111), (3, 1536), (1, 4864), (2, 2056)])
def test_gate_and_up_are_paired(
    device: Device, element: Element, tier: str, activation: str, tokens: int, width: int
) -> None:
    x = element.normal(RNG, tokens, 2 * width, spread=2)
    out = run(device, element, x, activation, tier)
    expected = element.encode(define.act_mul(element.decode(x), activation, element.dtype))
    gate, up = np.split(element.decode(x), 2, axis=1)
    # One place before the product with up is up to two after it.
    near = np.abs(element.decode(out) - element.decode(expected)) <= lost(gate * up)
    assert np.all((ulps(out, expected) <= 2) | near)
    assert (out != expected).sum() <= 2 + 0.05 * out.size
