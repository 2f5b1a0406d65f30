"""attention_prefill against attention in float64, and its bits against itself when a prompt is cut in other places.

The bound is rigorous but for the sums: every weight is rounded to X once (or never), and so is the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.kernels.device import Argument, Device
from tests.kernels.elements import Bits, Element, poison
from tests.kernels.paged import NO_BLOCK, Paged, Shape, bound, paged, prefill_items, work_list

STEM = "attention_prefill"
RNG = np.random.default_rng(12)

WIDTHS = (64, 96, 128, 256)
SHAPES = [
    Shape(2, 2, 64),
    Shape(1, 1, 80, block=32),
    Shape(1, 1, 96, block=64),
    Shape(3, 1, 128),
    Shape(1, 1, 256, block=32),
    Shape(4, 2, 8),
    Shape(2, 1, 16, block=64),
    Shape(1, 1, 200),
    Shape(2, 1, 20),  # rows that do not start on 16 bytes
    Shape(1, 1, 10, block=32),
]


def launch_of(stem: str, element: Element, shape: Shape, tier: str) -> tuple[str, int]:
    """The entry and its dynamic shared memory, bytes."""
    width = next(width for width in WIDTHS if shape.head_dim <= width)
    if shape.head_dim % 8:
        return f"{stem}_any_{element.name}", 0
    return f"{stem}_d{width}_{element.name}", 0 if tier == "t70" else 384 * (width + 8)


def run(
    device: Device,
    element: Element,
    tier: str,
    q: Bits,
    held: Paged,
    counts: Sequence[int],
    window: int = 0,
    skip: int = 0,
    grid: int = 2,
) -> Bits:
    """The last `counts` tokens of each sequence are new; rows of the first `skip` sequences are left alone."""
    shape = held.shape
    out = poison(len(q), shape.heads * shape.head_dim)
    items = prefill_items(held.lengths.tolist(), counts, skip)
    work = work_list([items[place] for place in RNG.permutation(len(items))], grid)
    args: list[Argument] = [q, *held.cached, held.tables, work, out, *held.arguments, shape.scale, window]
    stem = held.over(STEM)
    name, shared_bytes = launch_of(stem, element, shape, tier)
    device.run(stem, name, (shape.heads, grid), 128, args, shared_bytes, tier=tier)
    return out


def queries(element: Element, shape: Shape, tokens: int) -> Bits:
    return element.normal(RNG, tokens, shape.heads * shape.head_dim, spread=2.0)


def check(element: Element, q: Bits, held: Paged, counts: Sequence[int], window: int, out: Bits, skip: int = 0) -> None:
    shape, start = held.shape, 0
    for sequence, (count, length) in enumerate(zip(counts, held.lengths.tolist())):
        rows = slice(start, start + count)
        start += count
        if sequence < skip or count == 0:
            continue
        queries = element.decode(q[rows]).reshape(count, shape.heads, shape.head_dim)
        truth, mass = held.attend(sequence, queries, np.arange(length - count, length), window)
        found = element.decode(out[rows]).reshape(truth.shape)
        assert np.all(np.abs(found - truth) <= bound(element, truth, mass, codes=held.scales is not None)), (
            f"sequence {sequence}"
        )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_token_attends_to_those_before_it(device: Device, element: Element, tier: str, shape: Shape) -> None:
    lengths, counts = [1, 17, 70, 66], [1, 17, 5, 3]
    held = paged(RNG, element, shape, lengths)
    q = queries(element, shape, sum(counts))
    check(element, q, held, counts, 0, run(device, element, tier, q, held, counts))


@pytest.mark.parametrize("length", [63, 64, 65, 131])
def test_a_whole_prompt_of_any_length(device: Device, element: Element, tier: str, length: int) -> None:
    shape = Shape(1, 1, 16)
    held = paged(RNG, element, shape, [length])
    q = queries(element, shape, length)
    check(element, q, held, [length], 0, run(device, element, tier, q, held, [length]))


@pytest.mark.parametrize("window", [1, 5, 16, 64, 80, 1000])
def test_a_window_hides_all_but_the_last_positions(device: Device, element: Element, tier: str, window: int) -> None:
    shape, lengths, counts = Shape(1, 1, 16), [70, 170, 200], [70, 70, 3]
    # Even the first new token of a sequence sees nothing before that.
    first = [max(0, length - count + 1 - window) for length, count in zip(lengths, counts)]
    held = paged(RNG, element, shape, lengths, first)
    q = queries(element, shape, sum(counts))
    check(element, q, held, counts, window, run(device, element, tier, q, held, counts, window))


@pytest.mark.parametrize(
    ("shape", "window"), [(Shape(1, 1, 16, block=32), 0), (Shape(1, 1, 64), 40), (Shape(1, 1, 10), 40)], ids=str
)
def test_chunks_of_a_prompt_have_the_bits_of_the_whole(
    device: Device, element: Element, tier: str, shape: Shape, window: int
) -> None:
    length = 100
    held = paged(RNG, element, shape, [length])
    q = queries(element, shape, length)
    whole = run(device, element, tier, q, held, [length], window)
    for begin, end in ((0, 1), (1, 70), (70, 100)):
        part = Paged(shape, np.array([end], dtype=np.int32), held.cache, held.tables, [], [])
        assert np.array_equal(run(device, element, tier, q[begin:end], part, [end - begin], window), whole[begin:end])


@pytest.mark.parametrize("shape", [Shape(2, 1, 16), Shape(1, 1, 256, block=32), Shape(1, 1, 10)], ids=str)
def test_a_block_that_takes_several_items_gives_the_same_bits(
    device: Device, element: Element, tier: str, shape: Shape
) -> None:
    counts = [70, 5, 66]
    held = paged(RNG, element, shape, [70, 35, 98])
    q = queries(element, shape, sum(counts))
    first = run(device, element, tier, q, held, counts, grid=5)
    assert np.array_equal(run(device, element, tier, q, held, counts, grid=1), first)
    assert np.array_equal(run(device, element, tier, q, held, counts, grid=7), first)


def test_sequences_without_items_are_left_alone(device: Device, element: Element, tier: str) -> None:
    shape, lengths, counts = Shape(2, 1, 16), [40, 30, 0, 20], [1, 1, 0, 20]
    held = paged(RNG, element, shape, lengths)
    held.tables[[0, 2]] = NO_BLOCK
    q = queries(element, shape, sum(counts))
    q[0] = 0xFFFF
    out = run(device, element, tier, q, held, counts, skip=1)
    assert np.all(out[0] == 0xFFFF)
    check(element, q, held, counts, 0, out, skip=1)
    assert np.all(run(device, element, tier, q, held, counts, skip=4) == 0xFFFF)


def test_a_key_that_is_no_number_is_not_hidden_from_those_after_it(device: Device, element: Element, tier: str) -> None:
    shape, length, spoilt = Shape(1, 1, 16), 80, 20
    held = paged(RNG, element, shape, [length])
    held.cache[0, held.tables[0, spoilt // 16], :, spoilt % 16] = 0xFFFF
    out = run(device, element, tier, queries(element, shape, length), held, [length])
    found = np.isnan(element.decode(out))
    assert not found[:spoilt].any()
    assert found[spoilt:].all()


# ---- Over codes. What is not read is poison: codes that are NaN, and scales.


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[3], SHAPES[4], SHAPES[5], SHAPES[8]], ids=str)
def test_codes_stand_for_values_with_their_scales(device: Device, element: Element, tier: str, shape: Shape) -> None:
    lengths, counts = [1, 17, 70, 66], [1, 17, 5, 3]
    held = paged(RNG, element, shape, lengths, codes=True)
    q = queries(element, shape, sum(counts))
    check(element, q, held, counts, 0, run(device, element, tier, q, held, counts))


@pytest.mark.parametrize("window", [5, 80])
def test_a_window_hides_codes_and_scales(device: Device, element: Element, tier: str, window: int) -> None:
    shape, lengths, counts = Shape(2, 1, 16), [70, 170, 200], [70, 70, 3]
    first = [max(0, length - count + 1 - window) for length, count in zip(lengths, counts)]
    held = paged(RNG, element, shape, lengths, first, codes=True)
    q = queries(element, shape, sum(counts))
    check(element, q, held, counts, window, run(device, element, tier, q, held, counts, window))


def test_over_codes_chunks_of_a_prompt_have_the_bits_of_the_whole(device: Device, element: Element, tier: str) -> None:
    length = 100
    held = paged(RNG, element, Shape(1, 1, 64, block=32), [length], codes=True)
    q = queries(element, held.shape, length)
    whole = run(device, element, tier, q, held, [length], 40)
    check(element, q, held, [length], 40, whole)
    for begin, end in ((0, 1), (1, 70), (70, 100)):
        part = replace(held, lengths=np.array([end], dtype=np.int32))
        assert np.array_equal(run(device, element, tier, q[begin:end], part, [end - begin], 40), whole[begin:end])


@pytest.mark.parametrize("part", [0, 1])
def test_a_scale_that_is_no_number_is_not_hidden(device: Device, element: Element, tier: str, part: int) -> None:
    held = paged(RNG, element, Shape(1, 1, 16), [80], codes=True)
    assert held.scales is not None
    held.scales[part, held.tables[0, 1], :, 4] = np.nan
    found = np.isnan(element.decode(run(device, element, tier, queries(element, held.shape, 80), held, [80])))
    assert found[20:].all() and (part == 1 or not found[:20].any())
