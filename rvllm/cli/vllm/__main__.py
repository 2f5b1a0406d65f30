"""`python -m rvllm.cli.vllm`: docs/vllm-flags.md, made from the tables and from the options that commands declare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module

import click

from rvllm.cli.main import COMMANDS
from rvllm.cli.vllm import environment
from rvllm.cli.vllm.command import VllmCommand
from rvllm.cli.vllm.engine_flags import ENGINE
from rvllm.cli.vllm.flag import Flag, Treatment
from rvllm.cli.vllm.server_flags import SERVER

HEAD = """# vLLM's flags

Made by `python -m rvllm.cli.vllm > docs/vllm-flags.md`; do not edit.

Every flag of `vllm serve` (0.33, and those of older versions that guides still name) is honoured, accepted with one
line on stderr because it changes nothing here, or refused with a reason and exit code 2. A value that asks for what is
done anyway, such as `--tensor-parallel-size 1`, is taken without a word. Flags about the model and the engine hold for
`generate`, `chat` and `benchmark` too, those about HTTP, chats and logs are the server's.

- `-` and `_` are the same in names; `--flag value` and `--flag=value` are.
- Switches have vLLM's negative forms: `--no-x`, `--disable-x` beside `--enable-x`, and older versions' `--no-enable-x`.
- An object is JSON, or told in parts: `--compilation-config.mode 3`, `--x.list+ value`.
- A name that is an option of the command's own stays its own: `-q` is `--quiet` in `generate` and `chat`.

## `--config FILE`

A YAML file of options, without `--`; `-` and `_` are the same. What the command line says wins, and so does a model
named there as an argument. `true` and `false` set a switch (`false` is its negative form), a list is several values, a
mapping is an object, and an empty value or `null` is none. An unknown name is an error that tells the nearest one.

```yaml
model: /models/Qwen2.5-7B-Instruct
max-model-len: 32k
gpu_memory_utilization: 0.9
speculative-config:
  method: ngram
  num_speculative_tokens: 7
```

It is read as PyYAML's safe loader does, but for dates, which stay text; a name that stands twice is refused with its
line.
"""


def page() -> str:
    """The text of docs/vllm-flags.md."""
    having = options()
    own = [flag for flag in (*ENGINE, *SERVER) if flag.treatment is Treatment.HONOURED]
    lines = [HEAD, "## Honoured", ""]
    lines += table(("Flag", "By"), ((spelling(flag), by(flag, having)) for flag in own))
    for treatment, title in ((Treatment.ACCEPTED, "Accepted with a warning"), (Treatment.REFUSED, "Refused")):
        some = [flag for flag in (*ENGINE, *SERVER) if flag.treatment is treatment]
        lines += ["", f"## {title}", ""]
        lines += table(
            ("Flag", "Taken without a word", "Why"), ((spelling(flag), silent(flag), why(flag)) for flag in some)
        )
    lines += ["", "## Environment variables", "", "rvllm's own, and those of others that it reads:", ""]
    lines += table(("Variable", "Meaning"), ((f"`{name}`", told) for name, told in environment.OURS.items()))
    lines += ["", "vLLM's. Others that begin with VLLM_ are named in one warning; 0 and nothing are as if not set.", ""]
    lines += table(("Variable", "Here"), variables(having))
    return "\n".join(lines) + "\n"


def options() -> Mapping[str, list[str]]:
    """The commands that have an option, by its name."""
    found: dict[str, list[str]] = {}
    for name in COMMANDS:
        command = getattr(import_module(f"rvllm.cli.{name}"), name)
        parts = command.commands.values() if isinstance(command, click.Group) else [command]
        for option in {text for part in parts if isinstance(part, VllmCommand) for text in own_names(part)}:
            found.setdefault(option, []).append(name)
    return found


def own_names(command: click.Command) -> Iterator[str]:
    for param in command.params:
        yield from (*param.opts, *param.secondary_opts)


def by(flag: Flag, having: Mapping[str, list[str]]) -> str:
    return ", ".join(having.get(flag.name, [])) or "not yet: refused"


def spelling(flag: Flag) -> str:
    on = ", ".join(f"`{name}`" for name in flag.names)
    off = ", ".join(f"`{name}`" for name in flag.off_names)
    return f"{on} / {off}" if off else on


def silent(flag: Flag) -> str:
    if flag.switch:
        values = ["on" if value == "True" else "off" for value in flag.as_ever if value in ("True", "False")]
    else:
        values = [f"`{value}`" for value in flag.as_ever if value != "None"]
    return ", ".join(values).replace("|", "\\|")


def why(flag: Flag) -> str:
    return f"{flag.reason}. {flag.way_out[:1].upper()}{flag.way_out[1:]}" if flag.way_out else flag.reason


def variables(having: Mapping[str, list[str]]) -> Iterator[tuple[str, str]]:
    for name, option in environment.HONOURED.items():
        commands = ", ".join(having.get(option, []))
        yield f"`{name}`", f"honoured: `{option}` ({commands or 'not yet'})"
    for name, reason in environment.AS_EVER.items():
        yield f"`{name}`", f"taken without a word: {reason}"
    for name, reason in environment.WARNED.items():
        yield f"`{name}`", f"a warning: {reason}"


def table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows)]


if __name__ == "__main__":
    click.echo(page(), nl=False)
