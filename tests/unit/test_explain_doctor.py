"""explain and doctor in this process: what they reckon, and that it agrees with known numbers."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rvllm.__main__ import Interrupts, run
from rvllm.backend.cuda.driver import Gpu
from rvllm.cli import gpus
from rvllm.cli.explain import Run, fold, step_load
from rvllm.cli.failure import Debug
from rvllm.cli.fit import RUNTIME_BYTES, on_cpu, on_gpu
from rvllm.cli.machine import commit, cpu, free_memory, memory
from rvllm.cli.main import commands
from rvllm.cli.model import OpenedModel, open_model
from rvllm.cli.options import in_gib
from rvllm.config import CPU_CACHE_BYTES
from rvllm.errors import DeviceError, StartError
from rvllm.model.source import cache_dtype
from rvllm.program.cost import card_named
from rvllm.program.dtype import BF16, E4M3, F16, F32
from rvllm.version import VERSION
from tests.fixtures.models import Shape, chain_model, edit_json, random_model

QWEN_7B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 32768,
    "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    "hidden_act": "silu", "eos_token_id": 151645,
}  # fmt: skip
QWEN_7B_BYTES = 15_231_233_024
GIB = 1 << 30


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same answers on a machine that has one."""

    def devices() -> list[Gpu]:
        raise DeviceError("there is no usable NVIDIA driver")

    monkeypatch.setattr("rvllm.cli.gpus.devices", devices)
    monkeypatch.setattr("rvllm.cli.machine.driver_version", devices)


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    """A folder with nothing but a 7B model's configuration."""
    folder = tmp_path / "qwen"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN_7B), encoding="utf-8")
    return folder


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(commands, [str(argument) for argument in arguments], obj=Debug(False))


def opened(folder: Path, *, dtype: str = "auto", load_format: str = "dummy") -> OpenedModel:
    notes: list[str] = []
    return open_model(
        str(folder),
        dtype=dtype,
        kv_cache_dtype="auto",
        load_format=load_format,
        max_model_len=None,
        offline=True,
        progress=None,
        warn=notes.append,
    )


def test_options_may_be_spelled_with_underscores(qwen: Path) -> None:
    dashed = invoke("explain", qwen, "--load-format", "dummy", "--json")
    underscored = invoke("explain", qwen, "--load_format=dummy", "--json")
    assert dashed.exit_code == 0, dashed.output
    assert underscored.output == dashed.output


# --- explain


def test_explain_agrees_with_the_design_for_a_7b_model(qwen: Path) -> None:
    result = json.loads(invoke("explain", qwen, "--load-format", "dummy", "--gpu", "h200", "--json").output)
    assert sum(result["weight_bytes"].values()) == QWEN_7B_BYTES
    assert result["kv_token_bytes"] == 2 * 4 * 128 * 2 * 28
    assert round(result["tokens_per_s"]) == 330  # 14.14 GB over 4.68 TB/s, with the context's cache
    assert result["step"] == {"tokens": 1, "sequences": 1, "context": 512}
    assert len(result["ops"]) == 2 + 28 * 5 + 2
    assert result["limit_s"] == pytest.approx(sum(op["limit_s"] for op in result["ops"]))
    assert result["bytes"] == sum(op["bytes"] for op in result["ops"])


def test_a_cache_of_codes_holds_twice_the_tokens_but_for_its_scales(qwen: Path) -> None:
    arguments = ("doctor", qwen, "--load-format", "dummy", "--gpu", "h200", "--json")
    plain, codes = (json.loads(invoke(*arguments, *more).output)["model"] for more in ((), ("--kv-cache-dtype", "fp8")))
    assert (plain["kv_token_bytes"], codes["kv_token_bytes"]) == (2 * 4 * 256 * 28, 2 * 4 * 132 * 28)
    assert plain["weight_bytes"] == codes["weight_bytes"] and plain["cache_bytes"] == codes["cache_bytes"]
    full = str(QWEN_7B["max_position_embeddings"])
    assert codes["concurrency"][full] / plain["concurrency"][full] == pytest.approx(256 / 132, rel=0.02)
    explained = json.loads(invoke("explain", qwen, "--load-format", "dummy", "--kv-cache-dtype=fp8", "--json").output)
    assert explained["kv_token_bytes"] == codes["kv_token_bytes"]


