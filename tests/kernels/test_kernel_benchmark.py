"""benchmarks/kernels.py on the host: its chains run and are right, and what is wrong has no figure."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import exact, kernels
from benchmarks.kernel_chains import Case, Normals
from rvllm.backend import definitions as define
from rvllm.program.dtype import BF16, F32, round_to
from tests.kernels.host_device import HostDevice

NORMALS = Normals(100_003)
RNG = np.random.default_rng(17)
QUICK = ["--repeats", "1", "--rotate-mb", "0", "--launches", "2"]


class Timed(HostDevice):
    """A stand-in that has a name and a clock."""

    gpu = SimpleNamespace(name="NVIDIA H200")

    def seconds(self, work: Callable[[], None]) -> float:
        begin_s = time.perf_counter()
        work()
        return time.perf_counter() - begin_s


def run(tier: str, *arguments: str, broken: str | None = None) -> None:
    device = Timed(tier)
    device.break_entry = broken
    kernels.main([*arguments, *QUICK], device, NORMALS)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["linear", "linear_add", "--shape", "64x40", "--m", "1,40"], ["linear 64x40 M=1", "linear 64x40 M=40"]),
        (["linear_act_mul", "linear_f32", "--shape", "64x24", "--m", "8"], ["linear_act_mul 64x24 M=8"]),
        (["norm", "--shape", "72", "--m", "3"], ["norm 72 M=3"]),
        (["sample", "--shape", "300", "--m", "2"], ["sample 300 M=2"]),
        (["attention_decode", "--shape", "4x2x64", "--m", "2x70,1x150"], ["attention_decode 4x2x64 2x70"]),
        (["attention_prefill", "--shape", "2x1x64", "--m", "2x20,1x9x40"], ["attention_prefill 2x1x64 1x9x40"]),
    ],
    ids=lambda given: given[0].split()[0],
)
def test_what_is_right_has_a_figure_and_a_last_line_of_json(
    arguments: list[str], names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run("t80", *arguments)
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    assert len(found["cases"]) == len(lines) - 2
    assert all(case["us"] > 0 and case["error_share"] <= 1 and case["share"] is None for case in found["cases"])
    for name in names:
        assert any(line.startswith(name) and " us " in line for line in lines), name


@pytest.mark.parametrize(
    ("broken", "arguments"),
    [
        ("linear_bf16_m8", ["linear", "--shape", "64x40"]),
        ("linear_act_mul_bf16_m8", ["linear_act_mul", "--shape", "64x40"]),
        ("norm_bf16", ["norm", "--shape", "72"]),
        ("attention_decode_d64_bf16", ["attention_decode", "--shape", "4x2x64"]),
    ],
    ids=str,
)
def test_a_wrong_output_has_no_figure(broken: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    size = "2x20" if arguments[0].startswith("attention") else "2"
    with pytest.raises(SystemExit, match=f"{arguments[0]} .* times what is allowed"):
        run("t80", *arguments, "--m", size, broken=broken)
    assert capsys.readouterr().out == "NVIDIA H200, t80\n"


def test_every_op_of_a_chain_has_data_of_its_own_and_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    linear = exact.linear

    def look(found: np.ndarray, x: np.ndarray, weight: np.ndarray) -> float:
        seen.append(weight)
        return linear(found, x, weight)

    monkeypatch.setattr(exact, "linear", look)
    monkeypatch.setattr(Case, "sets", lambda case, rotated_bytes: 3)
    device = Timed("t80")
    kernels.main(["linear", "--shape", "64x40", "--m", "2", *QUICK], device, NORMALS)
    assert len(seen) == 3 and not np.array_equal(seen[0], seen[1]) and not np.array_equal(seen[1], seen[2])
    assert len(device.launched) >= 3 and device.captured == 1


def test_without_a_peer_ours_is_told_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    run("t80", "norm", "--shape", "72", "--m", "1", "--peer", "--peer-python", "/bin/false")
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith("no peer: the peer's process ended with 1")
    assert "ratio" not in json.loads(lines[-1])["cases"][0]


def test_arguments_become_cases() -> None:
    assert kernels.cases_of("linear", "64x40,8x16", "1,8") == [
        Case("linear", shape, size) for shape in ((64, 40), (8, 16)) for size in (1, 8)
    ]
    assert kernels.cases_of("attention_decode", None, "128x512") == [
        Case("attention_decode", (28, 4, 128), 128, 1, 512)
    ]
    assert kernels.cases_of("attention_prefill", None, "4x64,1x64x256") == [
        Case("attention_prefill", (28, 4, 128), 4, 64, 64),
        Case("attention_prefill", (28, 4, 128), 1, 64, 256),
    ]


@pytest.mark.parametrize(
    ("stem", "shape", "sizes"),
    [
        ("linear", "64", None),
        ("linear", "64x", None),
        ("linear", "64x40", "1x8"),
        ("linear", "64x40", "0"),
        ("attention_decode", "28x4x128", "8"),
        ("attention_decode", "28x3x128", None),
        ("attention_prefill", None, "1x1"),
        ("attention_prefill", None, "1x64x32"),
    ],
)
def test_what_is_no_case_is_refused(stem: str, shape: str | None, sizes: str | None) -> None:
    with pytest.raises(SystemExit, match=r"numbers joined by x|evenly|prompt"):
        kernels.cases_of(stem, shape, sizes)


@pytest.mark.parametrize("stem", kernels.DEFAULTS)
def test_by_default_data_do_not_fit_in_l2_and_no_graph_is_long(stem: str) -> None:
    for case in kernels.cases_of(stem, None, None):
        sets = case.sets(300 << 20)
        assert stem in ("norm", "sample") or sets * case.set_bytes >= 2 * kernels.L2_BYTES, case
        turns = kernels.turns_of(case, sets, 20)
        assert 20 <= turns <= 200 and turns % sets == 0, case


def normal(*shape: int, spread: float = 1.0) -> np.ndarray:
    return round_to(RNG.standard_normal(shape, dtype=np.float32) * np.float32(spread), BF16)


def test_definitions_are_within_what_is_allowed_and_little_else_is() -> None:
    """An element moved by 3 roundings to bf16 is out, wherever it is (float32: by 2^-12)."""
    x, weight, addend = normal(5, 256, spread=2.0**-4), normal(12, 256), normal(5, 12)
    product = define.linear(x, weight, None, 0, BF16)
    acted = define.act_mul(product, "silu", BF16)
    row, scale = normal(256), normal(5, 256, spread=4)
    queries, pages = normal(5, 8, 16, spread=2), normal(2, 100, 2, 16)
    positions = np.arange(95, 100)
    tables, lengths = np.arange(4, dtype=np.int32)[None], np.array([100], np.int32)
    cache = np.zeros((2, 4, 2, 32, 16), dtype=np.float32)
    places = np.arange(100)
    cache[:, places // 32, :, places % 32] = pages.transpose(1, 0, 2, 3)
    attended = define.attention(
        queries.reshape(5, 128), cache, tables, np.array([0, 5]), lengths, 8, 0.25, None, BF16
    ).reshape(5, 8, 16)
    checks: list[tuple[np.ndarray, Callable[[np.ndarray], float], float]] = [
        (product, lambda found: exact.linear(found, x, weight), 3 * 2.0**-8),
        (define.linear(x, weight, None, 0, F32), lambda found: exact.linear_f32(found, x, weight), 2.0**-12),
        (define.add(addend, product, BF16), lambda found: exact.linear_add(found, x, weight, addend), 2.0**-4),
        (acted, lambda found: exact.linear_act_mul(found, x, weight), 2.0**-4),
        (define.norm(scale, row, 1e-5, BF16), lambda found: exact.norm(found, scale, row, 1e-5), 3 * 2.0**-8),
        (attended, lambda f: exact.attention(f, queries, *pages, positions, 0.25), 2.0**-2),
    ]
    for right, check, share in checks:
        assert check(right) <= 1
        place = np.unravel_index(np.abs(right).argmax(), right.shape)
        for wrong in (right[place] * (1 + share), np.nan, -right[place]):
            spoilt = right.copy()
            spoilt[place] = wrong
            assert not check(spoilt) <= 1
    assert exact.argmax(product.argmax(axis=1), product) == 0
    assert exact.argmax(product.argmin(axis=1), product) == np.inf
