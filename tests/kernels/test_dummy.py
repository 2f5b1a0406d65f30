"""dummy against the formula of rvllm.model.dummy, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from rvllm.model.dummy import Recipe, recipe, values_at
from tests.kernels.device import Argument, Device
from tests.kernels.elements import Bits, Element, poison

STEM = "dummy"
SPARE = 9  # elements of poison behind those that are asked for

RECIPES = [
    recipe("model.layers.0.mlp.down_proj.weight", (1536, 8960)),
    recipe("model.layers.11.input_layernorm.weight", (1536,)),
    recipe("model.layers.3.self_attn.q_proj.bias", (1536,)),
    recipe("lm_head.weight", (7, 1)),
]


def run(device: Device, element: Element, made: Recipe, count: int, first: int = 0, blocks: int = 0) -> Bits:
    out = poison(count + SPARE)
    args: list[Argument] = [out, count, first, made.seed, made.centre, made.bits, made.unit]
    device.run(STEM, f"dummy_{element.name}", (blocks or -(-count // 2048),), 256, args)
    assert np.all(out[count:] == 0xFFFF)
    return out[:count]


def expected(element: Element, made: Recipe, count: int, first: int = 0) -> Bits:
    return element.encode(values_at(made, np.uint64(first) + np.arange(count, dtype=np.uint64)))


@pytest.mark.parametrize("made", RECIPES, ids=["matrix", "norm", "bias", "narrow"])
@pytest.mark.parametrize("count", [1, 7, 8, 2049, 5000])
def test_the_bits_are_those_of_the_formula(device: Device, element: Element, made: Recipe, count: int) -> None:
    assert np.array_equal(run(device, element, made, count), expected(element, made, count))


@pytest.mark.parametrize("first", [5, 2**31 - 3, 2**32 - 700, 2**32, 5 * 2**32 + 17, 2**52])
def test_an_index_may_need_more_than_32_bits(device: Device, element: Element, first: int) -> None:
    made = RECIPES[0]
    assert np.array_equal(run(device, element, made, 1500, first), expected(element, made, 1500, first))


def test_few_blocks_make_as_much_as_many(device: Device, element: Element) -> None:
    assert np.array_equal(run(device, element, RECIPES[0], 9001, blocks=2), expected(element, RECIPES[0], 9001))


@pytest.mark.parametrize("skip", [1, 4])
def test_out_may_start_anywhere(device: Device, element: Element, skip: int) -> None:
    made, count, memory = RECIPES[0], 37, device.memory
    for way in memory.runs:
        blank = poison(skip + count + SPARE)
        address = memory.allocate(blank.nbytes)
        memory.write(address, blank.tobytes())
        args = [address + 2 * skip, count, 0, made.seed, made.centre, made.bits, made.unit]
        memory.launch(way, STEM, f"dummy_{element.name}", (1,), 256, args, 0, None)
        got = np.frombuffer(memory.read(address, blank.nbytes), dtype=np.uint16)
        memory.free(address)
        assert np.array_equal(got[skip : skip + count], expected(element, made, count))
        assert np.all(np.delete(got, np.arange(skip, skip + count)) == 0xFFFF)
