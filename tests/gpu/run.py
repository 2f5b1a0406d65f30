"""Run every test that needs a GPU, and write down what ran where: benchmarks/results/gpu_tests.json.

    python tests/gpu/run.py [pytest's arguments]          RVLLM_TIER=t70 python tests/gpu/run.py

The result is kept by tier, so that a run with a forced tier stands beside the others. Exits as pytest does; with 1 too
where nothing ran.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
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

# Named, because the others' imports need packages that a machine with a GPU may lack.
PLACES = ("gpu", "kernels", "unit/test_driver.py")
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


def main() -> int:
    try:
        facts = machine()
    except DeviceError as reason:
        print(f"nothing was run: {reason}", file=sys.stderr)
        return 1
    counts = Counts()
    begin_s = time.monotonic()
    places = [str(ROOT / "tests" / name) for name in PLACES]
    code = int(pytest.main(["-m", "gpu", "--rootdir", str(ROOT), *places, *sys.argv[1:]], [counts]))
    facts |= {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "seconds": round(time.monotonic() - begin_s, 1),
        "counts": dict(counts.outcomes),
        "skipped": dict(counts.skipped),
    }
    record(facts)
    print(json.dumps(facts))
    return code or int(not counts.outcomes["passed"])


if __name__ == "__main__":
    sys.exit(main())
