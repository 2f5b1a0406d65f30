"""The CPU backend against transformers' numbers, and its speed: every check must pass before a speed is printed.

    python benchmarks/cpu.py

Logits and greedy tokens of the tiny reference models; greedy tokens of SmolLM2-135M-Instruct on six prompts; a row
alone against the row in a batch; decode and prefill speed. The last line is JSON.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from rvllm import LLM, SamplingParams  # noqa: E402
from rvllm.backend.cpu import CpuModel  # noqa: E402
from rvllm.engine.request import Request, Sequence  # noqa: E402
from rvllm.engine.scheduler import Chunk  # noqa: E402
from rvllm.engine.step import build_step  # noqa: E402
from rvllm.model.files import ModelFiles  # noqa: E402
from rvllm.model.source import open_source, record, weights_for  # noqa: E402
from rvllm.program.dtype import F32  # noqa: E402
from rvllm.program.fuse import ALL_KERNELS, fuse  # noqa: E402

REFERENCE = ROOT / "tests" / "reference"
PROMISED_RELATIVE = 1e-4
BLOCK, BLOCKS, LENGTH = 16, 8, 128


def quiet(message: str) -> None:
    """Warnings about the deliberately messy checkpoint are not this program's news."""


def worst_difference(folder: Path) -> float:
    """Largest difference of any stored logit, relative to the largest logit."""
    source = open_source(ModelFiles(folder.name, folder), warn=quiet)
    program = fuse(record(source, dtype=F32, kv_dtype=F32, max_length=LENGTH), ALL_KERNELS)
    groups = len(program.cache_groups)
    model = CpuModel(program, weights_for(source, program), blocks=(BLOCKS,) * groups, block_size=BLOCK)
    worst = 0.0
    with np.load(folder / "reference.npz") as stored:
        for name in (name for name in stored if name.startswith("prompt_")):
            ids, index = stored[name].tolist(), name.removeprefix("prompt_")
            row = Sequence(Request("r", tuple(ids), SamplingParams(), 0), LENGTH, list(range(BLOCKS)), ids)
            step = build_step([Chunk(row, len(ids))], BLOCK, groups)
            wanted = stored[f"positions_{index}"].astype(np.int32)
            step = type(step)(**{field: getattr(step, field) for field in step.__slots__} | {"rows": wanted})
            expected = stored[f"logits_{index}"]
            worst = max(worst, float(np.abs(model.forward(step) - expected).max() / np.abs(expected).max()))
    return worst


def check_greedy(llm: LLM, samples: list[dict[str, Any]]) -> int:
    """How many samples' greedy ids equal transformers'."""
    equal = 0
    for sample in samples:
        params = SamplingParams(temperature=0, max_tokens=len(sample["output_ids"]), ignore_eos=True)
        equal += list(llm.generate([sample["prompt_ids"]], params)[0].outputs[0].token_ids) == sample["output_ids"]
    return equal


def check_batch(llm: LLM, samples: list[dict[str, Any]]) -> bool:
    """Whether tokens and log-probabilities of all prompts together equal those of each alone, bit for bit."""
    params = SamplingParams(temperature=0, max_tokens=16, logprobs=5)
    prompts = [sample["prompt_ids"] for sample in samples]
    together = [result.outputs for result in llm.generate(prompts, params)]
    return together == [llm.generate([prompt], params)[0].outputs for prompt in prompts]


def speeds(llm: LLM, prompt: list[int], tokens: int, repeats: int = 5) -> tuple[float, float]:
    """Median (decode tokens/s, seconds to the first token)."""
    decode, first = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        times = []
        for _ in llm.stream(prompt, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)):
            times.append(time.perf_counter())
        first.append(times[0] - start)
        decode.append((len(times) - 1) / (times[-1] - times[0]))
    return statistics.median(decode), statistics.median(first)


def main() -> None:
    folders = sorted(path.parent for path in REFERENCE.glob("*/reference.npz"))
    differences = {folder.name: worst_difference(folder) for folder in folders}
    for name, difference in differences.items():
        print(f"{name:32s} logits differ by {difference:.1e} relative")
    samples = json.loads((REFERENCE / "smollm2.json").read_text(encoding="utf-8"))["samples"]
    llm = LLM("smollm2", device="cpu")
    equal, same_bits = check_greedy(llm, samples), check_batch(llm, samples)
    print(f"SmolLM2-135M-Instruct: {equal} of {len(samples)} greedy continuations equal transformers'")
    print(f"a row alone equals the row in a batch: {same_bits}")
    if max(differences.values()) > PROMISED_RELATIVE or equal < len(samples) or not same_bits:
        sys.exit("a check failed: no speed is printed")
    decode, first = speeds(llm, samples[0]["prompt_ids"], 48)
    cores = len(os.sched_getaffinity(0))
    print(f"decode {decode:.1f} tokens/s, {len(samples[0]['prompt_ids'])} tokens in, first after {first:.3f} s")
    result = {
        "cores": cores,
        "machine": platform.machine(),
        "numpy": np.__version__,
        "worst_relative_difference": max(differences.values()),
        "greedy_equal": equal,
        "row_alone_equals_row_in_batch": same_bits,
        "decode_tokens_per_s": round(decode, 2),
        "first_token_s": round(first, 4),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