@pytest.mark.parametrize(
    ("name", "said"),
    [("fp8_e5m2", "fp8_e5m2 is not done: it has a digit less than fp8_e4m3"), ("fp9", "'fp9' is not one of 'auto'")],
)
@pytest.mark.parametrize("command", ["generate", "chat", "explain", "doctor"])
def test_other_formats_of_the_cache_are_wrong_usage(
    command: str, name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([command, "--kv-cache-dtype", name, "x"], Interrupts()) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_16_bit_cache_has_the_activations_format(qwen: Path) -> None:
    arguments = ("explain", qwen, "--load-format", "dummy", "--json", "--kv-cache-dtype")
    same = json.loads(invoke(*arguments, "bfloat16").output)
    assert same["kv_token_bytes"] == json.loads(invoke(*arguments, "auto").output)["kv_token_bytes"]
    with pytest.raises(StartError, match="float16 does not go with activations in bf16"):
        cache_dtype("float16", BF16)
    for asked, found in (("float16", F16), ("bfloat16", BF16), ("fp8", E4M3), ("fp8_e4m3", E4M3), ("auto", F32)):
        assert cache_dtype(asked, F32) is found  # the CPU has them all
    for asked in ("fp8_e5m2", "fp9"):
        with pytest.raises(StartError, match="use one of auto, fp8, fp8_e4m3, bfloat16, float16"):
            cache_dtype(asked, BF16)


def test_explain_folds_layers_that_repeat(qwen: Path) -> None:
    lines = invoke("explain", qwen, "--load-format", "dummy").output.splitlines()
    assert len([line for line in lines if line.startswith(" 28 x ┌norm_linear_rope_kv_bf16")]) == 1
    assert len(lines) < 20
    assert re.fullmatch(r"limit: 3\.0\d\d ms a step, 330 tok/s", lines[-1])


def test_explain_of_unfused_ops_moves_more_bytes(qwen: Path) -> None:
    fused = json.loads(invoke("explain", qwen, "--load-format", "dummy", "--json").output)
    unfused = json.loads(invoke("explain", qwen, "--load-format", "dummy", "--json", "--unfused").output)
    assert unfused["bytes"] > fused["bytes"]
    assert len(unfused["ops"]) == 2 + 28 * 11 + 3


def test_explain_knows_prompts_batches_and_cards(qwen: Path) -> None:
    arguments = ("--load-format", "dummy", "--json", "--batch", "4", "--tokens", "4K", "--context", "2K", "--gpu", "L4")
    result = json.loads(invoke("explain", qwen, *arguments).output)
    assert result["step"] == {"tokens": 4096, "sequences": 4, "context": 2048}
    assert result["card"]["name"] == "l4"
    assert result["ops"][-1]["shape"] == ["rows", 152064]
    assert {op["bound"] for op in result["ops"]} == {"bytes", "FLOPs"}


def test_explain_reads_the_formats_of_a_real_folder(tmp_path: Path) -> None:
    random_model(tmp_path / "m", Shape(dtype="F16"))
    result = json.loads(invoke("explain", tmp_path / "m", "--json").output)
    assert set(result["weight_bytes"]) == {"f16"}
    as_f32 = json.loads(invoke("explain", tmp_path / "m", "--json", "--dtype", "float32").output)
    assert as_f32["weight_bytes"] == result["weight_bytes"]
    assert as_f32["kv_token_bytes"] == 2 * result["kv_token_bytes"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--tokens", "10", "--sequences", "3"), "--tokens is 10, it must be a multiple of --sequences, which is 3"),
        (("--tokens", "1k", "--context", "10"), "--context is 10, but each sequence brings 1,000"),
        (("--context", "1m"), "--context is 1,000,000, the model's limit is 32,768"),
        (("--gpu", "gtx"), "'gtx' is not one of"),
    ],
)
def test_explain_refuses_sizes_that_do_not_go_together(
    arguments: tuple[str, ...], said: str, qwen: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["explain", str(qwen), "--load-format", "dummy", *arguments], Interrupts()) == 2
    assert said in capsys.readouterr().err


def test_the_default_context_grows_with_the_prompt() -> None:
    assert step_load(None, 3, None).context == 512
    assert step_load(4000, 2, None).context == 2000


