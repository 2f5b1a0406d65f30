"""Run every test that needs a GPU, and write down what ran where: benchmarks/results/gpu_tests.json.

    python tests/gpu/run.py [pytest's arguments]          RVLLM_TIER=t70 python tests/gpu/run.py

The result is kept by tier, so that a run with a forced tier stands beside the others. Exits as pytest does; with 1 too
where nothing ran. Where pytest-xdist is installed, the kernels' tests, most of whose time is the definitions' on the CPU,
run side by side.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from rvllm.backend.cuda.driver import driver_version  # noqa: E402
from rvllm.backend.cuda.kernels import Gpu  # noqa: E402
from rvllm.cli.machine import commit, nvidia  # noqa: E402
from rvllm.errors import DeviceError  # noqa: E402

# Named, because the others' imports need packages that a machine with a GPU may lack. Whole models count the GPU's free
# memory, and are alone on it.
KERNELS, MODELS = ("kernels", "unit/test_driver.py"), ("gpu",)
RESULTS = ROOT / "benchmarks" / "results" / "gpu_tests.json"


class Counts:
    """A pytest plugin: how each test ended, and the reasons of those that were skipped."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes["error" if report.failed and report.when != "call" else report.outcome] += 1
        if report.skipped and isinstance(report.longrepr, tuple):
            self.skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1


def machine() -> dict[str, Any]:
    """The GPU, its driver and the tier in use. Raises DeviceError where there is none."""
    gpu = Gpu(0, print)
    version = "{}.{}".format(*driver_version())
    return {"device": gpu.gpu.name, "driver": nvidia()["driver"], "cuda": version, "tier": gpu.tier}


def record(facts: dict[str, Any]) -> None:
    """Put a run's facts beside those of other tiers."""
    kept = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    kept[facts["tier"]] = facts
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def run(arguments: Sequence[str], counts: Counts, side_by_side: int) -> int:
    """pytest's exit status, of several runs the first that is not 0; no test in one of them is none."""
    status = int(pytest.ExitCode.NO_TESTS_COLLECTED)
    for places, workers in ((KERNELS, side_by_side), (MODELS, 0)):
        paths = [str(ROOT / "tests" / name) for name in places]
        several = ["-n", str(workers), "-p", "no:benchmark"] if workers else []  # it warns of the others, an error here
        ended = int(pytest.main(["-m", "gpu", "--rootdir", str(ROOT), *several, *paths, *arguments], [counts]))
        if ended not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return ended
        status = min(status, ended)
    return status


def main() -> int:
    try:
        facts = machine()
    except DeviceError as reason:
        print(f"nothing was run: {reason}", file=sys.stderr)
        return 1
    counts = Counts()
    begin_s = time.monotonic()
    workers = min(8, (os.cpu_count() or 1) // 2) if importlib.util.find_spec("xdist") else 0
    code = run(sys.argv[1:], counts, workers)
    facts |= {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "seconds": round(time.monotonic() - begin_s, 1),
        "counts": dict(counts.outcomes),
        "skipped": dict(counts.skipped),
    }
    if counts.outcomes:
        record(facts)
    print(json.dumps(facts))
    return code or int(not counts.outcomes["passed"])


if __name__ == "__main__":
    sys.exit(main())
