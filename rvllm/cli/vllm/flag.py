"""A flag of vLLM and what becomes of it here. Knows no flag by name, and not how a command reads them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class Treatment(Enum):
    HONOURED = "honoured"
    ACCEPTED = "accepted"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of vLLM.

    names       as they are typed, the one to speak of first
    off_names   that turn a switch off
    switch      it has no value
    several     it takes values up to the next option
    as_ever     values that ask for what is done anyway, vLLM's default first: nothing is said. True, False of a switch
    reason      why it changes nothing here, or is not done; empty where it is honoured
    way_out     what to do instead, or None
    server      it is about HTTP, so that commands without a server do not have it
    """

    names: tuple[str, ...]
    off_names: tuple[str, ...]
    switch: bool
    several: bool
    as_ever: tuple[str, ...]
    treatment: Treatment
    reason: str
    way_out: str | None
    server: bool

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def default(self) -> str:
        return self.as_ever[0]

    def asks_nothing(self, value: object) -> bool:
        """Whether the value asks for what is done anyway."""
        return any(_same(str(value), known) for known in self.as_ever)


def _same(one: str, other: str) -> bool:
    try:
        return float(one) == float(other)
    except ValueError:
        return one.casefold() == other.casefold()


def read(
    line: str, treatment: Treatment, reason: str = "", way_out: str | None = None, *, server: bool = False
) -> Flag:
    """A flag from `NAMES[/OFF-NAMES] [LIST] = DEFAULT [| VALUE]...`; a `/` makes it a switch, OFF-NAMES or not.

    A switch that is spelled --enable-x or --disable-x also has the --no- forms of vLLM's older versions.
    """
    spelling, _, values = line.partition(" = ")
    words = spelling.split()
    several = words[-1] == "LIST"
    on, slash, off = " ".join(words[:-1] if several else words).partition("/")
    names, off_names = on.split(), off.split()
    if off_names:
        prefixes = ("--enable-", "--disable-")
        off_names += ["--no-" + name[2:] for name in names if name.startswith(prefixes)]
    as_ever = tuple(value.strip() for value in values.split(" | "))
    return Flag(
        tuple(names), tuple(dict.fromkeys(off_names)), bool(slash), several, as_ever, treatment, reason, way_out, server
    )


def flags(
    treatment: Treatment, reason: str, lines: str, *, way_out: str | None = None, server: bool = False
) -> Iterator[Flag]:
    """The flags of a paragraph, one a line, which share a treatment and its reason."""
    for line in lines.strip().splitlines():
        yield read(line.strip(), treatment, reason, way_out, server=server)


def honoured(lines: str, *, server: bool = False) -> Iterator[Flag]:
    return flags(Treatment.HONOURED, "", lines, server=server)


def accepted(reason: str, lines: str, *, server: bool = False) -> Iterator[Flag]:
    return flags(Treatment.ACCEPTED, reason, lines, server=server)


def refused(reason: str, lines: str, way_out: str | None = None, *, server: bool = False) -> Iterator[Flag]:
    return flags(Treatment.REFUSED, reason, lines, way_out=way_out, server=server)
