"""Tokens a second with and without guessed tokens: a text that is edited, and one that is made up.

    python benchmarks/speculation.py [--model smollm2] [--device auto] [--tokens 256] [--repeats 5] [--batch 1]
                                     [--speculative-config JSON]

One engine, the same requests by turns with guesses and without (SamplingParams.speculate); the median of the ratio of
neighbours counts, so that what drifts meets both. The editing prompt is drawn greedily; the other at temperature 1,
where a small model does not repeat itself. Both ways must draw the same tokens, or no figure is printed. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from rvllm import LLM, SamplingParams

CONFIG = '{"method": "ngram", "num_speculative_tokens": 7}'
CODE = """def summarize(values):
    count = 0
    largest = None
    for value in values:
        if value is None:
            continue
        count = count + value
        if largest is None or value > largest:
            largest = value
    return {"sum": count, "largest": largest}

def report(names, values):
    result = summarize(values)
    for name, value in zip(names, values):
        print(f"{name}: {value}")
    print("sum", result["sum"])
    print("largest", result["largest"])
    return result
"""
EDIT = f"Rewrite this code with the variable name `count` changed to `total`, and change nothing else:\n\n{CODE}"
STORY = "Tell a long story about a lighthouse keeper who finds a letter in a bottle."


def timed(llm: LLM, prompt: list[int], batch: int, params: dict[str, Any]) -> tuple[float, list[tuple[int, ...]]]:
    """(seconds, tokens of each) of `batch` requests; the prompt is in the prefix cache, so reading it costs little."""
    begin_s = time.perf_counter()
    results = llm.generate([prompt] * batch, SamplingParams(**params))
    return time.perf_counter() - begin_s, [result.outputs[0].token_ids for result in results]


def measure(llm: LLM, name: str, text: str, heat: float, arguments: argparse.Namespace) -> dict[str, Any]:
    """Both ways by turns, after a turn that does not count. Raises SystemExit where their tokens differ."""
    prompt = llm.encode_chat([{"role": "user", "content": text}])
    params = {"temperature": heat, "seed": 1, "max_tokens": arguments.tokens, "ignore_eos": True}
    seconds: dict[bool, list[float]] = {True: [], False: []}
    tokens: dict[bool, list[tuple[int, ...]]] = {}
    before = llm.load
    for turn in range(arguments.repeats + 1):
        for speculate in (False, True):
            took_s, tokens[speculate] = timed(llm, prompt, arguments.batch, {**params, "speculate": speculate})
            if turn:
                seconds[speculate].append(took_s)
        if tokens[True] != tokens[False]:
            raise SystemExit(f"{name}: the tokens with guesses are not those without; no figure is printed")
    after, count = llm.load, arguments.batch * arguments.tokens
    return {
        "text": name,
        "prompt_tokens": len(prompt),
        "tokens_per_s": {
            "without": count / statistics.median(seconds[False]),
            "with": count / statistics.median(seconds[True]),
        },
        "speedup": statistics.median(off / on for off, on in zip(seconds[False], seconds[True])),
        "draft_tokens": after.draft_tokens - before.draft_tokens,
        "accepted_tokens": after.accepted_tokens - before.accepted_tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--speculative-config", default=CONFIG)
    arguments = parser.parse_args()
    config = json.loads(arguments.speculative_config)
    llm = LLM(arguments.model, device=arguments.device, max_model_len=2048, speculative_config=config)
    results = []
    for name, text, heat in (("edit", EDIT, 0.0), ("story", STORY, 1.0)):
        found = measure(llm, name, text, heat, arguments)
        speeds = found["tokens_per_s"]
        print(
            f"{name:6} {speeds['without']:9.1f} tokens/s without, {speeds['with']:9.1f} with: {found['speedup']:.2f}x, "
            f"{found['accepted_tokens']:,} of {found['draft_tokens']:,} guesses right"
        )
        results.append(found)
    print(json.dumps({"model": arguments.model, "batch": arguments.batch, "config": config, "results": results}))


if __name__ == "__main__":
    main()
