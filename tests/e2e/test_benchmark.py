"""`rvllm benchmark` as a process: figures on stdout, talk on stderr, and JSON last."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fixtures.commands import assert_refused, rvllm

pytestmark = pytest.mark.slow

CASE = Path(__file__).parents[1] / "reference" / "llama-gqa-tied-llama3-rope"
QUICK = ("--n", "1,2", "--context", "8", "--output-len", "2,38", "--repeat", "3", "--max-model-len", "48")


def test_a_tiny_model_is_measured_in_seconds(tmp_path: Path) -> None:
    done = rvllm("benchmark", CASE, *QUICK, "--json", "all.json", cwd=tmp_path)
    assert done.returncode == 0, done
    *_, last = done.stdout.splitlines()
    assert json.loads(last) == json.loads((tmp_path / "all.json").read_text(encoding="utf-8"))
    assert len(json.loads(last)["results"]) == 2
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == [
        "note"
    ]  # on the CPU; no bar without a terminal


def test_a_chart_that_cannot_be_drawn_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    assert_refused(rvllm("benchmark", CASE, *QUICK, "--plot", tmp_path / "chart.pdf"), ".png or .svg")
