"""From exec to the first token on a GPU, by stage, with weights in the page cache, or none of them there.

    python benchmarks/startup.py [--shape qwen2.5-1.5b] [--folder FOLDER] [--cold]

Makes a folder with random bf16 weights of the shape (once; a few GB), then starts a fresh process five times: what each
stage takes inside it, and the whole from exec to the first token. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

CHILD = """
import sys, time
begun = float(sys.argv[1])
stages = [("python", time.time())]
sys.path.insert(0, sys.argv[3])
import numpy, tokenizers, jinja2
from rvllm.llm import LLM
from rvllm.sampling.params import SamplingParams
stages.append(("imports", time.time()))
import rvllm.engine.load as load
from rvllm.backend.cuda import kernels, model
def timed(name, function):
    def run(*args, **kwargs):
        result = function(*args, **kwargs)
        stages.append((name, time.time()))
        return result
    return run
kernels.Gpu.__init__ = timed("open the GPU", kernels.Gpu.__init__)
model.CudaModel._load = timed("weights", model.CudaModel._load)
model.CudaModel.prepare = timed("kernels and graphs", model.CudaModel.prepare)
llm = LLM(sys.argv[2], device="cuda", warn=lambda text: None)
stages.append(("the rest of loading", time.time()))
for delta in llm.stream(llm.encode_prompt("The capital"), SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)):
    stages.append(("first token", time.time()))
    break
import json
print(json.dumps([[name, at - begun] for name, at in stages]))
"""


def write_model(folder: Path, config: dict[str, Any]) -> None:
    """A folder like a hub's, with random weights in one safetensors file."""
    from rvllm.model.files import ModelFiles
    from rvllm.model.source import open_source, record
    from rvllm.program.dtype import BF16

    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "tests" / "reference" / "qwen2-tied" / name, folder / name)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    source = open_source(ModelFiles("x", folder), load_format="dummy", warn=print)
    weights = record(source, dtype=BF16, kv_dtype=BF16, max_length=1024).weights
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in weights.items():
        nbytes = BF16.nbytes(int(np.prod(tensor.sizes({}))))
        header[name] = {"dtype": "BF16", "shape": list(tensor.sizes({})), "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rng = np.random.default_rng(0)
    noise = rng.integers(0x3C00, 0x3D00, 1 << 24, dtype=np.uint16)  # small positive numbers
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for begin in range(0, end, noise.nbytes):
            file.write(noise.tobytes()[: end - begin])


def forget(path: Path) -> None:
    """Take the file out of the page cache; exits where the system keeps it there."""
    from rvllm.backend.cuda.cold import is_resident

    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    mapping = np.memmap(path, mode="r")
    if is_resident(mapping.ctypes.data, mapping.nbytes):
        sys.exit(f"{path} stays in the page cache, so a cold start cannot be measured here")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="qwen2.5-1.5b")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "rvllm-startup")
    parser.add_argument("--cold", action="store_true", help="take the weights out of the page cache before each start")
    arguments = parser.parse_args()

    folder = arguments.folder / arguments.shape
    if not (folder / "model.safetensors").exists():
        config = ROOT / "benchmarks" / "shapes" / arguments.shape / "config.json"
        write_model(folder, json.loads(config.read_text(encoding="utf-8")))
    weights = folder / "model.safetensors"
    weights.read_bytes()  # into the page cache
    runs = []
    for _ in range(5):
        if arguments.cold:
            forget(weights)
        command = [sys.executable, "-c", CHILD, str(time.time()), str(folder), str(ROOT)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        runs.append(json.loads(done.stdout))
    names = [name for name, _ in runs[0]]
    ends = [statistics.median(run[place][1] for run in runs) for place in range(len(names))]
    for name, end, before in zip(names, ends, [0.0, *ends]):
        print(f"{name:22s} {end - before:7.3f} s, at {end:.3f} s")
    facts = {"shape": arguments.shape, "cold": arguments.cold, "weight_bytes": weights.stat().st_size}
    print(json.dumps(facts | {"first_token_s": round(ends[-1], 3), "stages": dict(zip(names, ends))}))


if __name__ == "__main__":
    main()
