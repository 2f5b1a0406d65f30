"""What holds for every test: processes side by side share the cores."""

from __future__ import annotations

import os

# Threads of a BLAS that find no core spin for one: three times the time. Numpy reads this when it is imported.
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    os.environ.setdefault("OPENBLAS_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(workers))))
