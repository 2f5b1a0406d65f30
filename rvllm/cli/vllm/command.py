"""A click command that treats every flag of vLLM, its variables, and files of options. Knows no flag by name."""

from __future__ import annotations

import contextlib
import copy
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from rvllm.cli.failure import Refused
from rvllm.cli.vllm import config_file, environment
from rvllm.cli.vllm.engine_flags import ENGINE
from rvllm.cli.vllm.flag import Flag, Treatment

GIVEN = (ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP)
"""Where a value comes from that somebody wrote."""

_NOTES = "rvllm.cli.vllm.notes"


class VllmCommand(click.Command):
    """A command that has its own options, and says a word about each flag of vLLM's that is not among them.

    A flag that the command declares is its option, by all names that vLLM has for it and the command has not. Of
    others, accepted ones print one line each on stderr (unless --quiet), refused ones raise Refused, and so do those
    that are honoured elsewhere. Where two of `flags` have a name, the first has it.

    Values come from the command line, else from --config, else from vLLM's variables. A model named as an argument
    (`model_argument`) goes before one of the file.
    """

    def __init__(self, *args: Any, flags: Sequence[Flag] = ENGINE, **how: Any) -> None:
        super().__init__(*args, **how)
        self.flags = tuple(flags)
        self.params.append(_config_option())
        self.context_settings.setdefault("token_normalize_func", lambda name: name.replace("_", "-"))
        self._foreign: list[click.Parameter] | None = None
        self._twins: list[tuple[click.Option, click.Option]] = []

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The command's options, then hidden ones for all other flags."""
        own = super().get_params(ctx)
        if self._foreign is None:
            self._foreign = self._others(own)
        return [*own, *self._foreign]

    def make_parser(self, ctx: click.Context) -> Any:
        parser = super().make_parser(ctx)
        for _, twin in self._twins:
            twin.add_to_parser(parser, ctx)
        return parser

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_NOTES] = [] if ctx.resilient_parsing else list(environment.warnings(os.environ))
        ctx.default_map = {**(ctx.default_map or {}), **self._from_environment()}
        left = super().parse_args(ctx, self._rewritten(ctx, args))
        if ctx.params.get("model_argument") and ctx.get_parameter_source("model") == ParameterSource.DEFAULT_MAP:
            model = next(param for param in self.params if param.name == "model")
            ctx.params["model"] = model.default
        if not ctx.params.get("quiet"):
            as_json = ctx.params.get("log_format") == "json"
            for note in ctx.meta[_NOTES]:
                click.echo(json.dumps({"level": "info", "message": note}) if as_json else f"note: {note}", err=True)
        return left

    def _others(self, own: Sequence[click.Parameter]) -> list[click.Parameter]:
        """Options for the flags that are not among `own`; those that are get vLLM's other names of them."""
        owners = {name: param for param in own for name in (*param.opts, *param.secondary_opts)}
        taken = set(owners)
        others: list[click.Parameter] = []
        for flag in self.flags:
            names = [name for name in flag.names if name not in taken]
            off_names = [name for name in flag.off_names if name not in taken]
            owner = owners.get(flag.name)
            if isinstance(owner, click.Option):
                twin = copy.copy(owner)
                twin.opts, twin.secondary_opts = names, off_names if owner.is_flag else []
                if twin.opts or twin.secondary_opts:
                    self._twins.append((owner, twin))
            elif flag.name not in taken:
                others.append(self._foreign_option(flag, names, off_names))
            taken.update(names, off_names)
        return others

    def _foreign_option(self, flag: Flag, names: list[str], off_names: list[str]) -> click.Option:
        def treat(context: click.Context, parameter: click.Parameter, value: Any) -> None:
            assert parameter.name
            if context.get_parameter_source(parameter.name) in GIVEN and not context.resilient_parsing:
                self._treat(flag, value, context)

        option = click.Option(
            ["vllm_" + flag.name.strip("-").replace("-", "_"), *names],
            is_flag=flag.switch,
            default=None,
            multiple=flag.several,
            type=None if flag.switch else str,
            hidden=True,
            expose_value=False,
            callback=treat,
        )
        option.secondary_opts = off_names
        return option

    def _treat(self, flag: Flag, value: Any, ctx: click.Context) -> None:
        """Note or refuse a flag that the command has not. Raises Refused."""
        if flag.asks_nothing(" ".join(value) if flag.several else value):
            return
        given = flag.name if value is True else f"{flag.name} off" if value is False else f"{flag.name} {_shown(value)}"
        if flag.treatment is Treatment.ACCEPTED:
            ctx.meta[_NOTES].append(f"{given} changes nothing here: {flag.reason}")
        elif flag.treatment is Treatment.REFUSED:
            raise Refused(f"{given} is not done: {flag.reason}", ctx, hint=flag.way_out)
        else:
            raise Refused(f"{given} is not done by `{ctx.command_path}`", ctx)

    def _rewritten(self, ctx: click.Context, args: list[str]) -> list[str]:
        """The arguments as click reads them: `--x a b` of several values as `--x a --x b`, `--x.a.b 1` as JSON of x."""
        options = {name: param for name, (param, _) in self.named(ctx).items()}
        several = {name for flag in self.flags if flag.several for name in flag.names}
        several = {name for name in several if getattr(options.get(name), "multiple", False)}
        end = args.index("--") if "--" in args else len(args)
        done: list[str] = []
        objects: dict[str, dict[str, Any]] = {}
        rest = iter(args[:end])
        for word in rest:
            name, equals, value = word.partition("=")
            if name == "--help":  # vLLM's has groups, as in --help=all
                word = name
            option, dot, path = name.partition(".")
            option = option.replace("_", "-")
            if dot and path and option in options:
                words = value if equals else next(rest, "")
                _put(objects.setdefault(option, {}), path.removesuffix("+").split("."), words, append=path[-1] == "+")
            else:
                done.append(word)
        return [*_spread(done, several), *_as_options(objects), *args[end:]]

    def named(self, ctx: click.Context) -> dict[str, tuple[click.Parameter, bool]]:
        """Every name of an option: the option, and whether the name turns it on."""
        found: dict[str, tuple[click.Parameter, bool]] = {}
        pairs = [(param, param) for param in self.get_params(ctx)]
        for param, spelt in [*pairs, *self._twins]:
            if isinstance(param, click.Option):
                found |= dict.fromkeys(spelt.opts, (param, True))
                found |= dict.fromkeys(spelt.secondary_opts, (param, False))
        return found

    def _from_environment(self) -> dict[str, Any]:
        """Values of variables that stand for options which the command has, by parameter."""
        found: dict[str, Any] = {}
        own = {name: param for param in self.params if isinstance(param, click.Option) for name in param.opts}
        for variable, option in environment.HONOURED.items():
            value, param = os.environ.get(variable, ""), own.get(option)
            if param and param.name and value not in ("", "0"):
                found[param.name] = True if param.is_flag else [value] if param.multiple else value
        return found

    def read_config(self, ctx: click.Context, values: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults by parameter from the keys of a file. Raises UsageError."""
        names = self.named(ctx)
        objects: dict[str, Any] = {}
        for key, value in values.items():
            option, dot, path = key.partition(".")
            if dot:
                if not isinstance(objects.setdefault(option, {}), dict):
                    raise click.UsageError(f"{option!r} is both a value and an object", ctx)
                _put(objects[option], path.split("."), value, append=False)
            else:
                objects[key] = value
        found = {}
        for key, value in objects.items():
            name = "--" + key.strip("-").replace("_", "-")
            if name not in names or names[name][0].name == "config":
                raise click.UsageError(f"there is no option {key!r}{_nearest(name, names)}", ctx)
            param, on = names[name]
            assert isinstance(param, click.Option) and param.name
            if value is not None:
                found[param.name] = _value(param, on, key, value)
        return found


def _config_option() -> click.Option:
    return click.Option(
        ["--config"],
        type=click.Path(path_type=Path),
        metavar="FILE",
        is_eager=True,
        expose_value=False,
        callback=_read_file,
        help="Options from a YAML file, as in `max-model-len: 8k`; the command line wins.",
    )


def _read_file(ctx: click.Context, parameter: click.Parameter, path: Path | None) -> None:
    """Let the file's values stand where the command line has none. Raises UsageError."""
    if path is None or ctx.resilient_parsing:
        return
    assert isinstance(ctx.command, VllmCommand)
    try:
        values = ctx.command.read_config(ctx, config_file.read(path.read_text(encoding="utf-8")))
    except click.UsageError as cause:
        raise click.UsageError(f"{path}: {cause.message}", ctx) from None
    except OSError as cause:
        raise click.UsageError(f"{path} cannot be read: {cause.strerror}", ctx) from None
    except UnicodeDecodeError:
        raise click.UsageError(f"{path} is not valid UTF-8", ctx) from None
    except ValueError as cause:
        raise click.UsageError(f"{path}, {cause}", ctx) from None
    ctx.default_map = {**(ctx.default_map or {}), **values}


def _value(param: click.Option, on: bool, key: str, value: Any) -> Any:
    """A file's value as click takes it: bool for a switch, words for several, else a word. Raises UsageError."""
    if param.is_flag:
        if not isinstance(value, bool):
            raise click.UsageError(f"{key} is {value!r}, it is a switch: true or false")
        return value is on
    if param.multiple:
        return [_word(one) for one in (value if isinstance(value, list) else [value])]
    return _word(value)


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, (dict, list, bool)) else str(value)


