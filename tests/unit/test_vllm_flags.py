"""Every flag of `vllm serve` is honoured, accepted with a word, or refused with a reason."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from rvllm.__main__ import Interrupts, run
from rvllm.cli.benchmark import benchmark
from rvllm.cli.chat import chat
from rvllm.cli.generate import generate
from rvllm.cli.options import Size, speculation
from rvllm.cli.vllm import environment
from rvllm.cli.vllm.__main__ import page
from rvllm.cli.vllm.command import VllmCommand
from rvllm.cli.vllm.engine_flags import ENGINE
from rvllm.cli.vllm.flag import Flag, Treatment, flags, read
from rvllm.cli.vllm.server_flags import SERVER
from rvllm.config import DEFAULT_MODEL, EngineConfig, Speculation

ROOT = Path(__file__).parents[2]
LISTED = ROOT / "tests/fixtures/vllm_serve_flags.txt"
EVERY = (*ENGINE, *SERVER)
OURS = {"-h", "--help", "--config", "model_tag"}  # click's, the command class's, an argument


@click.command(cls=VllmCommand, flags=EVERY)
@click.argument("model_argument", required=False)
@click.option("--model", default=DEFAULT_MODEL)
@click.option("--max-model-len", type=Size(auto=True))
@click.option("--gpu-memory-utilization", type=float, default=0.92)
@click.option("--enable-prefix-caching/--no-enable-prefix-caching", default=True)
@click.option("--enforce-eager", is_flag=True)
@click.option("--batch-invariant", is_flag=True)
@click.option("--api-key", multiple=True)
@click.option("--speculative-config", callback=speculation)
@click.option("--quiet", is_flag=True)
def tiny(**options: Any) -> None:
    """Prints what it got."""
    click.echo(json.dumps(options, default=lambda value: [getattr(value, name) for name in Speculation.__slots__]))


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*environment.HONOURED, *environment.WARNED):
        monkeypatch.delenv(name, raising=False)


def took(*arguments: str) -> tuple[dict[str, Any], list[str]]:
    """(the options that the command got, the lines on stderr) of a command line that is taken."""
    done = CliRunner().invoke(tiny, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout), done.stderr.splitlines()


def refused(*arguments: str) -> str:
    """What is said of a command line that is not."""
    done = CliRunner().invoke(tiny, arguments)
    assert done.exit_code == 2 and done.stdout == "", done.output
    return done.stderr


def test_every_listed_flag_is_in_the_table_by_all_its_names() -> None:
    known = OURS | {name for flag in EVERY for name in (*flag.names, *flag.off_names)}
    lines = [line for line in LISTED.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    assert len(lines) > 322
    assert not [name for line in lines for name in line.split() if name not in known]


def test_every_listed_flag_is_one_flag_of_the_table() -> None:
    for line in LISTED.read_text(encoding="utf-8").splitlines():
        names = set(line.split()) - OURS
        if names and not line.startswith("#"):
            assert [flag for flag in EVERY if names <= {*flag.names, *flag.off_names}], line


def test_a_name_is_in_the_table_once() -> None:
    names = [name for flag in EVERY for name in (*flag.names, *flag.off_names)]
    assert not {name for name in names if names.count(name) > 1}


@pytest.mark.parametrize("flag", EVERY, ids=lambda flag: flag.name)
def test_every_flag_has_a_reason_and_does_as_told_in_both_spellings(flag: Flag) -> None:
    assert re.fullmatch(r"--[a-z0-9-]+", flag.name)
    assert bool(flag.reason) == (flag.treatment is not Treatment.HONOURED)
    own = {name for param in tiny.params for name in param.opts}
    if flag.name in own:
        return
    value = [] if flag.switch else ["no-such-value"]
    on = flag.name if flag.default != "True" or not flag.off_names else flag.off_names[0]
    for name in {on, "--" + on[2:].replace("-", "_")}:
        if flag.switch and flag.asks_nothing(on == flag.name):
            assert took(name)[1] == []
        elif flag.treatment is Treatment.ACCEPTED:
            (note,) = took(name, *value)[1]
            assert note.startswith(f"note: {flag.name} ") and note.endswith(flag.reason)
        else:
            said = refused(name, *value)
            assert f"{flag.name} " in said and (flag.reason or "is not done by `tiny`") in said


@pytest.mark.parametrize("flag", [flag for flag in EVERY if not flag.switch], ids=lambda flag: flag.name)
def test_what_is_done_anyway_may_be_asked_for(flag: Flag) -> None:
    if flag.name not in {name for param in tiny.params for name in param.opts}:
        for value in flag.as_ever:
            assert took(f"{flag.name}={value}")[1] == []


def test_a_value_that_means_off_needs_no_word() -> None:
    assert took("--tensor-parallel-size", "1", "-pp=1", "--quantization", "None", "--cpu-offload-gb", "0.0")[1] == []
    assert took("--no-trust-remote-code", "--enable-chunked-prefill", "-O2", "--disable-lora")[1] == []


def test_short_names_are_read_with_both_signs_of_a_value() -> None:
    assert "--tensor-parallel-size 2 is not done: one GPU computes" in refused("-tp", "2")
    assert "--tensor-parallel-size 2 is not done" in refused("-tp=2")
    assert took("-O3")[1] == ["note: --optimization-level 3 changes nothing here: " + by_name("-O").reason]


def test_a_warning_is_given_once_and_not_when_quiet() -> None:
    assert len(took("--swap-space", "8", "--swap_space", "16")[1]) == 1
    assert took("--swap-space", "8", "--quiet")[1] == []


def test_a_refusal_is_one_line_and_the_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "hi", "--tensor_parallel_size=2"], Interrupts()) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.splitlines() == [
        "error: --tensor-parallel-size 2 is not done: one GPU computes",
        f"hint: {by_name('-tp').way_out}",
    ]


def test_what_is_honoured_elsewhere_is_refused_and_not_dropped() -> None:
    assert "--port 80 is not done by `tiny`" in refused("--port", "80")


def test_an_option_of_the_command_has_all_names_of_vllm() -> None:
    assert took("--device-memory-utilization", "0.5")[0]["gpu_memory_utilization"] == 0.5
    assert took("--disable_prefix_caching")[0]["enable_prefix_caching"] is False
    assert took("--no-enable-prefix-caching")[0]["enable_prefix_caching"] is False
    assert took("--enforce-eager", "--no-enforce-eager")[0]["enforce_eager"] is False
    assert took("-sc", '{"method": "ngram", "num_speculative_tokens": 4}')[0]["speculative_config"] == [4, 3, 5]


def test_several_values_follow_one_name() -> None:
    assert took("--api-key", "a", "b", "--quiet")[0]["api_key"] == ["a", "b"]
    assert took("--api_key", "a", "--api-key=b")[0]["api_key"] == ["a", "b"]
    assert took("M", "--api-key", "a", "b")[0] | {"model_argument": "M"} == took("--api-key", "a", "b", "--", "M")[0]
    assert len(took("--cudagraph-capture-sizes", "1", "2", "4")[1]) == 1


def test_an_object_may_be_told_in_parts() -> None:
    parts = ("--speculative-config.method", "ngram", "--speculative_config.num_speculative_tokens=4")
    assert took(*parts)[0]["speculative_config"] == [4, 3, 5]
    (note,) = took("--compilation-config.mode=3", "--compilation-config.a.b+", "1", "--compilation_config.a.b+=x")[1]
    assert note.startswith('note: --compilation-config {"mode": 3, "a": {"b": [1, "x"]}} changes nothing here')
    assert "'mode' is both a value and an object" in refused(
        "--compilation-config.mode=3", "--compilation-config.mode.x=3"
    )


def test_a_file_stands_behind_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "model: M\nmax_model_len: 8k\ngpu-memory-utilization: 0.5\ndisable-prefix-caching: true\nenforce-eager: false\n"
        "api-key:\n  - a\n  - 12\nspeculative-config:\n  method: ngram\n  num_speculative_tokens: 7\nuds:\n"
    )
    got, said = took("--config", str(file), "--max-model-len", "4k")
    assert said == []
    assert got == {
        "model": "M", "max_model_len": 4000, "gpu_memory_utilization": 0.5, "enable_prefix_caching": False,
        "enforce_eager": False, "api_key": ["a", "12"], "speculative_config": [7, 3, 5], "batch_invariant": False,
        "model_argument": None, "quiet": False,
    }  # fmt: skip
    got, _ = took("--config", str(file), "N", "--enable-prefix-caching", "--api-key", "b")
    assert (got["model_argument"], got["model"]) == ("N", DEFAULT_MODEL)
    assert (got["enable_prefix_caching"], got["api_key"], got["max_model_len"]) == (True, ["b"], 8000)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tensor-parallel-size: 2", "--tensor-parallel-size 2 is not done: one GPU computes"),
        ("enable-lora: true", "--enable-lora is not done: there are no adapters"),
        ("max-modle-len: 8", "there is no option 'max-modle-len'; did you mean max-model-len?"),
        ("zzzzzz: 8", "there is no option 'zzzzzz'"),
        ("config: x", "there is no option 'config'"),
        ("enforce-eager: 1", "enforce-eager is 1, it is a switch: true or false"),
        ("max-model-len: many", "'many' is not a number"),
        ("max-model-len: [1", "c.yaml, line 1: expected ',' or ']'"),
        ("model: M\nmodel: N", "c.yaml, line 2: 'model' is there twice"),
    ],
)
def test_what_a_file_may_not_say_is_an_error(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    assert said in " ".join(refused("--config", str(file)).split())


def test_a_file_may_hold_what_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("tensor-parallel-size: 1\nenable-lora: false\nswap-space: 8\ncudagraph-capture-sizes: [1, 2]\n")
    said = [line.split()[1] for line in took("--config", str(file))[1]]
    assert sorted(said) == ["--cudagraph-capture-sizes", "--swap-space"]


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "nowhere.yaml cannot be read: No such file" in refused("--config", str(tmp_path / "nowhere.yaml"))


def test_variables_stand_behind_file_and_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "of-variable")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    got, said = took()
    assert (got["api_key"], got["batch_invariant"], said) == (["of-variable"], True, [])
    file = tmp_path / "c.yaml"
    file.write_text("api-key: of-file\n")
    assert took("--config", str(file))[0]["api_key"] == ["of-file"]
    assert took("--config", str(file), "--api-key", "mine")[0]["api_key"] == ["mine"]
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    assert took()[0]["batch_invariant"] is False


def test_variables_that_change_nothing_are_told() -> None:
    given = {
        "VLLM_ATTENTION_BACKEND": "FLASHINFER", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_MODELSCOPE": "0", "VLLM_NEW": "1",
        "VLLM_OTHER": "x", "PATH": "/bin", "VLLM_PORT": "tcp://10.0.0.1:80", "VLLM_SERVICE_HOST": "10.0.0.1",
        "VLLM_PORT_80_TCP_ADDR": "10.0.0.1", "VLLM_API_KEY": "k",
    }  # fmt: skip
    assert list(environment.warnings(given)) == [
        "VLLM_ATTENTION_BACKEND changes nothing here: " + environment.WARNED["VLLM_ATTENTION_BACKEND"],
        "VLLM_NEW, VLLM_OTHER change nothing here: not known",
    ]


def test_help_by_groups_is_all_the_help() -> None:
    assert CliRunner().invoke(tiny, ["--help=all"]).output == CliRunner().invoke(tiny, ["--help"]).output != ""


def test_commands_do_no_flag_that_the_table_says_is_not_done() -> None:
    undone = {flag.name for flag in EVERY if flag.treatment is not Treatment.HONOURED}
    for command in (generate, chat, *benchmark.commands.values()):
        done = {name for param in command.params for name in param.opts}
        assert undone & done <= ({"--skip-tokenizer-init"} if command.name in benchmark.commands else set())


def test_engine_flags_that_are_honoured_are_options_of_generate_and_settings() -> None:
    own = {name for param in generate.params for name in param.opts}
    for flag in ENGINE:
        if flag.treatment is Treatment.HONOURED:
            assert flag.name in own
            assert flag.name[2:].replace("-", "_") in EngineConfig.__dataclass_fields__


def test_the_page_is_what_the_tables_say() -> None:
    written = (ROOT / "docs/vllm-flags.md").read_text(encoding="utf-8")
    assert written == page(), "python -m rvllm.cli.vllm > docs/vllm-flags.md"


def test_a_line_of_the_table_is_read_whole() -> None:
    flag = read("--enable-x -ex/--disable-x = None | True", Treatment.REFUSED, "why", "way")
    assert (flag.names, flag.off_names) == (("--enable-x", "-ex"), ("--disable-x", "--no-enable-x"))
    assert (flag.switch, flag.several, flag.as_ever) == (True, False, ("None", "True"))
    (flag,) = flags(Treatment.ACCEPTED, "why", "  --y LIST = 4 | a b ", server=True)
    assert (flag.names, flag.switch, flag.several, flag.server) == (("--y",), False, True, True)
    assert flag.asks_nothing("4.0") and flag.asks_nothing("A B") and not flag.asks_nothing("5")


def by_name(name: str) -> Flag:
    return next(flag for flag in EVERY if name in flag.names)
