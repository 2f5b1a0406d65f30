"""Linear layers for the kernel tests: their operands, and what each kind of kernel should make of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rvllm.backend import definitions as define
from rvllm.program.dtype import F32
from tests.kernels.device import Array
from tests.kernels.elements import Bits, Element, poison, ulps

KINDS = ("", "_add", "_act_mul", "_f32")  # what follows linear or gemm in a kernel's name
ACTIVATIONS = ("silu", "gelu_tanh", "gelu")

Output = Array  # bits, or float32 of the _f32 kind


@dataclass(frozen=True, slots=True)
class Layer:
    """x (tokens, depth); weight (rows, depth); bias (rows); residual (tokens, rows): bits of the element's format."""

    element: Element
    x: Bits
    weight: Bits
    bias: Bits | None
    residual: Bits

    @property
    def tokens(self) -> int:
        return len(self.x)

    @property
    def rows(self) -> int:
        return len(self.weight)

    @property
    def depth(self) -> int:
        return self.x.shape[1]

    def some(self, first: int, count: int) -> Layer:
        """The same layer for tokens first..first + count - 1."""
        chosen = slice(first, first + count)
        return Layer(self.element, self.x[chosen], self.weight, self.bias, self.residual[chosen])

    def expected(self, kind: str, activation: str = "silu") -> Output:
        """What the definitions say, in the output's format."""
        element, dtype = self.element, F32 if kind == "_f32" else self.element.dtype
        bias = None if self.bias is None else element.decode(self.bias)
        out = define.linear(element.decode(self.x), element.decode(self.weight), bias, 0, dtype)
        if kind == "_f32":
            return out
        if kind == "_add":
            out = define.add(element.decode(self.residual), out, dtype)
        if kind == "_act_mul":
            out = define.act_mul(out, activation, dtype)
        return element.encode(out)

    def exact(self) -> tuple[np.ndarray, np.ndarray]:
        """x W^T + bias in float64, and how far a float sum of it may be off.

        Any order of summation is off by at most depth u sum |x w|, u the unit roundoff (Higham 2002, section 4.2); u is
        2^-23 and not 2^-24 because tensor cores truncate.
        """
        x, weight = self.element.decode(self.x).astype(np.float64), self.element.decode(self.weight).astype(np.float64)
        bias = 0 if self.bias is None else self.element.decode(self.bias)
        return x @ weight.T + bias, (self.depth + 1) * 2.0**-23 * (np.abs(x) @ np.abs(weight).T + np.abs(bias))


def integers(
    element: Element, rng: np.random.Generator, tokens: int, rows: int, depth: int, *, bias: bool = True, most: int = 16
) -> Layer:
    """Integers up to `most`, so small that all orders of summation give the same float, and yet X must round sums."""

    def draw(*shape: int) -> Bits:
        return element.encode(rng.integers(-most, most + 1, shape).astype(np.float32))

    return Layer(element, draw(tokens, depth), draw(rows, depth), draw(rows) if bias else None, draw(tokens, rows))


def normal(
    element: Element,
    rng: np.random.Generator,
    tokens: int,
    rows: int,
    depth: int,
    *,
    bias: bool = True,
    spread: float = 1.0,
) -> Layer:
    """Normal values, the weights so that sums have about the deviation `spread`."""
    weight = element.normal(rng, rows, depth, spread=spread * depth**-0.5)
    drawn = element.normal(rng, rows, spread=spread) if bias else None
    return Layer(element, element.normal(rng, tokens, depth), weight, drawn, element.normal(rng, tokens, rows))


def with_poison(bits: Bits, rows: int = 3) -> Bits:
    """More rows behind, all NaN, that nobody may let into a sum."""
    return np.concatenate([bits, poison(rows, bits.shape[1])])


def blank(kind: str, tokens: int, width: int) -> Output:
    """An output that nobody has written yet: NaN."""
    return np.full((tokens, width), np.nan, dtype=np.float32) if kind == "_f32" else poison(tokens, width)


def untouched(out: Output) -> bool:
    return bool(np.all(np.isnan(out)) if out.dtype == np.float32 else np.all(out == 0xFFFF))


def eighths(layer: Layer) -> Layer:
    """An integer layer (most=4) with weights and bias an eighth: sums are small, so that no activation is flat, and still exact."""
    element, eighth = layer.element, np.float32(0.125)
    bias = None if layer.bias is None else element.encode(element.decode(layer.bias) * eighth)
    return Layer(element, layer.x, element.encode(element.decode(layer.weight) * eighth), bias, layer.residual)


def half_place(element: Element, values: np.ndarray) -> np.ndarray:
    """What rounding to the element's format may be off, for values that do not overflow."""
    if element.name == "bf16":
        return np.abs(values) * 2.0**-8
    return np.maximum(np.abs(values) * 2.0**-11, 2.0**-25)


def gated_alike(out: Output, layer: Layer, activation: str) -> bool:
    """Equal to the definition but for two places, or what cancels in 1 + tanh or 1 + erf of a float (test_act_mul)."""
    element, expected = layer.element, layer.expected("_act_mul", activation)
    assert out.dtype == expected.dtype == np.uint16
    gate, up = np.split(layer.exact()[0], 2, axis=1)
    off = np.abs(element.decode(out) - element.decode(expected))
    return bool(np.all((ulps(out, expected) <= 2) | (off <= np.abs(gate * up) * 2.0**-22)))
