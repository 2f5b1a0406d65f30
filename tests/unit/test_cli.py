"""The command line in this process: options, values, errors, progress. Commands that load a model: tests/e2e."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner, Result

from rvllm.__main__ import Interrupts, run
from rvllm.cli.chat import Stoppable
from rvllm.cli.failure import MOST_LINES, Debug, lines, report
from rvllm.cli.generate import read_prompt
from rvllm.cli.main import COMMANDS, commands
from rvllm.cli.options import size
from rvllm.cli.session import Completion, split
from rvllm.cli.talk import Talk
from rvllm.config import EngineConfig
from rvllm.errors import BadRequest, ConfigError, ModelNotFound
from rvllm.version import VERSION


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(commands, [str(argument) for argument in arguments], obj=Debug(False))


# --- The program itself


def test_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"], Interrupts()) == 0
    assert capsys.readouterr().out == f"rvllm {VERSION}\n"
    assert invoke("--version").output == f"rvllm {VERSION}\n"


def test_help_names_every_command() -> None:
    output = invoke("--help").output
    for name in COMMANDS:
        assert re.search(rf"^  {name} ", output, re.MULTILINE)


def test_no_command_at_all_is_wrong_usage_and_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([], Interrupts()) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "Usage: rvllm [OPTIONS] COMMAND" in said.err


def test_help_is_data_and_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["generate", "-h"]):
        assert run(arguments, Interrupts()) == 0
        said = capsys.readouterr()
        assert "Usage: rvllm" in said.out
        assert said.err == ""


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str) -> None:
    result = invoke(name, "--help")
    assert result.exit_code == 0
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

    def invoke(context: click.Context) -> None:
        interrupts.seen = True
        raise ImportError("an import was interrupted")

    monkeypatch.setattr(commands, "invoke", invoke)
    with pytest.raises(KeyboardInterrupt):
        run(["generate"], interrupts)


@pytest.fixture
def interrupts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Interrupts]:
    """Watching SIGINT, which then is as it was; leaving at once is an exception here."""

    def leave(code: int) -> None:
        raise SystemExit(code)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr("sys.unraisablehook", sys.unraisablehook)
    monkeypatch.setattr("os._exit", leave)
    watching = Interrupts()
    watching.watch()
    yield watching
    signal.signal(signal.SIGINT, before)


def test_the_first_interrupt_raises_and_the_second_leaves_at_once(interrupts: Interrupts) -> None:
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert interrupts.seen
    with pytest.raises(SystemExit) as exit:
        signal.raise_signal(signal.SIGINT)
    assert exit.value.code == 130


def test_an_interrupt_that_a_finalizer_would_swallow_leaves_at_once(interrupts: Interrupts) -> None:
    with pytest.raises(SystemExit) as exit:
        sys.unraisablehook(SimpleNamespace(exc_type=KeyboardInterrupt))
    assert exit.value.code == 130


def test_a_signal_that_the_parent_had_us_ignore_stays_ignored(interrupts: Interrupts) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Interrupts().watch()
    signal.raise_signal(signal.SIGINT)
    Interrupts().release()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)
    Interrupts().release()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL


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
        (("--structured-outputs", "{}"), "--structured-outputs: structured_outputs: exactly one of"),
        (("--structured-outputs", '{"regexp": "a"}'), "regexp"),
        (("--speculative-config", "7"), "'7' is not an object"),
        (("--speculative-config", '{"method": "eagle"}'), "method is 'eagle', there is \"ngram\" alone"),
        (("--speculative-config", '{"method": "ngram"}'), "has no num_speculative_tokens"),
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


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Not a fixture: pytest sets stderr anew between a fixture and its test."""
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    return stream


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The monotonic time in seconds, in a list so that a test can move it."""
    now = [100.0]
    monkeypatch.setattr("rvllm.cli.talk.time", type("Clock", (), {"monotonic": staticmethod(lambda: now[0])}))
    yield now


def test_quick_work_draws_no_bar(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    terminal = on_terminal(monkeypatch)
    with Talk() as talk:
        for done in range(11):
            clock[0] += 0.09
            talk.progress("loading weights", done, 10)
    assert terminal.text == ""


def test_slow_work_draws_a_bar_that_ends_with_its_line(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    terminal = on_terminal(monkeypatch)
    with Talk() as talk:
        for done in range(11):
            clock[0] += 0.3
            talk.progress("loading weights", done, 10)
    assert "loading weights" in terminal.text
    assert "100%" in terminal.text
    assert terminal.text.endswith("\n")


def test_a_bar_is_ended_before_an_error_is_told(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    terminal = on_terminal(monkeypatch)
    with pytest.raises(ConfigError), Talk() as talk:
        talk.progress("loading weights", 1, 10)
        clock[0] += 2
        talk.progress("loading weights", 2, 10)
        raise ConfigError("broken")
    assert terminal.text.endswith("\n")


def test_quiet_draws_no_bar_and_says_no_note(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    terminal = on_terminal(monkeypatch)
    with Talk(quiet=True) as talk:
        talk.progress("loading weights", 1, 10)
        clock[0] += 2
        talk.progress("loading weights", 2, 10)
        talk.note("unheard")
    assert terminal.text == ""


def test_no_bar_is_drawn_where_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str], clock: list[float]) -> None:
    with Talk() as talk:
        talk.progress("loading weights", 1, 10)
        clock[0] += 2
        talk.progress("loading weights", 2, 10)
        talk.note("heard")
    assert capsys.readouterr().err == "note: heard\n"
