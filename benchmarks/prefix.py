"""Time to the first token of a prompt whose beginning another has left in the cache, against one that begins alone.

    python benchmarks/prefix.py [benchmarks/shapes/qwen2.5-7b] [--prefix 4096] [--suffix 32] [--repeats 5]

Dummy weights, the engine called directly. Each repeat has a prefix of its own: a first prompt with it, a second one
with the same prefix and another end, and that second one again once the cache has been emptied. Its first token must be
the same both times, or as likely but for roundings, and the whole prefix must have been found; else no figure is
printed. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from rvllm.bench.runs import Ids, Workload, run
from rvllm.config import EngineConfig
from rvllm.engine.engine import Engine
from rvllm.engine.load import load_engine
from rvllm.engine.request import TokenEvent
from rvllm.model.files import locate
from rvllm.model.source import open_source

NEAR = 0.05  # of log-probabilities of one token, whose prompt was read in steps of other sizes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shape", nargs="?", default="benchmarks/shapes/qwen2.5-7b")
    parser.add_argument("--prefix", type=int, default=4096)
    parser.add_argument("--suffix", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    length = given.prefix + given.suffix + 2
    config = EngineConfig(
        model=given.shape,
        load_format="dummy",
        device=given.device,
        max_model_len=length,
        max_num_seqs=4,
        kv_cache_memory_bytes=4 << 30,
    )
    source = open_source(locate(given.shape, offline=True, progress=None), load_format="dummy", warn=print)
    vocab = source.config.vocab_size
    engine = load_engine(source, config, vocab_limit=vocab, eos_ids=frozenset(), progress=None, warn=print)
    workload = Workload(vocab, 0)

    rounds = [ask(engine, workload, given.prefix, given.suffix) for _ in range(given.repeats + 1)][
        1:
    ]  # graphs are there then
    cold, warm = (statistics.median(one[place] for one in rounds) for place in (0, 1))
    shares = [hit / miss for miss, hit in rounds]
    share = statistics.median(shares)
    print(f"first token after {1e3 * cold:.2f} ms, with the prefix in the cache {1e3 * warm:.2f} ms: {share:.3f}")
    print(json.dumps({"shape": given.shape, "prefix": given.prefix, "cold_s": cold, "warm_s": warm, "shares": shares}))


def first_token(engine: Engine, workload: Workload, prompt: Ids) -> tuple[float, TokenEvent]:
    done = run(engine, workload.requests([prompt], 1, logprobs=0))
    return done.seconds, next(event for events in done.events for event in events)


def ask(engine: Engine, workload: Workload, prefix_tokens: int, suffix_tokens: int) -> tuple[float, float]:
    """(seconds without the prefix in the cache, seconds with it) to the first token of one prompt."""
    (prefix,) = workload.prompts([prefix_tokens])
    one, other = workload.prompts([suffix_tokens] * 2, prefix)
    engine.forget_prefixes()
    first_token(engine, workload, one)
    before = engine.load.cached_tokens
    hit_s, hit = first_token(engine, workload, other)
    found = engine.load.cached_tokens - before
    engine.forget_prefixes()
    miss_s, miss = first_token(engine, workload, other)
    near = abs((hit.logprob or 0) - (miss.logprob or 0)) < NEAR
    if found != prefix_tokens // 32 * 32 or not (hit.token_id == miss.token_id or near):
        raise SystemExit(f"{found} tokens were found, and the first tokens are {hit} and {miss}: nothing is printed")
    return miss_s, hit_s


if __name__ == "__main__":
    main()