@pytest.mark.parametrize(
    ("items", "runs"),
    [
        ("", []),
        ("a", [Run(0, 1, 1)]),
        ("abc", [Run(0, 3, 1)]),
        ("xababab", [Run(0, 1, 1), Run(1, 2, 3)]),
        ("aaaa", [Run(0, 1, 4)]),
        ("xyabcabcabcz", [Run(0, 2, 1), Run(2, 3, 3), Run(11, 1, 1)]),
        ("aabaabaab", [Run(0, 3, 3)]),
    ],
)
def test_fold_covers_every_item_once(items: str, runs: list[Run]) -> None:
    found = fold(items, lambda item: item)
    assert found == runs
    assert "".join(items[run.first : run.first + run.length] * run.times for run in found) == items


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("Tesla T4", "t4"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L40", None),
        ("NVIDIA A10G", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_cards_are_known_by_the_drivers_names(name: str, card: str | None) -> None:
    found = card_named(name)
    assert (found and found.name) == card


def test_the_card_in_the_machine_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rvllm.cli.gpus.devices", lambda: [Gpu(0, "Tesla T4", (7, 5), 15 * GIB, "GPU-")])
    assert gpus.card_for(None).name == "t4"
    assert gpus.card_for("b200").name == "b200"
    monkeypatch.setattr("rvllm.cli.gpus.devices", lambda: [Gpu(0, "Unknown", (7, 5), 15 * GIB, "GPU-")])
    assert gpus.card_for(None).name == gpus.DEFAULT_GPU


# --- doctor


def test_doctor_shows_the_machine() -> None:
    result = invoke("doctor")
    assert result.exit_code == 0, result.output
    assert result.output.startswith(f"rvllm     {VERSION}\n")
    assert "there is no usable NVIDIA driver" in result.output
    facts = json.loads(invoke("doctor", "--json").output)
    assert facts["rvllm"] == VERSION
    assert facts["nvidia"]["problem"] == "there is no usable NVIDIA driver"
    assert facts["model"] is None
    assert facts["numpy"]["version"]


def test_doctor_lists_gpus_with_the_kernels_that_serve_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rvllm.cli.machine.driver_version", lambda: (12, 2))
    found = [Gpu(0, "NVIDIA H200", (9, 0), 140 * GIB, "GPU-a"), Gpu(1, "GeForce GTX 1080", (6, 1), 8 * GIB, "GPU-b")]
    monkeypatch.setattr("rvllm.cli.machine.devices", lambda: found)
    output = invoke("doctor").output
    assert "CUDA 12.2" in output
    assert "GPU 0     NVIDIA H200, compute capability 9.0, 140.00 GiB, t90a kernels" in output
    assert "GPU 1     GeForce GTX 1080, compute capability 6.1, 8.00 GiB, too old" in output


def test_a_model_that_fits_a_card_gets_its_contexts(qwen: Path) -> None:
    result = invoke("doctor", qwen, "--load-format", "dummy", "--gpu", "rtx4090", "--json")
    assert result.exit_code == 0
    model = json.loads(result.output)["model"]
    assert model["fits"]
    assert model["weight_bytes"] == QWEN_7B_BYTES
    assert model["largest_context"] == 32768
    assert model["concurrency"] == {"32768": 3, "4096": 28, "1024": 112}


def test_a_model_that_does_not_fit_a_card_gives_exit_code_1(qwen: Path) -> None:
    result = invoke("doctor", qwen, "--load-format", "dummy", "--gpu", "t4")
    assert result.exit_code == 1
    assert "does not fit" in result.output


def test_a_card_may_be_given_by_its_memory(qwen: Path) -> None:
    result = invoke("doctor", qwen, "--load-format", "dummy", "--gpu-memory", "18GiB", "--json")
    model = json.loads(result.output)["model"]
    assert model["place"]["memory_bytes"] == 18 << 30
    assert 0 < model["largest_context"] < 32768
    assert model["concurrency"]["32768"] == 0


def test_the_parts_of_a_fit_add_up(qwen: Path) -> None:
    fit = on_gpu(opened(qwen), 24 << 30)
    assert fit.usable_bytes == int(0.92 * (24 << 30))
    assert fit.weight_bytes + fit.workspace_bytes + fit.cache_bytes == fit.usable_bytes
    # 256 sequences, one of them with 64 prompt tokens to score: rows of logits, which share memory with the activations, what
    # the sampler's kernels leave each other, six bitmaps with counts and biases, and attention's partial results.
    step = 319 * (152064 * 4 + 172112 + 1072 * 149 + 6 * 152064 // 8 + 8 * 152064 + 28 * 32 * (128 + 2) * 4)
    assert RUNTIME_BYTES + step <= fit.workspace_bytes < RUNTIME_BYTES + 1.2 * step
    blocks = fit.cache_bytes // (32 * fit.kv_token_bytes)
    assert fit.concurrency == {32768: blocks // 1024, 4096: blocks // 128, 1024: blocks // 32}


def test_one_block_of_cache_is_the_least_that_fits(tmp_path: Path) -> None:
    random_model(tmp_path / "m")
    model = opened(tmp_path / "m", dtype="float32", load_format="auto")
    needed = sum(on_cpu(model, 0).__getattribute__(part) for part in ("weight_bytes", "workspace_bytes"))
    block = 32 * model.kv_token_bytes
    assert not on_cpu(model, needed + block - 1).fits
    assert on_cpu(model, needed + block).largest_context == 32


def test_on_the_cpu_weights_are_counted_in_float32(tmp_path: Path) -> None:
    random_model(tmp_path / "m", Shape(tied=True))
    model = opened(tmp_path / "m", dtype="float32", load_format="auto")
    stored = sum(model.weight_bytes.values())
    assert on_cpu(model, 1 << 34).weight_bytes == 2 * stored  # from bf16; the tied head is there once
    assert on_cpu(model, 1 << 34).cache_bytes == CPU_CACHE_BYTES


def test_a_broken_model_gives_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chain_model(tmp_path / "m", ["a"])
    edit_json(tmp_path / "m" / "config.json", {"architectures": ["NoSuchModel"]})
    assert run(["doctor", str(tmp_path / "m")], Interrupts()) == 1
    assert "NoSuchModel" in capsys.readouterr().err


def test_a_card_without_a_model_is_wrong_usage(capsys: pytest.CaptureFixture[str], qwen: Path) -> None:
    assert run(["doctor", "--gpu", "t4"], Interrupts()) == 2
    assert run(["doctor", str(qwen), "--gpu", "t4", "--gpu-memory", "1G"], Interrupts()) == 2
    assert "not both" in capsys.readouterr().err


def test_the_cpu_is_read_from_cpuinfo() -> None:
    facts = cpu("processor\t: 0\nmodel name\t: Some CPU @ 3 GHz\nflags\t\t: fpu sse2 avx2 f16c\n\nprocessor\t: 1\n")
    assert facts["model"] == "Some CPU @ 3 GHz"
    assert facts["features"] == ["avx2", "f16c"]
    assert facts["usable_cores"] >= 1


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 5 << 30),
        ({"/sys/fs/cgroup/memory.max": "max\n"}, 5 << 30),
        ({"/sys/fs/cgroup/memory.max": "2147483648\n"}, 2 << 30),
        ({"/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}, 5 << 30),
    ],
)
def test_a_containers_limit_counts_where_it_is_less_than_the_memory(files: dict[str, str], free: int) -> None:
    files["/proc/meminfo"] = f"MemTotal:       {8 << 20} kB\nMemFree:  1 kB\nMemAvailable:   {5 << 20} kB\n"
    facts = memory(files.get)
    assert free_memory(facts) == free
    assert facts["limit"] in (None, 2 << 30)


def test_a_machine_that_says_nothing_of_its_memory_is_no_error() -> None:
    assert free_memory(memory(lambda path: None)) is None


def test_bytes_for_people() -> None:
    assert in_gib(24 << 30) == "24.00 GiB"
    assert in_gib(3 << 19) == "1.5 MiB"


def test_files_of_an_archive_say_which_commit_they_are(tmp_path: Path) -> None:
    (tmp_path / ".git_archival.txt").write_text("commit: 0123abc\n", encoding="utf-8")
    assert commit(tmp_path) == "0123abc"
    (tmp_path / ".git_archival.txt").write_text("commit: $Format:%H$\n", encoding="utf-8")
    assert commit(tmp_path) is None  # neither an archive nor a repository


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_a_repository_that_an_installation_lies_in_is_not_ours(tmp_path: Path) -> None:
    git = ("git", "-C", str(tmp_path), "-c", "user.name=nobody", "-c", "user.email=nobody@localhost")
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "another project"], check=True)
    assert commit(tmp_path) is None
