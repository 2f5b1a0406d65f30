"""CPU time of a decode step, with a model that takes none: what the engine itself costs a step.

    python benchmarks/engine.py [--batch 1,64,256] [--steps 400]

The model draws a constant token. "follows" is the steady state on a GPU, each step started before the one before is
read; "plans" is a step that is planned anew, as when prompts are read beside; "looks" follows with speculation on and
nothing to guess; "guesses" goes on with 7 guesses of the model's own, all right. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from rvllm.config import Speculation
from rvllm.engine.engine import Engine, Limits
from rvllm.engine.request import Request
from rvllm.program.dtype import F32
from rvllm.program.ops import Kind, Tensor
from rvllm.program.program import CacheGroup, Program, Step
from rvllm.sampling.lookup import Guessing
from rvllm.sampling.params import SamplingParams
from rvllm.sampling.sampler import Sampled, SamplingRow

PROMPT = 512
MOST_GUESSED = 8  # sequences: each has 8 rows then


class NullModel:
    """Draws token 1 for every row, at once, or tokens that never recur."""

    def __init__(self, kind: str) -> None:
        self.runs_ahead, self.guesses = kind != "plans", kind == "guesses"
        output = Tensor("logits", ("rows", 8), F32, Kind.ACTIVATION)
        self.program = Program((), output, {}, (CacheGroup(None, 1, 2, F32, 1),))
        self._tokens = [Sampled(1)] * 4096
        self._rooms: tuple[int, ...] = ()
        self._numbers = iter(range(100, 1 << 30)) if kind == "looks" else None

    def start(
        self, step: Step, rows: Sequence[SamplingRow], *, follows: bool = False, guessing: Guessing | None = None
    ) -> int:
        if guessing is not None:
            self._rooms = guessing.rooms
        return len(rows)

    def finish(self, started: int) -> list[Sampled]:
        if self._numbers is not None:
            return [Sampled(next(self._numbers)) for _ in range(started)]
        return self._tokens[:started]

    def guessed(self, started: int) -> list[list[int]]:
        return [[1] * room for room in self._rooms]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        pass


def microseconds(batch: int, steps: int, kind: str) -> dict[str, float]:
    """Median and worst CPU time of a step in which `batch` sequences decode, prompts of mixed lengths."""
    limits = Limits(
        max_model_len=8192,
        block_size=32,
        blocks=batch * 256,
        max_num_seqs=batch,
        max_num_batched_tokens=max(8192, 2 * batch),
        prefill_chunk=512,
        vocab_limit=8,
        eos_ids=frozenset({0}),
        speculation=Speculation(7) if kind in ("looks", "guesses") else None,
    )
    engine = Engine(NullModel(kind), limits)
    params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=7000)
    for row in range(batch):
        engine.add(Request(str(row), tuple((row + i) % 7 + 1 for i in range(PROMPT + row % 61)), params, row))
    while len(engine.step()) < batch:
        pass
    gc.collect()
    gc.freeze()
    times = []
    for _ in range(steps):
        begin = time.thread_time()
        assert len(engine.step()) >= batch
        times.append(1e6 * (time.thread_time() - begin))
    return {"median_us": round(statistics.median(times), 1), "p99_us": round(sorted(times)[steps * 99 // 100], 1)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", default="1,8,64,256")
    parser.add_argument("--steps", type=int, default=400)
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = []
    for batch in map(int, arguments.batch.split(",")):
        for name in ("follows", "plans", *(("looks", "guesses") if batch <= MOST_GUESSED else ())):
            found = microseconds(batch, arguments.steps, name)
            print(f"N={batch:<4d} {name:8} {found['median_us']:8.1f} us a step, p99 {found['p99_us']:8.1f}")
            results.append({"batch": batch, "kind": name, **found})
    print(json.dumps({"prompt_tokens": PROMPT, "results": results}))


if __name__ == "__main__":
    main()
