"""`rvllm benchmark` where a GPU computes: its ops are checked, its memory given back, its limit known."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result

from rvllm.backend.cuda.kernels import Device
from rvllm.cli import check, measure
from rvllm.cli.failure import Debug
from rvllm.cli.main import commands
from rvllm.config import EngineConfig
from rvllm.errors import WrongOutput
from tests.gpu.running import BOTH, ON_GPU, REFERENCE, Backend
from tests.kernels.host_device import HostDevice

CASE = REFERENCE / "qwen2-tied"
SMALL = ("--max-model-len", "6", "--kv-cache-memory-bytes", "4MiB", "--max-num-batched-tokens", "96")


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """A benchmark's process ends with it; this one goes on."""
    yield
    gc.unfreeze()


@pytest.fixture
def opened(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """The device that the command finds; the host's is taken for an H200."""
    if isinstance(backend.device, HostDevice):
        monkeypatch.setattr(check, "open_gpu", lambda warn: ("NVIDIA H200", backend.device))
        monkeypatch.setattr(measure, "choose_device", lambda asked, warn: "cuda")
    return backend


def benchmark(*options: str) -> Result:
    return CliRunner().invoke(commands, ["benchmark", str(CASE), "--device", "cuda", *options], obj=Debug(False))


@pytest.mark.parametrize("backend", BOTH, indirect=True)
def test_a_figure_stands_beside_the_cards_limit(opened: Backend) -> None:
    cells = ("--protocol", "wall", "--n", "2", "--input-len", "2", "--output-len", "2", "--repeat", "1")
    done = benchmark(*cells, *SMALL)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["tier"] == opened.device.tier and found["dtype"] == "bf16"
    assert found["checks"][1].startswith("every op within ")
    (entry,) = found["results"]
    if found["limits"]:  # of a card that is known
        assert 0 < entry["tokens_per_s"] < entry["limit_tokens_per_s"]
        assert entry["share_of_limit"] == entry["tokens_per_s"] / entry["limit_tokens_per_s"]


@pytest.mark.parametrize("backend", BOTH, indirect=True)
def test_the_memory_of_the_checked_layers_is_given_back(opened: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    allocate, free = opened.device.allocate, opened.device.free

    def allocated(nbytes: int) -> int:
        held.append(allocate(nbytes))
        return held[-1]

    def freed(address: int) -> None:
        held.remove(address)
        free(address)

    monkeypatch.setattr(opened.device, "allocate", allocated)
    monkeypatch.setattr(opened.device, "free", freed)
    if isinstance(opened.device, HostDevice):
        for cache, entry in (("auto", "rope_kv_bf16"), ("fp8", "rope_kv_e4m3_bf16")):
            opened.device.break_entry = entry
            with pytest.raises(WrongOutput, match=r"op 0\..*, kernel rope_kv, is .* 8 are allowed"):
                run_check(opened.device, cache)
    else:
        assert run_check(opened.device) <= 8
    assert not held


def run_check(device: Device, cache: str = "auto") -> float:
    from rvllm.model.files import ModelFiles
    from rvllm.model.source import open_source

    source = open_source(ModelFiles(CASE.name, CASE), warn=lambda message: None)
    return measure.check_ops(source, EngineConfig(kv_cache_dtype=cache), device, lambda label, done, total: None)


@pytest.mark.parametrize("backend", ON_GPU, indirect=True)
@pytest.mark.parametrize(
    "mode",
    [("decode",), ("throughput", "--num-prompts", "300"), ("latency", "--num-iters", "3")],
    ids=lambda mode: mode[0],
)
def test_every_mode_runs_with_dummy_weights(opened: Backend, mode: tuple[str, ...]) -> None:
    lengths = (
        ("--n", "1,2,...,128", "--context", "32", "--output-len", "16,80")
        if mode[0] == "decode"
        else ("--input-len", "32", "--output-len", "16")
    )
    room = ("--max-model-len", "256", "--kv-cache-memory-bytes", "256MiB")  # other tests' models have theirs
    arguments = ["benchmark", *mode, str(CASE), *lengths, "--load-format", "dummy", *room]
    done = CliRunner().invoke(commands, arguments, obj=Debug(False))
    assert done.exit_code == 0, done.output
