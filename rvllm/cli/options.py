"""Options that commands share, and how their values are read. Names are vLLM's; defaults are EngineConfig's.

Numbers of tokens and bytes may have a unit: k m g t (or kB MB GB TB) are decimal, K M G T (or KiB ...) binary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import click

from rvllm.cli.main import debug_option
from rvllm.config import (
    BLOCK_SIZES,
    CPU_CACHE_BYTES,
    DEVICES,
    DTYPES,
    KV_CACHE_DTYPES,
    LOAD_FORMATS,
    POLICIES,
    REFUSED_KV_CACHE_DTYPES,
    EngineConfig,
    Speculation,
)
from rvllm.errors import StartError

Command = TypeVar("Command", bound=Callable[..., Any])

DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(EngineConfig)}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgtKMGT])(i?B)?)?", re.ASCII)


def size(text: str) -> int:
    """A number with an optional unit: 1k is 1000, 1K and 1KiB are 1024, 1kB and 1KB are 1000. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise ValueError(f"{text!r} is not a number with an optional unit, such as 4096, 32k, 32K or 24GiB")
    number, unit, suffix = match.groups()
    decimal = unit is None or suffix == "B" or (suffix is None and unit.islower())
    power = "kmgt".index(unit.lower()) + 1 if unit else 0
    value = float(number) * (1000 if decimal else 1024) ** power
    if value != int(value):
        raise ValueError(f"{text!r} is not a whole number")
    return int(value)


def sizes(text: str) -> tuple[int, ...]:
    """Rising numbers: 128,1k,8k; `...` goes on by the ratio of the two before it: 1,2,4,...,256. Raises ValueError."""
    found: list[int] = []
    parts = [part.strip() for part in text.split(",")]
    for place, part in enumerate(parts):
        if part != "...":
            found.append(size(part))
            continue
        if len(found) < 2 or found[-2] < 1 or found[-1] % found[-2] or found[-1] == found[-2]:
            raise ValueError(
                f"{text!r}: ... goes on by the whole ratio of the two numbers before it, as in 1,2,...,256"
            )
        if place + 2 != len(parts):
            raise ValueError(f"{text!r}: one number comes after ..., the last")
        ratio, last = found[-1] // found[-2], size(parts[-1])
        while found[-1] * ratio < last:
            found.append(found[-1] * ratio)
    if min(found) < 1 or any(one >= other for one, other in zip(found, found[1:])):
        raise ValueError(f"{text!r}: the numbers must be above 0 and rise")
    return tuple(found)


def in_gib(nbytes: int) -> str:
    """Bytes for people: 4.00 GiB, or 12.5 MiB where it is less than one."""
    return f"{nbytes / 2**30:,.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:,.1f} MiB"


