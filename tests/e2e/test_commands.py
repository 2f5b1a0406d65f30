"""generate and chat as processes, on models whose every token is known: what people, scripts and terminals see."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pexpect  # type: ignore[import-untyped]
import pytest

from tests.fixtures.commands import LIMIT_S, assert_refused, command, environment, rvllm, started
from tests.fixtures.models import (
    EOS,
    Options,
    chain_model,
    edit_json,
    loop_model,
    probe,
    two_model,
    uniform_model,
)

pytestmark = pytest.mark.slow

ANSWER = ["The", " capital", " of France", " is", " Paris", ".", EOS]
LONG = Options(max_positions=1_000_000)  # a loop over it lasts longer than any test

# The reply after a conversation of so many messages: the template puts only their count before it.
COUNTING = "{% for message in messages %}{{ message['content'] }}{% endfor %}{{ messages | length }}"
REPLIES: dict[int, str] = {1: "one", 2: "two", 3: "three", 4: "four", 5: "five"}


def assert_interrupted(process: subprocess.Popen[bytes], within_s: float = 5.0) -> None:
    """Ended by an interrupt: 130 or the signal itself, at most three lines, no traceback."""
    _, errors = process.communicate(timeout=within_s)
    assert process.returncode in (130, -signal.SIGINT), errors
    assert len(errors.decode().splitlines()) <= 3, errors
    assert b"Traceback" not in errors


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def paris(models: Path) -> Path:
    """Answers any prompt that ends in ? or x, and any chat, with: The capital of France is Paris."""
    return chain_model(models / "paris", ANSWER, prompt_end=("?", "x", "\n")).folder


@pytest.fixture(scope="module")
def endless(models: Path) -> Path:
    """Says a, for ever."""
    return loop_model(models / "endless", "a", LONG).folder


@pytest.fixture(scope="module")
def counting(models: Path) -> Path:
    """Replies with the number of messages there were."""
    chains = {str(count): [word, EOS] for count, word in REPLIES.items()}
    options = Options(template=COUNTING, max_positions=200)
    (first, script), *others = chains.items()
    return chain_model(models / "counting", script, options, prompt_end=first, also=dict(others)).folder


# --- generate: the data


def test_a_prompt_is_answered_on_stdout_and_the_rest_is_talk(paris: Path) -> None:
    done = rvllm("generate", "What is the capital of France?", "--model", paris)
    assert done.returncode == 0, done
    assert done.stdout == "The capital of France is Paris.\n"
    lines = done.stderr.splitlines()
    assert lines[0].startswith("note: running on the CPU: ")
    assert re.fullmatch(r"\d+ tokens in, 7 out · first token \d+\.\d\d s · [\d,.]+ tok/s", lines[-1])
    assert len(lines) == 2


def test_quiet_says_nothing_at_all(paris: Path) -> None:
    done = rvllm("generate", "x", "--model", paris, "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "The capital of France is Paris.\n", "")


def test_verbose_says_how_the_prompt_is_sent(paris: Path) -> None:
    assert "sent as a chat message" in rvllm("generate", "x", "--model", paris, "-v").stderr
    assert "sent as a chat message" not in rvllm("generate", "x", "--model", paris).stderr


@pytest.mark.parametrize("arguments", [(), ("-",)])
def test_the_prompt_may_be_piped_in(arguments: tuple[str, ...], paris: Path) -> None:
    done = rvllm("generate", *arguments, "--model", paris, "--raw", "--json", stdin="Où est-ce ?\n")
    result = json.loads(done.stdout)
    assert result["text"] == "The capital of France is Paris."
    assert result["prompt_tokens"] == len("Où est-ce ?".encode())


def test_json_is_one_object_with_everything(paris: Path) -> None:
    done = rvllm("generate", "x", "--model", paris, "--raw", "--json", "--logprobs", "2")
    result = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    assert set(result) == {
        "model", "text", "token_ids", "prompt_tokens", "completion_tokens", "finish_reason", "stop_reason", "logprobs",
        "timings",
    }  # fmt: skip
    assert result["model"] == str(paris)
    assert result["text"] == "The capital of France is Paris."
    assert result["prompt_tokens"] == 1
    assert result["completion_tokens"] == len(result["token_ids"]) == len(result["logprobs"]) == 7
    assert result["finish_reason"] == "stop"
    assert result["stop_reason"] is None
    assert all(len(entry) in (2, 3) for entry in result["logprobs"])
    timings = result["timings"]
    assert 0 < timings["first_token_s"] <= timings["total_s"]
    assert timings["load_s"] > 0
    assert timings["tokens_per_s"] > 0


def test_text_comes_as_it_is_made(endless: Path) -> None:
    with started("generate", "x", "--model", endless, "--raw") as process:
        assert process.stdout is not None
        first = os.read(process.stdout.fileno(), 1 << 16)
        # A buffer would hand over its 8 KiB at once; the text itself never ends.
        assert 0 < len(first) < 4096


def test_the_output_ends_in_exactly_one_newline(models: Path) -> None:
    model = chain_model(models / "newline", ["line", "\n", EOS], prompt_end="x").folder
    assert rvllm("generate", "x", "--raw", "--model", model).stdout == "line\n"


def test_max_tokens_and_stop_end_the_text(paris: Path) -> None:
    result = json.loads(rvllm("generate", "x", "--model", paris, "--json", "--max-tokens", "2").stdout)
    assert (result["text"], result["finish_reason"]) == ("The capital", "length")
    arguments = ("--json", "--stop", "Paris", "--stop", "nowhere")
    result = json.loads(rvllm("generate", "x", "--model", paris, *arguments).stdout)
    assert (result["text"], result["finish_reason"], result["stop_reason"]) == (
        "The capital of France is ",
        "stop",
        "Paris",
    )


def test_without_max_tokens_the_text_goes_on_to_the_end_of_the_context(models: Path) -> None:
    model = loop_model(models / "short", "a", Options(max_positions=50)).folder
    result = json.loads(rvllm("generate", "x", "--raw", "--model", model, "--json").stdout)
    assert result["completion_tokens"] == 49
    assert result["finish_reason"] == "length"


def test_sampling_flags_reach_the_sampler(models: Path) -> None:
    model = uniform_model(models / "uniform").folder
    common = ("generate", "x", "--raw", "--model", model, "--max-tokens", "12", "-q")
    drawn = [rvllm(*common, "--temperature", "1", "--seed", seed).stdout for seed in ("1", "1", "2")]
    assert drawn[0] == drawn[1] != drawn[2]
    assert rvllm(*common).stdout == rvllm(*common).stdout  # greedy
    biased = {str(model_id): -100 for model_id in range(48, 112) if model_id != 65}
    only = rvllm(*common, "--temperature", "1", "--logit-bias", json.dumps(biased)).stdout
    assert only == "A" * 12 + "\n"
    assert rvllm(*common, "--temperature", "1", "--stop-token-ids", "48,49", "--top-k", "1").stdout in ("\n", "0\n")


def test_the_models_own_sampling_defaults_are_used_unless_told_otherwise(models: Path) -> None:
    folder = two_model(models / "warm", {"X": 10.0, "Y": 9.75}, prompt_end=("Q", "\n")).folder
    edit_json(folder / "generation_config.json", {"temperature": 1.0})
    common = ("generate", "Q", "--raw", "--model", folder, "--max-tokens", "30", "--seed", "3", "-q")
    assert set(rvllm(*common).stdout.strip()) == {"X", "Y"}
    assert set(rvllm(*common, "--generation-config", "vllm").stdout.strip()) == {"X"}
    assert set(rvllm(*common, "--temperature", "0").stdout.strip()) == {"X"}


def test_a_template_may_come_from_the_command_line(models: Path, tmp_path: Path) -> None:
    model = chain_model(models / "bare", ["bare", EOS], Options(template=None), prompt_end=("x", "!")).folder
    raw = rvllm("generate", "x", "--model", model, "-v")
    assert raw.stdout == "bare\n"
    assert "sent raw" in raw.stderr
    assert_refused(rvllm("generate", "y", "--chat", "--model", model), "no chat template", "--chat-template")
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[-1]['content'] }}!", encoding="utf-8")
    for given in (str(template), template.read_text(encoding="utf-8")):
        assert rvllm("generate", "y", "--model", model, "--chat-template", given, "-q").stdout == "bare\n"


def test_the_system_message_comes_first(models: Path) -> None:
    folder = chain_model(
        models / "probe", ["ok", EOS], Options(template=probe("messages | map(attribute='role') | join"))
    ).folder
    assert_refused(rvllm("generate", "y", "--model", folder, "--system", "be kind"), "PROBE:systemuser")


def test_text_that_the_locale_cannot_show_is_replaced_not_fatal(models: Path) -> None:
    model = chain_model(models / "emoji", [b"\xf0\x9f\x8c\xb6", " ok", EOS], prompt_end="x").folder
    assert rvllm("generate", "x", "--raw", "--model", model, "-q").stdout == "\U0001f336 ok\n"
    done = rvllm("generate", "x", "--raw", "--model", model, "-q", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout) == (0, "? ok\n")


# --- Signals and pipes


def test_a_closed_pipe_ends_the_program_without_a_word(endless: Path) -> None:
    with started("generate", "x", "--model", endless, "--raw", "-q") as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(5)
        process.stdout.close()
        assert process.wait(LIMIT_S) == 1
        assert process.stderr.read() == b""


def test_a_full_disk_is_told(paris: Path) -> None:
    with Path("/dev/full").open("wb") as full, started("generate", "x", "--model", paris, "-q", stdout=full) as process:
        _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert b"No space left on device" in errors
    assert b"Traceback" not in errors


def test_closed_standard_streams_are_no_error(paris: Path) -> None:
    line = " ".join(f"'{part}'" for part in command("generate", "x", "--model", paris)) + " >&- 2>&-"
    assert subprocess.run(["sh", "-c", line], env=environment(), timeout=LIMIT_S).returncode == 0


def wait_for_mapping(process: subprocess.Popen[bytes], name: str) -> None:
    """Until the process has mapped a file of that name."""
    maps = Path(f"/proc/{process.pid}/maps")
    begun = time.monotonic()
    while name not in maps.read_text():
        assert process.poll() is None, "ended before"
        assert time.monotonic() - begun < LIMIT_S
        time.sleep(0.001)


@pytest.mark.parametrize("mapped", ["_multiarray_umath", "libscipy_openblas", "tokenizers", "model.safetensors"])
def test_ctrl_c_during_imports_and_loading_ends_quietly(mapped: str, endless: Path) -> None:
    with started("generate", "x", "--model", endless) as process:
        wait_for_mapping(process, mapped)
        process.send_signal(signal.SIGINT)
        assert_interrupted(process)


def test_ctrl_c_during_generation_ends_quietly_and_keeps_what_was_written(endless: Path) -> None:
    with started("generate", "x", "--model", endless, "--raw", "-q") as process:
        assert process.stdout is not None
        assert process.stdout.read(3) == b"aaa"
        process.send_signal(signal.SIGINT)
        assert_interrupted(process)


def test_many_interrupts_end_quietly_too(endless: Path) -> None:
    with started("generate", "x", "--model", endless, "--raw", "-q") as process:
        assert process.stdout is not None
        process.stdout.read(3)
        while process.poll() is None:  # until it is gone, so that some fall into the tidying up
            process.send_signal(signal.SIGINT)
            time.sleep(0.0005)
        assert_interrupted(process)


def test_sigterm_ends_the_program_at_once(endless: Path) -> None:
    with started("generate", "x", "--model", endless, "--raw", "-q") as process:
        assert process.stdout is not None
        process.stdout.read(3)
        process.terminate()
        assert process.wait(LIMIT_S) == -signal.SIGTERM


# --- chat


def test_a_conversation_through_a_pipe_remembers_what_was_said(counting: Path) -> None:
    done = rvllm("chat", "--model", counting, stdin="hello\n\nagain\n/clear\nhello\n/system be kind\nhello\n")
    assert done.returncode == 0, done
    assert done.stdout.splitlines() == ["one", "three", "one", "four"]
    assert "note: the conversation is forgotten" in done.stderr


def test_a_conversation_may_begin_with_a_system_message_and_end_early(counting: Path) -> None:
    done = rvllm("chat", "--model", counting, "--system", "be kind", "-q", stdin="hello\n/exit\nhello\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "two\n", "")


def test_a_history_that_no_longer_fits_ends_a_piped_conversation(counting: Path) -> None:
    done = rvllm("chat", "--model", counting, "-q", stdin="hello\n" + "x" * 300 + "\nhello\n")
    assert done.returncode == 1
    assert done.stdout == "one\n"
    assert "the context is 200" in done.stderr
    assert "/clear" in done.stderr


def test_a_reply_that_is_cut_is_said_to_be(counting: Path) -> None:
    done = rvllm("chat", "--model", counting, "--max-tokens", "1", stdin="hello\n")
    assert done.stdout == "one\n"
    assert "the reply was cut" in done.stderr


def test_an_unknown_command_of_a_conversation_is_refused(counting: Path) -> None:
    assert "there is no command /clean" in rvllm("chat", "--model", counting, stdin="/clean\n").stderr
    assert rvllm("chat", "--model", counting, "-q", stdin="/usr/bin is a folder\n").stdout == "one\n"


def test_a_model_without_a_template_cannot_chat(models: Path) -> None:
    model = chain_model(models / "mute", ["bare", EOS], Options(template=None)).folder
    assert_refused(rvllm("chat", "--model", model, stdin="x\n"), "no chat template", "--raw")


@contextmanager
def terminal(*arguments: str | Path) -> Iterator[pexpect.spawn[str]]:
    """A conversation in a terminal of its own."""
    child = pexpect.spawn(
        sys.executable,
        command("chat", *arguments)[1:],
        env=environment(TERM="dumb"),
        encoding="utf-8",
        timeout=LIMIT_S,
        dimensions=(24, 200),
    )
    try:
        yield child
    finally:
        child.close(force=True)


# Python warns of forking beside numpy's threads; the child is replaced by exec at once.
in_terminal = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")


def ended(child: pexpect.spawn[str]) -> int | None:
    child.expect(pexpect.EOF)
    child.close()
    return child.exitstatus


@in_terminal
def test_a_conversation_in_a_terminal(counting: Path) -> None:
    with terminal("--model", counting) as child:
        child.expect("/exit or Ctrl-D: leave")
        for line, reply in (("hello", "one"), ("again", "three"), ("/clear", "forgotten"), ("hello", "one")):
            child.expect("> ")
            child.sendline(line)
            child.expect(reply)
        child.expect("> ")
        child.sendline("x" * 300)
        child.expect("error: the conversation has .* /clear starts anew")
        child.expect("> ")
        child.sendline("and on")  # the turn that did not fit left no trace
        child.expect("three")
        child.expect("> ")
        child.sendeof()
        assert ended(child) == 0


@in_terminal
def test_ctrl_c_stops_a_reply_and_at_the_prompt_leaves(endless: Path) -> None:
    with terminal("--model", endless, "-v") as child:
        tokens = []
        for _ in range(2):
            child.expect("> ")
            child.sendline("hello")
            child.expect("aaaa")
            child.sendintr()
            child.expect("stopped; the reply so far is kept")
            child.expect(r"([\d,]+) tokens in, ([\d,]+) out")
            tokens.append([int(count.replace(",", "")) for count in child.match.groups()])
        (first_prompt, first_reply), (second_prompt, _) = tokens
        assert second_prompt >= 2 * first_prompt + first_reply - 1  # the first turn is in the second, reply and all
        child.expect("> ")
        child.sendintr()
        assert ended(child) == 0
        assert "Traceback" not in (child.before or "")


@in_terminal
def test_generate_without_a_prompt_in_a_terminal_is_wrong_usage(paris: Path) -> None:
    child = pexpect.spawn(
        sys.executable, command("generate", "--model", paris)[1:], env=environment(), encoding="utf-8"
    )
    child.expect("error: there is no prompt")
    assert ended(child) == 2


def test_generate_holds_to_a_form_or_says_why_it_cannot(paris: Path) -> None:
    common = ("generate", "x", "--model", paris, "--raw", "--structured-outputs")
    assert rvllm(*common, '{"choice": ["no", "not"]}', "--temperature", "3").stdout in ("no\n", "not\n")
    refused = rvllm(*common, '{"json": {"type": "strin"}}')
    assert refused.returncode == 1 and "strin" in refused.stderr and "Traceback" not in refused.stderr
