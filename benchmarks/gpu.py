"""Decode speed of the direct engine on a GPU, dummy weights at real sizes, beside the memory bus's limit.

    python benchmarks/gpu.py [qwen2.5-1.5b qwen2.5-7b] [--tokens 128] [--batch 1,8,32,64]

First the ops of a two-layer model of the same widths are held to their definitions, then graph and eager decoding have
to give the same tokens; only then is a speed printed. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from rvllm.backend.cuda.check import Checker  # noqa: E402
from rvllm.backend.cuda.kernels import Gpu  # noqa: E402
from rvllm.backend.cuda.lower import FUSIONS  # noqa: E402
from rvllm.backend.cuda.model import CudaModel, StepLimits  # noqa: E402
from rvllm.config import EngineConfig  # noqa: E402
from rvllm.engine.engine import Engine  # noqa: E402
from rvllm.engine.load import load_engine  # noqa: E402
from rvllm.engine.request import Request, Sequence  # noqa: E402
from rvllm.engine.scheduler import Chunk  # noqa: E402
from rvllm.engine.step import build_step  # noqa: E402
from rvllm.model.files import ModelFiles  # noqa: E402
from rvllm.model.source import Source, open_source, record, weights_for  # noqa: E402
from rvllm.program.cost import DEVICES, Load, cost  # noqa: E402
from rvllm.program.dtype import BF16  # noqa: E402
from rvllm.program.fuse import fuse  # noqa: E402
from rvllm.sampling.params import SamplingParams  # noqa: E402

QWEN: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "eos_token_id": 0,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-1.5b": QWEN
    | {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "num_hidden_layers": 28,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "qwen2.5-7b": QWEN
    | {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "num_hidden_layers": 28,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
}
PROMPT, CONTEXT = 32, 4096


def source_of(config: dict[str, Any]) -> Source:
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return open_source(ModelFiles("dummy", folder), load_format="dummy", warn=print)


def check_ops(shape: str, gpu: Gpu) -> float:
    """The worst op of a two-layer model of these widths, in roundings; exits where one is wrong."""
    source = source_of(SHAPES[shape] | {"num_hidden_layers": 2, "vocab_size": 4096})
    program = fuse(record(source, dtype=BF16, kv_dtype=BF16, max_length=CONTEXT), FUSIONS)
    checkpoint = weights_for(source, program)
    limits = StepLimits(512, 64, 16)
    model = CudaModel(program, checkpoint, gpu, limits=limits, blocks=(64,), block_size=32, vocab_limit=4096)
    checker = Checker(model, checkpoint)
    rng = np.random.default_rng(1)
    found = []
    rows = []
    for place, length in enumerate((1, 40, 200)):
        request = Request(str(place), tuple(rng.integers(1, 4096, length).tolist()), SamplingParams(), 0)
        rows.append(Sequence(request, 512, [*range(16 * place, 16 * place + 16)], list(request.prompt_ids)))
    for _ in range(3):
        chunks = sorted((Chunk(row, row.pending) for row in rows), key=lambda chunk: chunk.tokens > 1)
        found += checker.check(build_step(chunks, 32, len(program.cache_groups)))
        for chunk in chunks:
            chunk.sequence.computed += chunk.tokens
            chunk.sequence.token_ids.append(int(rng.integers(1, 4096)))
    wrong = [difference for difference in found if difference.wrong]
    if wrong:
        sys.exit(f"an op is wrong, no speed is printed: {wrong[:5]}")
    return max(difference.roundings for difference in found)


def decode(engine: Engine, batch: int, tokens: int) -> tuple[list[list[int]], float]:
    """(tokens of each request, decode tokens/s after all prompts are read)."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    rng = np.random.default_rng(2)
    for row in range(batch):
        engine.add(Request(str(row), tuple(rng.integers(1, 100000, PROMPT).tolist()), params, 0))
    drawn: dict[str, list[int]] = {str(row): [] for row in range(batch)}
    times = []
    while engine.busy:
        events = engine.step()
        times.append((time.perf_counter(), len(events)))
        for event in events:
            drawn[event.request_id].append(event.token_id)
    steady = [place for place, (_, count) in enumerate(times) if count == batch]
    seconds = times[steady[-1]][0] - times[steady[0]][0]
    return list(drawn.values()), batch * (len(steady) - 1) / seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", default="1,8,32,64")
    arguments = parser.parse_args()
    gpu = Gpu(0, print)
    results = []
    for shape in arguments.shapes:
        worst = check_ops(shape, gpu)
        source = source_of(SHAPES[shape])
        config = EngineConfig(max_model_len=CONTEXT, device="cuda", kv_cache_memory_bytes=16 << 30)
        vocab = source.config.vocab_size
        start = time.perf_counter()

        def engine(eager: bool, config: EngineConfig = config, source: Source = source, vocab: int = vocab) -> Engine:
            config = replace(config, enforce_eager=eager)
            return load_engine(source, config, vocab_limit=vocab, eos_ids=frozenset(), progress=None, warn=print)

        graphs = engine(False)
        print(f"{shape}: worst op {worst:.1f} roundings, ready in {time.perf_counter() - start:.1f} s")
        batches = [int(batch) for batch in arguments.batch.split(",")]
        # Measured first: another model in the same memory slows both by some per cent.
        speeds = {batch: [decode(graphs, batch, arguments.tokens)[1] for _ in range(3)] for batch in batches}
        if decode(graphs, 4, 16)[0] != decode(engine(True), 4, 16)[0]:
            sys.exit("graph and eager decoding differ, no speed is printed")
        program = fuse(record(source, dtype=BF16, kv_dtype=BF16, max_length=CONTEXT), FUSIONS)
        for batch in batches:
            load = Load(batch, batch, PROMPT + arguments.tokens // 2)
            limit = batch / sum(DEVICES["h200"].seconds(c.nbytes, c.flops) for c in cost(program, load))
            speed = statistics.median(speeds[batch])
            print(f"  N={batch:<4d} {speed:9.1f} tok/s  {speed / limit:5.1%} of the bus limit {limit:,.0f}")
            results.append({"shape": shape, "batch": batch, "tokens_per_s": round(speed, 1), "limit": round(limit, 1)})
    print(json.dumps({"gpu": gpu.gpu.name, "tier": gpu.tier, "results": results}))


if __name__ == "__main__":
    main()
