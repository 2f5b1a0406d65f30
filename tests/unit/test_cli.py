"""The command line in this process: options, errors, explain, doctor. Commands that load a model: tests/e2e."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from rvllm.__main__ import Interrupts, run
from rvllm.backend.cuda.driver import Gpu
from rvllm.cli import gpus
from rvllm.cli.chat import Stoppable
from rvllm.cli.explain import Run, fold, step_load
from rvllm.cli.failure import MOST_LINES, Debug, lines, report
from rvllm.cli.fit import RUNTIME_BYTES, on_cpu, on_gpu
from rvllm.cli.generate import read_prompt
from rvllm.cli.gpus import card_named
from rvllm.cli.machine import cpu, free_memory, memory
from rvllm.cli.main import COMMANDS, commands
from rvllm.cli.model import OpenedModel, open_model
from rvllm.cli.options import in_gib, size
from rvllm.cli.session import Completion, split
from rvllm.cli.talk import Talk
from rvllm.config import EngineConfig
from rvllm.errors import BadRequest, ConfigError, DeviceError, ModelNotFound
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
        load_format=load_format,
        max_model_len=None,
        offline=True,
        progress=None,
        warn=notes.append,
    )


# --- The program itself


def test_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"], Interrupts()) == 0
    assert capsys.readouterr().out == f"rvllm {VERSION}\n"
    assert invoke("--version").output == f"rvllm {VERSION}\n"


def test_help_names_every_command() -> None:
    output = invoke("--help").output
    for name in COMMANDS:
        assert re.search(rf"^  {name} ", output, re.MULTILINE)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_that_begins_as_the_list_says_it(name: str) -> None:
    result = invoke(name, "--help")
    assert result.exit_code == 0
    assert f"rvllm {name}" in result.output or f"commands {name}" in result.output
    assert "--debug" in result.output


def test_a_misspelt_command_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generat"], Interrupts()) == 2
    errors = capsys.readouterr().err
    assert "'generat'" in errors
    assert "did you mean generate?" in errors


def test_an_unknown_option_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "hello", "--tempreature", "1"], Interrupts()) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: No such option")
    assert "--temperature" in errors
    assert "hint: see `rvllm generate --help`" in errors


def test_options_may_be_spelled_with_underscores(qwen: Path) -> None:
    dashed = invoke("explain", qwen, "--load-format", "dummy", "--json")
    underscored = invoke("explain", qwen, "--load_format=dummy", "--json")
    assert dashed.exit_code == 0, dashed.output
    assert underscored.output == dashed.output


# --- Errors


def test_an_error_is_told_with_its_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(ModelNotFound("there is no model", hint="look elsewhere"), Debug(False)) == 1
    assert capsys.readouterr().err == "error: there is no model\nhint: look elsewhere\n"


def test_an_error_takes_at_most_ten_lines_and_keeps_its_hint() -> None:
    said = lines("\n".join(map(str, range(30))), "a hint")
    assert len(said) == MOST_LINES
    assert said[-2:] == ["...", "hint: a hint"]


def test_an_endless_line_is_cut() -> None:
    assert len(lines("x" * 100_000, None)[0]) < 3_000


def test_an_unexpected_error_is_one_line_and_asks_for_debug(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(KeyError("odd"), Debug(False)) == 1
    errors = capsys.readouterr().err
    assert errors.startswith("error: unexpected KeyError: 'odd'\nhint: ")
    assert "--debug" in errors
    assert "Traceback" not in errors


def test_debug_prints_the_traceback(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["explain", str(tmp_path / "none"), "--debug"], Interrupts()) == 1
    errors = capsys.readouterr().err
    assert "Traceback" in errors
    assert "error: there is no folder" in errors


def test_debug_may_stand_before_the_command_or_in_the_environment(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(["--debug", "explain", str(tmp_path / "none")], Interrupts())
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("RVLLM_DEBUG", "1")
    run(["explain", str(tmp_path / "none")], Interrupts())
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("RVLLM_DEBUG", "0")
    run(["explain", str(tmp_path / "none")], Interrupts())
    assert "Traceback" not in capsys.readouterr().err


def test_lack_of_memory_is_said_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(MemoryError("Unable to allocate 4.00 GiB"), Debug(False)) == 1
    assert "not enough memory: Unable to allocate 4.00 GiB" in capsys.readouterr().err


def test_an_interrupt_that_became_another_error_is_still_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupts = Interrupts()

    def main(*arguments: object, **options: object) -> int:
        interrupts.seen = True
        raise ImportError("an import was interrupted")

    monkeypatch.setattr(commands, "main", main)
    with pytest.raises(KeyboardInterrupt):
        run(["generate"], interrupts)


# --- Values


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4096", 4096), ("1k", 1000), ("1K", 1024), ("25.6k", 25600), ("1.5K", 1536), ("2m", 2_000_000), ("24GiB", 24 << 30),
        ("24G", 24 << 30), ("24GB", 24 * 10**9), ("24g", 24 * 10**9), ("1T", 1 << 40), (" 8 MiB ", 8 << 20), ("1kB", 1000),
    ],
)  # fmt: skip
def test_sizes_have_decimal_and_binary_units(text: str, number: int) -> None:
    assert size(text) == number


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "1e3", "4 4", "1X", "1Ki", "0x10", "１", "nan"])
def test_what_is_no_size_is_refused_with_what_was_given(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        size(text)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--max-model-len", "0"), "not above 0"),
        (("--max-model-len", "many"), "'many' is not a number"),
        (("--block-size", "7"), "'7' is not one of '16', '32', '64'"),
        (("--device", "tpu"), "'tpu' is not one of"),
        (("--temperature", "-1"), "--temperature: temperature is -1.0, the limit is a number from 0"),
        (("--temperature", "nan"), "--temperature: temperature is nan"),
        (("--temperature", "warm"), "'warm' is not a valid float"),
        (("--top-p", "1.5"), "--top-p: top_p is 1.5, the limit is a number from 0 to 1"),
        (("--max-tokens", "-3"), "--max-tokens: max_tokens is -3"),
        (("--min-tokens", "9", "--max-tokens", "8"), "--min-tokens: min_tokens is 9"),
        (("--stop", ""), "--stop: stop is ('',)"),
        (("--stop-token-ids", "1,x"), "'1,x' is not a list of whole numbers"),
        (("--logit-bias", "{"), "'{' is not valid JSON"),
        (("--logit-bias", "[1]"), "'[1]' is not an object"),
        (("--logit-bias", '{"5": 1000}'), "--logit-bias: logit_bias is 1000"),
        (("--logprobs", "2"), "--logprobs needs --json"),
        (("--raw", "--system", "be kind"), "--system needs --chat"),
    ],
)
def test_a_bad_value_is_wrong_usage_before_anything_is_loaded(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(["generate", "hello", "--model", str(tmp_path / "none"), *arguments], Interrupts()) == 2
    errors = capsys.readouterr().err
    assert said in errors
    assert len(errors.splitlines()) == 2


def test_zero_is_a_given_value_and_what_was_left_out_is_not() -> None:
    left_out = {"temperature": None, "stop": (), "ignore_eos": False, "top_k": None, "model": "m", "offline": False}
    assert split(left_out) == ({}, {"model": "m", "offline": False})
    zeros = {"temperature": 0.0, "top_k": 0, "seed": 0, "max_tokens": 0, "logprobs": 0}
    assert split(zeros) == (zeros, {})


def test_every_engine_setting_of_the_options_is_a_field_of_the_configuration() -> None:
    fields = set(EngineConfig.__dataclass_fields__)
    for name in ("generate", "chat"):
        command = commands.get_command(click.Context(commands), name)
        assert command is not None
        given = {parameter.name: None for parameter in command.params if parameter.expose_value}
        _, settings = split(given)
        own = {"prompt", "chat", "system", "as_json", "quiet", "verbose"}
        assert set(settings) - own <= fields
        defaults = {parameter.name: parameter.get_default(click.Context(command)) for parameter in command.params}
        for field in set(settings) & fields:
            assert str(defaults[field]) == str(getattr(EngineConfig(), field)), field


def test_a_prompt_with_stray_bytes_is_refused() -> None:
    with pytest.raises(BadRequest, match="not valid UTF-8"):
        read_prompt(os.fsdecode(b"caf\xe9"))


def test_an_empty_prompt_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["generate", "", "--model", str(tmp_path)], Interrupts()) == 1
    assert capsys.readouterr().err.startswith("error: the prompt is empty\nhint: ")


def test_the_summary_has_tokens_first_token_and_speed() -> None:
    completion = Completion(37, token_ids=list(range(8)), first_token_s=0.43, total_s=0.43 + 7 / 27.1)
    assert completion.summary() == "37 tokens in, 8 out · first token 0.43 s · 27.1 tok/s"
    assert (
        Completion(1234, token_ids=[1], first_token_s=0.5, total_s=0.5).summary()
        == "1,234 tokens in, 1 out · first token 0.50 s"
    )
    assert Completion(3).summary() == "3 tokens in, 0 out"


def test_the_first_interrupt_of_a_reply_stops_it_and_the_second_raises() -> None:
    import signal

    before = signal.getsignal(signal.SIGINT)
    with Stoppable(True) as reply:
        assert not reply.stopped
        signal.raise_signal(signal.SIGINT)
        assert reply.stopped
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


# --- Progress


class Terminal:
    """A stderr that is a terminal and keeps what is written."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None: ...

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    return stream


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The monotonic time in seconds, in a list so that a test can move it."""
    now = [100.0]
    monkeypatch.setattr("rvllm.cli.talk.time", type("Clock", (), {"monotonic": staticmethod(lambda: now[0])}))
    yield now


def test_quick_work_draws_no_bar(terminal: Terminal, clock: list[float]) -> None:
    with Talk() as talk:
        for done in range(11):
            clock[0] += 0.09
            talk.progress("loading weights", done, 10)
    assert terminal.text == ""


def test_slow_work_draws_a_bar_that_ends_with_its_line(terminal: Terminal, clock: list[float]) -> None:
    with Talk() as talk:
        for done in range(11):
            clock[0] += 0.3
            talk.progress("loading weights", done, 10)
    assert "loading weights" in terminal.text
    assert "100%" in terminal.text
    assert terminal.text.endswith("\n")


def test_a_bar_is_ended_before_an_error_is_told(terminal: Terminal, clock: list[float]) -> None:
    with pytest.raises(ConfigError), Talk() as talk:
        talk.progress("loading weights", 1, 10)
        clock[0] += 2
        talk.progress("loading weights", 2, 10)
        raise ConfigError("broken")
    assert terminal.text.endswith("\n")


def test_no_bar_where_stderr_is_no_terminal_or_quiet_was_asked(
    terminal: Terminal, clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with Talk(quiet=True) as talk:
        talk.progress("loading weights", 1, 10)
        clock[0] += 2
        talk.progress("loading weights", 2, 10)
        talk.note("unheard")
    assert terminal.text == ""


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
    assert model["concurrency"] == {"32768": 3, "4096": 31, "1024": 125}


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
    # 64 rows of float32 logits and at least one activation of 2,048 tokens
    assert fit.workspace_bytes > RUNTIME_BYTES + 64 * 152064 * 4 + 2048 * 18944 * 2
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
    assert on_cpu(model, 1 << 34).cache_bytes == EngineConfig().kv_cache_memory_bytes


def test_a_broken_model_gives_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chain_model(tmp_path / "m", ["a"])
    edit_json(tmp_path / "m" / "config.json", architectures=["NoSuchModel"])
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
    assert free_memory(memory(files.get)) == free


def test_a_machine_that_says_nothing_of_its_memory_is_no_error() -> None:
    assert free_memory(memory(lambda path: None)) is None


def test_bytes_for_people() -> None:
    assert in_gib(24 << 30) == "24.00 GiB"
    assert in_gib(3 << 19) == "1.5 MiB"