class Size(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic from click 8.5 on
    """A positive number with a unit; where `auto` is allowed it reads as None."""

    name = "size"

    def __init__(self, *, auto: bool = False) -> None:
        self._auto = auto

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "SIZE|auto" if self._auto else "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        if self._auto and value in ("auto", "-1"):  # -1 as in vLLM
            return None
        try:
            number = value if isinstance(value, int) else size(value)
        except ValueError as cause:
            self.fail(str(cause), param, ctx)
        if number <= 0:
            self.fail(f"{value} is not above 0", param, ctx)
        return number


class Sizes(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic from click 8.5 on
    """Rising numbers above 0, read by `sizes`."""

    name = "sizes"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "SIZE,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        try:
            return value if isinstance(value, tuple) else sizes(value)
        except ValueError as cause:
            self.fail(str(cause), param, ctx)


class KvCacheDType(click.Choice):  # type: ignore[type-arg,unused-ignore]
    """A format of the key/value cache. vLLM's others are refused with a reason."""

    def __init__(self) -> None:
        super().__init__(KV_CACHE_DTYPES)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in REFUSED_KV_CACHE_DTYPES:
            self.fail(f"{value} is not done: {REFUSED_KV_CACHE_DTYPES[value]}", param, ctx)
        return super().convert(value, param, ctx)


def chain(*decorators: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several options as one decorator, shown in this order."""

    def decorate(command: Command) -> Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


def json_object(context: click.Context, parameter: click.Parameter, text: str | None) -> dict[str, Any] | None:
    """The JSON object that an option holds; None where it was not given."""
    import json

    try:
        value = None if text is None else json.loads(text)
    except ValueError as cause:
        raise click.BadParameter(f"{text!r} is not valid JSON: {cause}") from None
    if value is not None and not isinstance(value, dict):
        raise click.BadParameter(f'{text!r} is not an object such as {{"42": -100}}')
    return value


def speculation(context: click.Context, parameter: click.Parameter, text: str | None) -> Speculation | None:
    """The setting that an option holds; None where it was not given."""
    given = json_object(context, parameter, text)
    try:
        return None if given is None else Speculation.parse(given)
    except StartError as cause:
        raise click.BadParameter(str(cause)) from None


def range_ratios(text: str) -> tuple[float, float]:
    """(of input lengths, of output lengths) from one number or vLLM's JSON object. Raises BadParameter."""
    import json

    try:
        value = json.loads(text)
        pair = (value["input"], value["output"]) if isinstance(value, Mapping) else (value, value)
        one, other = (float(ratio) for ratio in pair)
    except (ValueError, TypeError, KeyError):
        raise click.BadParameter(f'{text!r} is neither a number nor {{"input": R, "output": R}}') from None
    if not (0 <= one < 1 and 0 <= other < 1):
        raise click.BadParameter(f"{text!r} is not from 0 to below 1")
    return one, other


def setting(name: str, **how: Any) -> Callable[[Command], Command]:
    """An option for EngineConfig's field of that name, with its default."""
    return click.option("--" + name.replace("_", "-"), name, **{"default": DEFAULTS[name], **how})


kv_cache_dtype_option = setting(
    "kv_cache_dtype", type=KvCacheDType(), show_default=True, help="Of keys and values; fp8: half the memory."
)

model_setting = setting(
    "model", metavar="MODEL", show_default=True, help="A folder, GGUF file, or name in Hugging Face's cache."
)

engine_settings = chain(
    setting("device", type=click.Choice(DEVICES), show_default=True, help="Where to compute."),
    setting("dtype", type=click.Choice(DTYPES), show_default=True, help="Of activations."),
    kv_cache_dtype_option,
    setting("load_format", type=click.Choice(LOAD_FORMATS), show_default=True, help="dummy: random weights."),
    setting("max_model_len", type=Size(auto=True), help="Tokens of prompt and output together.  [default: auto]"),
    setting(
        "kv_cache_memory_bytes",
        type=Size(),
        help=f"Of the key/value cache.  [default: what is left of a GPU's share; {in_gib(CPU_CACHE_BYTES)} on a CPU]",
    ),
    setting(
        "block_size",
        default=str(DEFAULTS["block_size"]),
        type=click.Choice([str(tokens) for tokens in BLOCK_SIZES]),
        callback=lambda context, parameter, value: int(value),
        show_default=True,
        help="Tokens of a cache block.",
    ),
    setting("num_gpu_blocks_override", type=click.IntRange(min=1), help="Blocks of the cache, whatever fits."),
    setting(
        "gpu_memory_utilization", type=click.FloatRange(0.01, 1.0), show_default=True, help="Share of a GPU to use."
    ),
    setting(
        "speculative_config",
        metavar="JSON",
        callback=speculation,
        help='Guess tokens where the text repeats: \'{"method": "ngram", "num_speculative_tokens": 7}\'.',
    ),
    setting("enforce_eager", is_flag=True, help="Launch kernels one by one, not as graphs: for debugging."),
    setting("batch_invariant", is_flag=True, help="The same bits for a request whatever else runs; slower."),
    setting("offline", is_flag=True, help="Never fetch the default model."),
)
"""Options that become EngineConfig's fields, but for the model and its text."""

model_settings = chain(
    model_setting,
    setting("tokenizer", metavar="MODEL", help="Take the tokenizer from there instead."),
    click.option(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        default=DEFAULTS["enable_prefix_caching"],
        show_default=True,
        help="Keep what prompts leave in the cache.",
    ),
    setting("max_num_seqs", type=click.IntRange(min=1), show_default=True, help="Sequences that run at once."),
    setting("max_num_batched_tokens", type=Size(), show_default=True, help="Tokens of one step."),
    setting(
        "scheduling_policy",
        type=click.Choice(POLICIES),
        show_default=True,
        help="Who begins first: who came first, or whose priority is the lowest number.",
    ),
    setting(
        "max_logprobs", type=click.IntRange(0), show_default=True, help="Of one token, that a request may ask for."
    ),
    setting("chat_template", metavar="FILE|TEXT", help="A Jinja template instead of the model's own."),
    setting(
        "generation_config",
        metavar="auto|vllm|FOLDER",
        show_default=True,
        help="Where sampling defaults come from: the model, nowhere, or a folder's generation_config.json.",
    ),
    engine_settings,
)
"""Options that become EngineConfig's fields."""


def comma_separated(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> list[int] | None:
    """Whole numbers from `--option 1,2 --option 3`; None where the option was not given."""
    try:
        return [int(part) for value in values for part in value.split(",")] or None
    except ValueError:
        raise click.BadParameter(f"{','.join(values)!r} is not a list of whole numbers such as 2,50256") from None


sampling_options = chain(
    click.option("--temperature", type=float, help="0: always the likeliest token.  [default: 0]"),
    click.option("--top-p", type=float, help="Draw from the likeliest tokens with this share of probability."),
    click.option("--top-k", type=int, help="Draw from this many likeliest tokens; 0: from all."),
    click.option("--min-p", type=float, help="Draw from tokens this fraction as likely as the likeliest."),
    click.option("--repetition-penalty", type=float, help="Above 1: tokens that were there before become unlikely."),
    click.option("--presence-penalty", type=float, help="Subtracted once from tokens of the output."),
    click.option("--frequency-penalty", type=float, help="Subtracted once an occurrence."),
    click.option("--max-tokens", type=int, help="Of output.  [default: to the end of the context]"),
    click.option("--min-tokens", type=int, help="No end of the text before this many."),
    click.option("--stop", multiple=True, metavar="TEXT", help="End where this text comes up; may be repeated."),
    click.option(
        "--stop-token-ids",
        multiple=True,
        metavar="ID,ID,...",
        callback=comma_separated,
        help="End at one of these tokens.",
    ),
    click.option("--ignore-eos", is_flag=True, help="Go on after the end-of-text token."),
    click.option("--logit-bias", metavar="JSON", callback=json_object, help="Added to logits, as in '{\"42\": -100}'."),
    click.option(
        "--structured-outputs",
        metavar="JSON",
        callback=json_object,
        help='The form of the text: \'{"choice": ["yes", "no"]}\', or json (a schema), regex, grammar, json_object.',
    ),
    click.option("--seed", type=int, help="The same seed draws the same tokens."),
)
"""Options that become SamplingParams' fields. The model's generation_config.json stands for those not given."""

_verbose_option = click.option("-v", "--verbose", is_flag=True, help="Say what was decided, too.")
_QUIET: dict[str, Any] = {"is_flag": True, "help": "Nothing on stderr but errors."}

talk_options = chain(click.option("-q", "--quiet", **_QUIET), _verbose_option, debug_option)

long_talk_options = chain(click.option("--quiet", **_QUIET), _verbose_option, debug_option)
"""Without -q, which is vLLM's --quantization where a command stands in for `vllm serve`."""

system_option = click.option("--system", metavar="TEXT", help="A system message before the conversation.")

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def into_file(name: str, **how: Any) -> Callable[[Any], Any]:
    """An option for a file to write, whose folder has to be there."""

    def check(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
        if path and not path.absolute().parent.is_dir():
            raise click.BadParameter(f"there is no folder {path.absolute().parent}")
        return path

    kind = click.Path(dir_okay=False, writable=True, path_type=Path)
    return click.option(name, type=kind, metavar="FILE", callback=check, **how)
