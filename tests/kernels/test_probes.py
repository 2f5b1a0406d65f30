"""Every intrinsic by itself, and the faults that the host's fibers must find. On a GPU: that both mean the same."""

from __future__ import annotations

import copy
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kernels_ptx.build import ROOTS
from rvllm.program.dtype import bf16_to_f32, f32_to_bf16, load
from tests.kernels import shim
from tests.kernels.device import Argument, Device, ShimMemory
from tests.kernels.elements import ELEMENTS, Element, poison, ulps

STEM = "probe"
RNG = np.random.default_rng(3)
UNWRITTEN = -(2**31)


def run(
    device: Device, entry: str, grid: int, block: int, *args: Argument, shared_bytes: int = 0, stem: str = STEM
) -> None:
    device.run(stem, entry, (grid,), block, list(args), shared_bytes)


def blank(*shape: int) -> np.ndarray:
    return np.full(shape, UNWRITTEN, dtype=np.int32)


def test_every_half_widens_and_every_float_rounds_as_numpy_does(device: Device) -> None:
    count = 1 << 16
    bits = RNG.integers(0, 1 << 32, count, dtype=np.uint32)
    bits[: count // 2] = bits[: count // 2] % (48 << 23) + (96 << 23)  # exponents around those of halves
    halfway = np.arange(0, 4096, dtype=np.uint32) << 12  # ties of both formats
    bits[: len(halfway)] = halfway + (np.uint32(0x38000000))
    values = bits.view(np.float32)
    values[-8:] = [0.0, -0.0, math.inf, -math.inf, math.nan, 65519.0, 65520.0, 2.0**-25]
    floats = np.full(count, math.nan, dtype=np.float32)
    halves, bfloats = poison(count), poison(count)
    run(device, "probe_conversions", count // 64, 64, values, floats, halves, bfloats)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = np.arange(count, dtype=np.uint32).astype(np.uint16).view(np.float16).astype(np.float32)
        rounded = values.astype(np.float16).view(np.uint16)
    number = ~np.isnan(values)
    assert np.array_equal(floats, expected, equal_nan=True)
    assert np.array_equal(halves[number], rounded[number])
    assert np.array_equal(bfloats[number], f32_to_bf16(values)[number])
    assert np.all(bfloats[~number] == 0x7FFF)
    assert np.all(halves[~number] == 0x7FFF)


def test_the_functions_are_as_exact_as_they_say(device: Device) -> None:
    values = np.concatenate([RNG.normal(size=1000) * 3, np.linspace(-80, 80, 1048)]).astype(np.float32)
    out = np.full((7, len(values)), math.nan, dtype=np.float32)
    run(device, "probe_functions", len(values) // 64, 64, values, out, len(values))
    wide = values.astype(np.float64)
    truths = (
        np.exp(wide),
        np.tanh(wide),
        np.vectorize(math.erf)(wide),
        np.exp2(wide),
        np.sqrt(np.abs(wide)),
        wide * wide - 1,
    )
    for places, truth, found in zip((2.5, 2.5, 2.5, 2.5, 0.5, 0.5), truths, out):
        off = np.abs(found - truth) / np.spacing(np.abs(truth).astype(np.float32))
        assert off.max() <= places + 1e-3
    assert np.array_equal(out[6], np.rint(values))


def test_lanes_exchange_values_and_halves_of_a_warp_sum_apart(device: Device) -> None:
    values, out = RNG.integers(-99, 99, 32, dtype=np.int32), blank(4, 32)
    run(device, "probe_lanes", 1, 32, values, out)
    lanes = np.arange(32)
    assert np.array_equal(out[0], values[(lanes + 5) % 32])
    assert np.array_equal(out[1], values[lanes ^ 3])
    assert np.all(out[2].view(np.uint32) == sum(1 << int(i) for i in np.flatnonzero(values % 2)))
    assert np.array_equal(out[3], np.repeat([values[:16].sum(), values[16:].sum()], 16))


@pytest.mark.parametrize("threads", [32, 64, 256])
def test_a_block_sums_its_threads_in_one_order(device: Device, threads: int) -> None:
    values, out = RNG.standard_normal((5, threads), dtype=np.float32), np.full(5, math.nan, dtype=np.float32)
    run(device, "probe_block_sum", 5, threads, values, out)
    expected = [
        tree(np.append([tree(warp) for warp in row.reshape(-1, 32)], np.zeros(32 - threads // 32))) for row in values
    ]
    assert np.array_equal(out, np.array(expected, dtype=np.float32))


def tree(lanes: np.ndarray) -> np.float32:
    """The sum of 32 floats, pairs 16, 8, 4, 2 and 1 apart."""
    lanes = lanes.astype(np.float32)
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    return lanes[0]


def test_shared_memory_and_barriers_carry_values_between_warps(device: Device) -> None:
    values, out = RNG.integers(-99, 99, (3, 256), dtype=np.int32), blank(3, 256)
    run(device, "probe_reverse", 3, 256, values, out, 1, shared_bytes=1024)
    assert np.array_equal(out, values[:, ::-1])
    rounds, sums = RNG.integers(-99, 99, (5, 256), dtype=np.int32), blank(256)
    run(device, "probe_rounds", 1, 256, rounds, sums, 5, 1)
    assert np.array_equal(sums, np.roll(rounds, -33, axis=1).sum(axis=0))


def test_numbered_barriers_pass_a_buffer_to_and_fro(device: Device) -> None:
    values, out = RNG.integers(-99, 99, (6, 32), dtype=np.int32), blank(3, 32)
    run(device, "probe_numbered_barriers", 1, 128, values, out, 6)
    assert np.array_equal(out, np.tile(values.sum(axis=0), (3, 1)))


def test_the_last_block_to_arrive_sees_what_all_have_left(device: Device) -> None:
    counters, tickets, parts, out = (np.zeros(n, dtype=np.uint32) for n in (4, 1, 7, 1))
    _atomics_alone(device, counters, tickets, parts, out)
    assert counters[0] == 7 * 64
    assert counters[1] == 7 * 64 - 1
    assert counters[3] == 1
    assert out[0] == sum(block * 64 + 1 for block in range(7))


def _atomics_alone(device: Device, *arrays: np.ndarray) -> None:
    """Who wins a compare-and-swap may differ from run to run, so only one run is made."""

    once = copy.copy(device.memory)
    once.runs = once.runs[-1:]
    Device(once).run(STEM, "probe_atomics", (7,), 64, list(arrays))


def test_a_flag_that_is_released_after_a_value_publishes_it(device: Device) -> None:
    flag, value, out = (np.zeros(1, dtype=np.uint32) for _ in range(3))
    run(device, "probe_flag", 1, 64, flag, value, out)
    assert out[0] == 7


def test_vectors_of_words_are_copied_whole(device: Device) -> None:
    values, out = RNG.integers(0, 1 << 32, 12, dtype=np.uint32), np.zeros(12, dtype=np.uint32)
    run(device, "probe_words", 1, 1, values, out)
    assert np.array_equal(out[[0, 1, *range(4, 12)]], values[[0, 1, *range(4, 12)]])
    assert not out[2:4].any()


def small_integers(element: Element, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    values = RNG.integers(-9, 10, shape).astype(np.float32)
    return element.encode(values), values


def test_four_8x8x4_products_are_exact_on_integers(device: Device) -> None:
    half = ELEMENTS[0]
    (a, left), (b, right) = small_integers(half, 4, 8, 4), small_integers(half, 4, 4, 8)
    d = RNG.integers(-9, 10, (4, 8, 8)).astype(np.float32)
    expected = d + left @ right
    run(device, "probe_mma_884", 1, 32, a, b, d)
    assert np.array_equal(d, expected)


@pytest.mark.parametrize(
    ("stem", "depth", "element"),
    [("probe_matrices", 8, ELEMENTS[0]), ("probe_async", 8, ELEMENTS[1]), *(("probe_async", 16, e) for e in ELEMENTS)],
)
def test_matrix_products_are_exact_on_integers(device: Device, stem: str, depth: int, element: Element) -> None:
    (a, left), (b, right) = small_integers(element, 16, depth), small_integers(element, 8, depth)
    d = RNG.integers(-9, 10, (16, 8)).astype(np.float32)
    expected = d + left @ right.T
    run(device, f"probe_mma_168{depth}_{element.name}", 1, 32, a, b, d, stem=stem)
    assert np.array_equal(d, expected)


def test_matrices_are_loaded_as_fragments_and_transposed(device: Device) -> None:
    matrices = RNG.integers(0, 1 << 16, (4, 8, 8), dtype=np.uint16)
    out = np.zeros((16, 32), dtype=np.uint32)
    run(device, "probe_load_matrices", 1, 32, matrices, out, shared_bytes=512, stem="probe_matrices")
    straight = matrices.reshape(4, 32, 2).view(np.uint32).reshape(4, 32)  # lane 4 r + c: row r, columns 2 c and 2 c + 1
    turned = np.ascontiguousarray(matrices.transpose(0, 2, 1)).reshape(4, 32, 2).view(np.uint32).reshape(4, 32)
    assert np.array_equal(out, np.concatenate([straight, turned, straight[:2], turned[:2], turned]))


@pytest.mark.parametrize("valid", [16, 4, 0])
def test_asynchronous_copies_arrive_and_pad_with_zeros(device: Device, valid: int) -> None:
    values, out = RNG.integers(1, 1 << 32, (5, 128), dtype=np.uint32), np.zeros((5, 128), dtype=np.uint32)
    run(device, "probe_copies", 1, 32, values, out, 5, valid, 1, shared_bytes=1024, stem="probe_async")
    kept = values.view(np.uint8).reshape(-1, 16).copy()
    kept[:, valid:] = 0
    assert np.array_equal(out.view(np.uint8).reshape(-1, 16), kept)


def test_the_copy_engine_brings_bytes_stage_by_stage(device: Device) -> None:
    values, out = RNG.integers(1, 1 << 32, (5, 128), dtype=np.uint32), np.zeros((5, 128), dtype=np.uint32)
    run(device, "probe_copy_bytes", 1, 32, values, out, 5, 1, shared_bytes=1024, stem="probe_bulk")
    assert np.array_equal(out, values)


@pytest.mark.parametrize(("of_8", "of_4"), [(8, 4), (0, 0), (4, 4), (8, 0)])
def test_small_copies_arrive_and_pad_with_zeros(device: Device, of_8: int, of_4: int) -> None:
    values, out = RNG.integers(1, 1 << 32, 96, dtype=np.uint32), np.zeros(96, dtype=np.uint32)
    run(device, "probe_few_copies", 1, 32, values, out, of_8, of_4, shared_bytes=384, stem="probe_async")
    expected = values.copy()
    expected[:64].view(np.uint8).reshape(-1, 8)[:, of_8:] = 0
    expected[64:].view(np.uint8).reshape(-1, 4)[:, of_4:] = 0
    assert np.array_equal(out, expected)


def test_every_code_expands_to_an_element_that_is_an_exact_part_of_it(device: Device) -> None:
    halves, bfloats = np.zeros(128, dtype=np.uint32), np.zeros(128, dtype=np.uint32)
    run(device, "probe_expanded", 4, 32, halves, bfloats, stem="probe_async")
    expected = load(np.arange(256, dtype=np.uint8)) / 256
    expected[[0x7F, 0xFF]] = 1.875, -1.875  # not NaN: that is their scales' part
    assert np.array_equal(halves.view(np.float16).astype(np.float32), expected)
    assert np.array_equal(bf16_to_f32(bfloats.view(np.uint16)), expected)


# ---- Faults, on the host alone


@pytest.fixture(scope="module")
def host() -> Device:
    return Device(ShimMemory())


def test_a_missing_barrier_before_a_read_is_seen(host: Device) -> None:
    values, out = RNG.integers(-99, 99, (3, 256), dtype=np.int32), blank(3, 256)
    with pytest.raises(AssertionError, match="differs between"):
        run(host, "probe_reverse", 3, 256, values, out, 0, shared_bytes=1024)


def test_a_missing_barrier_after_a_read_is_seen(host: Device) -> None:
    values, out = RNG.integers(-99, 99, (5, 256), dtype=np.int32), blank(256)
    with pytest.raises(AssertionError, match="differs between"):
        run(host, "probe_rounds", 1, 256, values, out, 5, 0)


def test_a_missing_wait_for_copies_reads_poison(host: Device) -> None:
    values, out = RNG.integers(1, 1 << 31, (2, 128), dtype=np.uint32), np.zeros((2, 128), dtype=np.uint32)
    late = copy.copy(host.memory)
    late.runs = ("round robin",)
    run(Device(late), "probe_copies", 1, 32, values, out, 2, 16, 0, shared_bytes=1024, stem="probe_async")
    assert np.all(out == 0xFFFFFFFF)
    with pytest.raises(AssertionError, match="differs between"):  # where they happen at once, nothing is missed
        run(host, "probe_copies", 1, 32, values, out, 2, 16, 0, shared_bytes=1024, stem="probe_async")


def test_a_missing_wait_for_the_copy_engine_is_an_error() -> None:
    values, out = RNG.integers(1, 1 << 31, (2, 128), dtype=np.uint32), np.zeros((2, 128), dtype=np.uint32)
    with pytest.raises(shim.LaunchFailed, match="ended before 2 boxes had come"):
        shim.launch("probe_bulk", "probe_copy_bytes", (1,), 32, [values.ctypes.data, out.ctypes.data, 2, 0], 1024)


@pytest.mark.parametrize("schedule", shim.SCHEDULES)
@pytest.mark.parametrize(
    ("entry", "block", "message"),
    [
        ("probe_deadlock", 64, r"deadlock in block \(0, 0, 0\): thread 0 waits for a barrier"),
        ("probe_mixed_operations", 32, "but other lanes of the warp are at (shuffle|lanes_where)"),
    ],
)
def test_what_would_hang_a_gpu_is_an_error(entry: str, block: int, message: str, schedule: str) -> None:
    out = blank(64)
    with pytest.raises(shim.LaunchFailed, match=message):
        shim.launch(STEM, entry, (1,), block, [out.ctypes.data], schedule=schedule)


def test_a_misaligned_vector_is_an_error() -> None:
    values, out = blank(8), blank(1)
    with pytest.raises(shim.LaunchFailed, match=r"16 bytes at .*not aligned"):
        shim.launch(STEM, "probe_misaligned", (1,), 1, [values.ctypes.data, out.ctypes.data])


def test_writing_behind_shared_memory_is_an_error() -> None:
    out = blank(1)
    with pytest.raises(shim.LaunchFailed, match="byte 100 of 100 bytes of shared memory was written"):
        shim.launch(STEM, "probe_overrun", (1,), 1, [out.ctypes.data, 100, 0], 100)


def test_a_thread_that_spins_for_ever_is_an_error() -> None:
    flag = np.zeros(1, dtype=np.uint32)
    with pytest.raises(shim.LaunchFailed, match="thread 0 waits for memory"):
        shim.launch(STEM, "probe_spin", (1,), 1, [flag.ctypes.data])


def test_writing_beside_an_array_is_an_error(host: Device) -> None:
    with pytest.raises(AssertionError, match="memory beside an array was written"):
        run(host, "probe_words", 1, 1, np.zeros(12, dtype=np.uint32), np.zeros(11, dtype=np.uint32))


def test_arguments_are_checked_against_the_signature() -> None:
    with pytest.raises(AssertionError, match="takes 2 arguments"):
        shim.launch(STEM, "probe_lanes", (1,), 32, [0])
    with pytest.raises(AssertionError, match="does not fit"):
        shim.launch(STEM, "probe_overrun", (1,), 1, [0, 1 << 31, 0])
    with pytest.raises(AssertionError, match="blocks of up to 64 threads"):
        shim.launch(STEM, "probe_flag", (1,), 96, [0, 0, 0])


def test_bits_are_counted_apart() -> None:
    one = ELEMENTS[1].encode(np.array([1.0, -1.0, 0.0], dtype=np.float32))
    other = ELEMENTS[1].encode(np.array([1 + 2**-7, -1 - 2**-6, -0.0], dtype=np.float32))
    assert ulps(one, other).tolist() == [1, 2, 0]


@pytest.mark.parametrize("stem", [path.stem for root in ROOTS for path in sorted((root / "src").glob("*.cu"))])
def test_tiers_that_share_a_library_have_one_program_on_the_host(stem: str) -> None:
    for tier in shim.tiers_of(stem):
        shared = shim.host_tier(stem, tier)
        assert shared == tier or shim.preprocessed(stem, shared) == shim.preprocessed(stem, tier)


def test_of_those_that_load_a_source_at_once_one_compiles_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, compile_library = [], shim._compile
    monkeypatch.setattr(shim, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(shim, "_compile", lambda *given: (compiled.append(given), compile_library(*given)))
    with ThreadPoolExecutor(3) as pool:
        loaded = list(pool.map(lambda _: shim.load.__wrapped__("probe_matrices", "t75"), range(3)))
    assert len({library._name for library in loaded}) == len(compiled) == 1
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} == {".so", ".o", ".lock"}
