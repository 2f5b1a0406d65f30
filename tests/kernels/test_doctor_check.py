"""`rvllm doctor --check` on the host's stand-in for a GPU: what agrees, what is named when it does not."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from rvllm.__main__ import Interrupts, run
from rvllm.backend.cuda.check import ALLOWED, Difference, product_roundings
from rvllm.cli import check
from rvllm.cli.failure import Debug
from rvllm.cli.main import commands
from rvllm.errors import DeviceError
from rvllm.model.files import ModelFiles
from rvllm.model.source import open_source, record
from rvllm.program.dtype import BF16
from tests.kernels.host_device import HostDevice

REFERENCE = Path(__file__).parents[1] / "reference"
CASE = REFERENCE / "llama-gqa-tied-llama3-rope"


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> HostDevice:
    """The GPU that the command opens."""
    host = HostDevice("t80")
    monkeypatch.setattr(check, "open_gpu", lambda warn: ("the host", host))
    return host


def doctor(*arguments: str | Path) -> Result:
    return CliRunner().invoke(commands, ["doctor", "--check", *map(str, arguments)], obj=Debug(False))


def test_a_model_whose_ops_agree_gives_a_line_a_kernel_and_exit_code_0(device: HostDevice) -> None:
    done = doctor(CASE)
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0] == "the host, t80 kernels, bf16; up to 8 roundings are allowed"
    assert lines[-1] == "every op agrees with its definition"
    kernels = [line.split()[0] for line in lines[1:-1]]
    products = {f"{stem}{tail}" for stem in ("linear", "gemm") for tail in ("", "_add", "_act_mul")}
    assert {"embedding", "rope_kv", "attention", *products} <= set(kernels) and len(set(kernels)) == len(kernels)
    assert any(entry.startswith("attention_prefill") for entry in device.launched)
    assert any(entry.startswith("attention_decode") for entry in device.launched)


def test_a_cache_of_codes_is_checked_as_well(device: HostDevice) -> None:
    done = doctor(CASE, "--kv-cache-dtype", "fp8")
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0] == "the host, t80 kernels, bf16 with a cache of e4m3; up to 8 roundings are allowed"
    assert {"rope_kv", "attention"} <= {line.split()[0] for line in lines[1:-1]}
    assert {entry for entry in device.launched if "rope_kv" in entry or "attention" in entry} == {
        "rope_kv_e4m3_bf16",
        "attention_decode_e4m3_d64_bf16",
        "attention_prefill_e4m3_d64_bf16",
    }
    device.break_entry = "attention_decode_e4m3_d64_bf16"
    done = doctor(CASE, "--kv-cache-dtype", "fp8", "--json")
    facts = json.loads(done.stdout)
    assert done.exit_code == 1 and facts["wrong"]["kernel"] == "attention" and facts["kv_cache_dtype"] == "e4m3"


def test_a_wrong_kernel_is_named_with_its_first_op_and_gives_exit_code_1(device: HostDevice) -> None:
    for broken, kernel in (("linear_act_mul_bf16_m8", "linear_act_mul"), ("gemm_add_bf16_tile64", "gemm_add")):
        device.break_entry = broken
        done = doctor(CASE)
        assert done.exit_code == 1
        last = done.output.splitlines()[-1]
        assert last.startswith("WRONG: op 0.") and f"kernel {kernel}, is " in last and "8 are allowed" in last


def test_wrong_logits_are_named(device: HostDevice) -> None:
    device.break_entry = "linear_f32_bf16_m8"
    done = doctor(CASE)
    assert done.exit_code == 1 and "WRONG: op logits, kernel linear, is " in done.output.splitlines()[-1]


def test_float32_sums_may_cancel_in_any_order_but_lose_no_term_and_no_precision() -> None:
    """The terms' magnitudes add up to ninety times the largest sum: an order's noise is small beside them alone."""
    rng = np.random.default_rng(3)
    x = rng.normal(1.0, 0.1, (4, 1024)).astype(np.float32)
    weight = rng.normal(0.0, 0.1, (64, 1024)).astype(np.float32)
    weight -= weight.mean(axis=1, keepdims=True)
    bias = rng.normal(0.0, 0.1, 64).astype(np.float32)
    terms = x[:, None, :] * weight[None]

    def roundings(products: np.ndarray, lanes: int) -> float:
        """Of sums kept in so many lanes, one after another within a lane."""
        parts = np.add.accumulate(products.reshape(4, 64, -1, lanes), axis=2, dtype=np.float32)[:, :, -1]
        return product_roundings(np.add.reduce(parts, axis=2, dtype=np.float32) + bias, x, weight, bias)

    # 64 additions one after another, of random signs: some sqrt(64) / 2 roundings of what they come to at the most.
    assert roundings(terms, 16) <= ALLOWED
    assert roundings(terms[:, :, ::-1], 32) <= ALLOWED
    missing = terms.copy()
    missing[2, 7, np.abs(terms[2, 7]).argmin()] = 0
    smallest = np.abs(terms[2, 7]).min() / np.abs(terms[2, 7]).sum()
    assert smallest > 2 * ALLOWED * 2.0**-24 and roundings(missing, 16) > ALLOWED
    assert roundings((terms.view(np.uint32) & 0xFFFFF000).view(np.float32), 16) > ALLOWED  # 11 bits, as tf32's
    assert not roundings(np.where(terms == terms.max(), np.nan, terms), 16) <= ALLOWED


def test_scripts_get_the_same_as_json(device: HostDevice) -> None:
    device.break_entry = "rope_kv_bf16"
    done = doctor(CASE, "--json")
    facts = json.loads(done.stdout)
    assert done.exit_code == 1 and not facts["agrees"]
    assert facts["wrong"]["kernel"] == "rope_kv" and facts["wrong"]["op"].startswith("0.")
    assert facts["device"] == "the host" and facts["dtype"] == "bf16" and facts["allowed_roundings"] == 8
    wrong = {entry["kernel"] for entry in facts["kernels"] if not entry["roundings"] <= 8}
    assert wrong == {"rope_kv"} and len(facts["kernels"]) > 5


def test_a_configuration_alone_is_checked_with_dummy_weights(device: HostDevice, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((CASE / "config.json").read_text(encoding="utf-8"), encoding="utf-8")
    done = doctor(tmp_path, "--load-format", "dummy", "--dtype", "float16", "--json")
    facts = json.loads(done.stdout)
    assert done.exit_code == 0 and facts["agrees"] and facts["dtype"] == "f16"


def test_without_a_gpu_the_drivers_reason_is_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_gpu(warn: object) -> None:
        raise DeviceError("there is no usable NVIDIA driver", hint="install it")

    monkeypatch.setattr(check, "open_gpu", no_gpu)
    assert run(["doctor", "--check", str(CASE)], Interrupts()) == 1
    assert capsys.readouterr().err == "error: there is no usable NVIDIA driver\nhint: install it\n"


@pytest.mark.parametrize("arguments", [(), (str(CASE), "--gpu", "h200"), (str(CASE), "--gpu-memory", "1GiB")])
def test_a_check_needs_a_model_and_takes_no_other_card(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["doctor", "--check", *arguments], Interrupts()) == 2
    assert "--check runs MODEL on this machine's GPU" in capsys.readouterr().err


@pytest.mark.parametrize("length", [8, 103])
def test_the_canned_steps_read_a_prompt_in_chunks_beside_one_that_decodes(length: int) -> None:
    source = open_source(ModelFiles("case", CASE), warn=print)
    program = record(source, dtype=BF16, kv_dtype=BF16, max_length=length)
    steps = list(check.canned_steps(program, length, 288))
    assert [step.decode_tokens for step in steps[-check.DECODES :]] == [2] * check.DECODES
    assert max(int(step.kv_lengths.max()) for step in steps) <= length
    if length > check.PROMPT:
        assert [len(step.ids) for step in steps] == [73, 29, 2, 2]
        assert [step.decode_tokens for step in steps] == [1, 1, 2, 2]


def test_nan_is_the_worst_of_a_kernel_and_wrong() -> None:
    found = [Difference("0.a", "norm", math.nan), Difference("0.b", "norm", 1.0), Difference("0.c", "add", 0.5)]
    reports = check.by_kernel(found)
    assert [entry.kernel for entry in reports] == ["norm", "add"] and math.isnan(reports[0].roundings)
    report = check.CheckReport("gpu", "t80", "bf16", "bf16", reports, found[0])
    facts = json.dumps(check.check_facts(report), allow_nan=False)
    assert json.loads(facts)["kernels"][0]["roundings"] is None


def test_weights_are_read_when_their_op_is_reached(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    original = check.Checker._compare

    def watch(self: check.Checker, *arguments: object) -> Difference:
        held.append(len(self._kept))
        return original(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(check.Checker, "_compare", watch)
    source = open_source(ModelFiles("case", CASE), warn=print)
    assert source.tied
    assert check.check_model(source, "auto", "auto", "the host", device).wrong is None
    assert max(held) == 1  # the tied embedding, which is the head, too
