"""Which card to reckon with: named by the user, or the one in this machine. Knows names; measures nothing."""

from __future__ import annotations

import click

from rvllm.backend.cuda.driver import devices
from rvllm.errors import DeviceError
from rvllm.program.cost import DEVICES, Device, card_named

DEFAULT_GPU = "h200"

gpu_option = click.option(
    "--gpu",
    type=click.Choice(list(DEVICES), case_sensitive=False),
    help=f"The card to reckon with.  [default: the one found, else {DEFAULT_GPU}]",
)


def card_found() -> Device | None:
    """This machine's first GPU, if there is one that we know."""
    try:
        return card_named(devices()[0].name)
    except DeviceError:
        return None


def card_for(asked: str | None) -> Device:
    """The card asked for, else the one found, else the default."""
    return DEVICES[asked] if asked else card_found() or DEVICES[DEFAULT_GPU]
