"""The script that runs the GPU tests counts as pytest does, and keeps a result for each tier."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rvllm.errors import DeviceError
from tests.gpu import run


def test_outcomes_are_counted_once_a_test_and_skips_by_reason(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert 0\n"
        "def test_skipped(): pytest.skip('no second GPU')\n"
        "@pytest.fixture\n"
        "def broken(): raise RuntimeError\n"
        "def test_error(broken): pass\n",
        encoding="utf-8",
    )
    counts = run.Counts()
    assert pytest.main(["-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)], [counts]) == 1
    assert counts.outcomes == {"passed": 1, "failed": 1, "skipped": 1, "error": 1}
    assert counts.skipped == {"no second GPU": 1}


@pytest.mark.parametrize(("kernels", "models", "status"), [(0, 0, 0), (0, 5, 0), (5, 5, 5), (1, 0, 1), (0, 2, 2)])
def test_models_run_alone_behind_the_kernels_tests(
    monkeypatch: pytest.MonkeyPatch, kernels: int, models: int, status: int
) -> None:
    given = []

    def main(arguments: list[str], plugins: list[object]) -> int:
        given.append(arguments)
        return kernels if "-n" in arguments else models

    monkeypatch.setattr(pytest, "main", main)
    assert run.run(["-x"], run.Counts(), 4) == status
    assert given[0][-1] == "-x" and str(run.ROOT / "tests" / "kernels") in given[0]
    assert len(given) == (1 if kernels == 1 else 2)
    assert all(str(run.ROOT / "tests" / "gpu") in arguments and "-n" not in arguments for arguments in given[1:])


def test_a_result_of_each_tier_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "RESULTS", tmp_path / "results" / "gpu_tests.json")
    for tier, passed in (("t90a", 1), ("t70", 2), ("t90a", 3)):
        run.record({"tier": tier, "counts": {"passed": passed}})
    kept = json.loads(run.RESULTS.read_text(encoding="utf-8"))
    assert {tier: facts["counts"]["passed"] for tier, facts in kept.items()} == {"t70": 2, "t90a": 3}


def test_a_run_in_which_no_test_began_replaces_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "RESULTS", tmp_path / "gpu_tests.json")
    monkeypatch.setattr(run, "machine", lambda: {"tier": "t90a"})
    run.record({"tier": "t90a", "counts": {"passed": 1}})
    kept = run.RESULTS.read_text(encoding="utf-8")
    monkeypatch.setattr(run, "run", lambda arguments, counts, workers: 3)
    assert run.main() == 3
    assert run.RESULTS.read_text(encoding="utf-8") == kept


def test_without_a_gpu_nothing_is_run_or_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise DeviceError("there is no usable NVIDIA driver")

    monkeypatch.setattr(run, "RESULTS", tmp_path / "gpu_tests.json")
    monkeypatch.setattr(run, "machine", refuse)
    assert run.main() == 1
    assert capsys.readouterr().err == "nothing was run: there is no usable NVIDIA driver\n"
    assert not run.RESULTS.exists()
