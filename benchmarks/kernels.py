"""Single kernels in chains, beside the GPU's limit and, in the same run, beside what another library has for them.

    python benchmarks/kernels.py linear --shape 3584x18944 --m 1,8,32
    python benchmarks/kernels.py attention_decode --m 1x8192,128x512 --peer --peer-path FOLDER

Stems: linear, linear_add, linear_act_mul, linear_f32 (the head), norm, sample (greedy): --shape says depth x rows (of
gate and up each), hidden, or vocabulary, --m tokens. attention_decode, attention_prefill: --shape says heads x key
heads x head size; --m sequences x context, or sequences x new tokens [x context]. Several of each by commas; by default
those of Qwen2.5-7B. Sizes are not padded: give those that a step is padded to.

A chain's ops go the engine's way to launches, and have weights or cached tokens of their own, --rotate-mb together, so
that they come from memory; one graph holds 20 to some 100 of them, and the median of --repeats replays counts, by CUDA
events. Data are normal numbers, not zeros. Some of every output is held to float64 (exact.py): where one is wrong its
figure is not printed, and instead of a last line there is exit code 1.

us: of an op. The limit: what its bytes or its operations take at the least on the card (rvllm/program/cost.py); none
where the chain's data may stay in L2, or for an unknown card. --peer: torch's products and argmax, vLLM's element-wise
kernels and FlashAttention-3 where they can be imported, timed alike in a process of their own before ours
(kernel_peer.py), and held to float64 too; the ratio is our time over theirs. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.kernel_chains import Case, Chains, Memory, Normals, max_of
from benchmarks.ops import microseconds
from rvllm.cli.machine import commit
from rvllm.program.cost import DEVICES, card_named

ROOT = Path(__file__).parents[1]
TOKENS = "1,8,32,64,128,256"
DEFAULTS = {  # shapes and sizes
    "linear": ("3584x4608", TOKENS),
    "linear_add": ("3584x3584,18944x3584", TOKENS),
    "linear_act_mul": ("3584x18944", TOKENS),
    "linear_f32": ("3584x152064", TOKENS),
    "attention_decode": ("28x4x128", "1x512,1x8192,8x2048,32x512,64x512,128x512,128x2048,256x512"),
    "attention_prefill": ("28x4x128", "1x512,1x2048,1x8192,4x2048,1x512x8192"),
    "norm": ("3584", "1,8,64,256,2048,8192"),
    "sample": ("152064", "1,8,64,256"),
}
DIMENSIONS = {"attention_decode": 3, "attention_prefill": 3, "norm": 1, "sample": 1}  # of a shape; of a product's: 2
L2_BYTES = 60e6  # at most: what takes less than twice as much is not said to come from memory
MOST_LAUNCHES, GRAPH_S = 100, 5e-3


def parsed(text: str, dimensions: Sequence[int]) -> list[tuple[int, ...]]:
    """Numbers joined by x, several of them joined by commas. Raises SystemExit for anything else."""
    try:
        found = [tuple(int(number) for number in one.split("x")) for one in text.split(",")]
    except ValueError:
        found = []
    if not found or any(len(one) not in dimensions or min(one) < 1 for one in found):
        counts = " or ".join(map(str, dimensions))
        raise SystemExit(f"{text!r} should be {counts} numbers joined by x, or several of these by commas")
    return found


def cases_of(stem: str, shapes: str | None, sizes: str | None) -> list[Case]:
    """Every shape with every size. Raises SystemExit for what is none."""
    attends = stem.startswith("attention")
    counts = (2, 3) if stem == "attention_prefill" else (2,) if attends else (1,)
    return [
        _case(stem, shape, size)
        for shape in parsed(shapes or DEFAULTS[stem][0], (DIMENSIONS.get(stem, 2),))
        for size in parsed(sizes or DEFAULTS[stem][1], counts)
    ]


def _case(stem: str, shape: tuple[int, ...], size: tuple[int, ...]) -> Case:
    if stem.startswith("attention") and shape[0] % shape[1]:
        raise SystemExit(f"{shape[0]} heads cannot share {shape[1]} key heads evenly")
    if stem == "attention_decode":
        return Case(stem, shape, size[0], 1, size[1])
    if stem == "attention_prefill":
        if size[1] < 2 or size[-1] < size[1]:
            raise SystemExit(f"{size}: a prompt brings two tokens or more, and its context has them in it")
        return Case(stem, shape, size[0], size[1], size[-1])
    return Case(stem, shape, size[0])


def turns_of(case: Case, sets: int, least: int) -> int:
    """Launches of a graph: `least` or more, up to 100 of those that are short, and every set as often as the others."""
    op_s = max(3e-6, DEVICES["h200"].seconds(*case.cost()))
    wanted = max(least, min(MOST_LAUNCHES, int(GRAPH_S / op_s)))
    return -(-wanted // sets) * sets


class WrongOutput(Exception):
    """What is measured is wrong, and so has no speed."""


def measured(chains: Chains, device: Any, case: Case, sets: int, turns: int, repeats: int) -> dict[str, float]:
    """Microseconds of an op in a chain, and the largest error as a share of what is allowed. Raises WrongOutput."""
    memory = Memory(device)
    try:
        chain = chains.chain(case, sets, memory)
        launches = [launch for turn in range(turns) for launch in chain.launches[turn % sets]]
        taken_us = microseconds(device, launches, repeats) / turns
        wrong = max_of(chain.wrong(index) for index in range(sets))
    finally:
        memory.free()
    if not wrong <= 1:  # NaN is wrong
        raise WrongOutput(f"{named(case)}: an output is off by {wrong:.3g} times what is allowed")
    return {"us": taken_us, "error_share": wrong}


def named(case: Case) -> str:
    size = f"M={case.tokens}"
    if case.stem == "attention_decode":
        size = f"{case.sequences}x{case.context}"
    elif case.stem == "attention_prefill":
        size = f"{case.sequences}x{case.new}x{case.context}"
    return f"{case.stem} {'x'.join(map(str, case.shape))} {size}"


def peers(todo: Sequence[dict[str, Any]], python: str, path: str | None, repeats: int) -> list[dict[str, Any]]:
    """What kernel_peer.py finds for each case, one that has an "error" where there is no figure."""
    environment = dict(os.environ)
    if path:
        environment["PYTHONPATH"] = os.pathsep.join(str(Path(one).resolve()) for one in path.split(os.pathsep))
    given = json.dumps({"cases": todo, "repeats": repeats})
    command = [python, "-m", "benchmarks.kernel_peer"]
    done = subprocess.run(
        command, input=given, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment, check=False
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    missing = {"error": f"the peer's process ended with {done.returncode}"}
    return found + [missing] * (len(todo) - len(found))


def told(case: Case, ours: dict[str, float], peer: dict[str, Any] | None, card: str, rotated: int) -> dict[str, Any]:
    """Print one line and give it as JSON."""
    nbytes, flops = case.cost()
    taken_s, known = ours["us"] * 1e-6, card_named(card)
    speeds = {"gb_per_s": nbytes / taken_s / 1e9, "tflop_per_s": flops / taken_s / 1e12}
    from_memory = rotated >= 2 * L2_BYTES
    share = known.seconds(nbytes, flops) / taken_s if known is not None and from_memory else None
    line = f"{named(case):42} {ours['us']:9.2f} us {speeds['gb_per_s']:6,.0f} GB/s {speeds['tflop_per_s']:5.1f} TFLOP/s"
    line += f" {share:6.1%} of the limit" if share is not None else f" {'' if from_memory else 'from L2':>19}"
    result: dict[str, Any] = {**asdict(case), **ours, **speeds}
    result |= {"share": share, "rotated_bytes": rotated, "peer": peer}
    if peer is not None and "us" in peer:
        result["ratio"] = ours["us"] / peer["us"]
        line += f"  {result['ratio']:5.2f} x {peer['us']:.2f} us of {peer['how']}"
    elif peer is not None:
        line += f"  no peer: {peer['error']}"
    print(line, flush=True)
    return result


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stem", nargs="+", choices=tuple(DEFAULTS))
    parser.add_argument("--shape")
    parser.add_argument("--m")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--rotate-mb", type=int, default=300)
    parser.add_argument("--launches", type=int, default=20, help="of a graph, at the least")
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--peer-path", help="PYTHONPATH of the peer's process: a folder with torch and vLLM")
    parser.add_argument("--peer-python", default=sys.executable, help="the peer's interpreter")
    return parser


def main(arguments: Sequence[str] | None = None, device: Any = None, normals: Normals | None = None) -> None:
    """device: None opens the GPU, after the peer has left it."""
    given = options().parse_args(arguments)
    cases = [case for stem in given.stem for case in cases_of(stem, given.shape, given.m)]
    sets = [case.sets(given.rotate_mb << 20) for case in cases]
    turns = [turns_of(case, count, given.launches) for case, count in zip(cases, sets)]
    found: Sequence[dict[str, Any] | None] = [None] * len(cases)
    if given.peer or given.peer_path:
        todo = [{**asdict(case), "sets": one, "turns": many} for case, one, many in zip(cases, sets, turns)]
        found = peers(todo, given.peer_python, given.peer_path, given.repeats)
    if device is None:
        from rvllm.backend.cuda.kernels import Gpu

        device = Gpu(0, lambda text: print(text, file=sys.stderr))
    name = device.gpu.name
    print(f"{name}, {device.tier}")
    chains = Chains(device, normals or Normals())
    results, wrong = [], []
    for case, one, many, peer in zip(cases, sets, turns, found):
        try:
            ours = measured(chains, device, case, one, many, given.repeats)
            results.append(told(case, ours, peer, name, one * case.set_bytes))
        except WrongOutput as reason:
            wrong.append(str(reason))
            print(f"{reason}; no figure is printed", file=sys.stderr, flush=True)
    if wrong:
        raise SystemExit("\n".join(wrong))
    about = {"benchmark": "kernels", "gpu": name, "tier": device.tier, "commit": commit(), "repeats": given.repeats}
    print(json.dumps({**about, "cases": results}))


if __name__ == "__main__":
    main()
