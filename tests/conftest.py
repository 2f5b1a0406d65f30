"""What holds for every test: processes side by side share the cores, and Ctrl-C reaches those that tests start."""

from __future__ import annotations

import os
import signal

import pytest

# Threads of a BLAS that find no core spin for one: three times the time. Numpy reads this when it is imported.
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    os.environ.setdefault("OPENBLAS_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(workers))))

# A shell's background job ignores it, and so would its children: tests that interrupt them would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONG = ("test_sanitizers.py", "test_soak_serve.py", "test_zipapp.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of the longest tests come first: one that begins last would leave the other processes idle."""
    items.sort(key=lambda item: item.path.name not in LONG)
