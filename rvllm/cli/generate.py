"""`rvllm generate`: one prompt in, one completion out. Data on stdout as it comes, everything else on stderr."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import click

from rvllm.cli.options import json_option, model_settings, sampling_options, system_option, talk_options
from rvllm.cli.session import Completion, complete, load, parameters, split
from rvllm.cli.talk import Talk
from rvllm.cli.vllm.command import VllmCommand
from rvllm.errors import BadRequest, StartError

if TYPE_CHECKING:
    from rvllm.llm import LLM


@click.command(cls=VllmCommand)
@click.argument("prompt", required=False)
@click.option(
    "--chat/--raw",
    default=None,
    help="Send the prompt as a user's message through the chat template, or as it is.  "
    "[default: --chat where the model has a template]",
)
@system_option
@json_option
@click.option("--logprobs", type=int, metavar="K", help="With --json: log-probabilities of K tokens a place.")
@sampling_options
@model_settings
@talk_options
def generate(
    prompt: str | None,
    chat: bool | None,
    system: str | None,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    **options: Any,
) -> None:
    """Complete PROMPT and print the text as it comes.

    Without PROMPT, or with -, it is read from standard input, without its last line's end. Sampling defaults are the
    model's own (--generation-config); where it has none, the likeliest token is taken: the same answer every time.

    --json prints one object: model, text, token_ids, prompt_tokens, completion_tokens, finish_reason ("stop" |
    "length"), stop_reason, logprobs, and timings in seconds; with --speculative-config what was guessed, too.
    """
    given, settings = split(options)
    if given.get("logprobs") is not None and not as_json:
        raise click.UsageError("--logprobs needs --json")
    if system is not None and chat is False:
        raise click.UsageError("--system needs --chat, a raw prompt has no roles")
    text = read_prompt(prompt)
    with Talk(quiet=quiet, verbose=verbose) as talk:
        started_s = time.perf_counter()
        llm = load(settings, talk)
        load_s = time.perf_counter() - started_s
        ids = prompt_ids(llm, text, system, chat, talk)
        params = parameters(llm, given)
        talk.detail(f"sampling: {params}")
        if as_json:
            completion = complete(llm, ids, params, lambda piece: None)
            print_json(llm, completion, load_s)
        else:
            completion = complete(llm, ids, params, write)
            write("" if completion.text.endswith("\n") else "\n")
        if not quiet:
            click.echo(completion.summary(), err=True)


def read_prompt(argument: str | None) -> str:
    """The prompt from the command line or standard input. Raises UsageError, BadRequest."""
    if argument is None and sys.stdin.isatty():
        raise click.UsageError("there is no prompt: give one, or pipe it in")
    if argument is None or argument == "-":
        text, source = from_stdin(sys.stdin.buffer.read()), "standard input"
    else:
        text, source = argument, "the prompt"
    if not text:
        raise BadRequest(f"{source} is empty", param="prompt", hint="give at least one character")
    if any("\ud800" <= character <= "\udfff" for character in text):  # how Python hands over stray bytes
        raise BadRequest(f"{source} is not valid UTF-8", param="prompt")
    return text


def from_stdin(data: bytes) -> str:
    """Text without its last line's end. Raises BadRequest with the place of the first byte that is not UTF-8."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as cause:
        raise BadRequest(
            f"standard input is not valid UTF-8: byte {cause.start} is 0x{data[cause.start]:02x}",
            param="prompt",
            hint="convert it with iconv",
        ) from None
    return text.removesuffix("\n").removesuffix("\r")


def prompt_ids(llm: LLM, text: str, system: str | None, chat: bool | None, talk: Talk) -> list[int]:
    """The prompt's token ids, through the chat template or raw."""
    if chat is None:
        chat = llm.has_chat_template or system is not None
        why = "has a chat template" if llm.has_chat_template else "has no chat template"
        talk.detail(f"the prompt is sent {'as a chat message' if chat else 'raw'}: the model {why}")
    if not chat:
        return llm.encode_prompt(text)
    require_template(llm)
    messages = [{"role": "system", "content": system}] if system is not None else []
    return llm.encode_chat([*messages, {"role": "user", "content": text}])


def require_template(llm: LLM) -> None:
    """Raise StartError unless the model can chat."""
    if not llm.has_chat_template:
        raise StartError(
            f"model {llm.config.model} has no chat template",
            hint="give one with --chat-template FILE, or send raw prompts with `rvllm generate --raw`",
        )


def write(text: str) -> None:
    """Data, out at once. Not click.echo, which takes colour codes out of what the model said."""
    sys.stdout.write(text)
    sys.stdout.flush()


def print_json(llm: LLM, completion: Completion, load_s: float) -> None:
    """The whole result as one JSON object on one line."""
    import json

    result = {
        "model": llm.config.model,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": len(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "logprobs": completion.logprobs or None,
        "timings": {
            "load_s": load_s,
            "first_token_s": completion.first_token_s,
            "total_s": completion.total_s,
            "tokens_per_s": completion.tokens_per_s,
        },
    }
    if llm.config.speculative_config is not None:
        load = llm.load
        names = ("drafts", "draft_tokens", "accepted_tokens")
        result["speculation"] = {name: getattr(load, name) for name in names}
    write(json.dumps(result, ensure_ascii=False) + "\n")