def _nearest(name: str, names: Mapping[str, object]) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, names, n=1)
    return f"; did you mean {close[0][2:]}?" if close else ""


def _put(target: dict[str, Any], path: Sequence[str], value: Any, *, append: bool) -> None:
    """Set the value at a path of keys; a word that is JSON is what it says."""
    for key in path[:-1]:
        target = target.setdefault(key, {})
        if not isinstance(target, dict):
            raise click.UsageError(f"{key!r} is both a value and an object")
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if append:
        values = target.setdefault(path[-1], [])
        if not isinstance(values, list):
            raise click.UsageError(f"{path[-1]!r} is both a value and a list")
        values.append(value)
    else:
        target[path[-1]] = value


def _as_options(objects: Mapping[str, object]) -> list[str]:
    return [f"{option}={json.dumps(value)}" for option, value in objects.items()]


def _spread(args: Sequence[str], several: set[str]) -> list[str]:
    """The arguments with the option before each of its values."""
    done: list[str] = []
    current: str | None = None
    for place, word in enumerate(args):
        if word.startswith("-") and len(word) > 1:
            name = word.replace("_", "-")
            current = name if name in several else None
            done.append(word)
        else:
            if current and args[place - 1].replace("_", "-") != current:
                done.append(current)
            done.append(word)
    return done


def _shown(value: Any) -> str:
    text = " ".join(value) if isinstance(value, tuple) else str(value)
    return text if len(text) <= 60 else text[:60] + "..."
