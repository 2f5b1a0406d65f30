"""Python's garbage collector kept out of work that everybody waits for. Knows no work."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Result = TypeVar("Result")


def uncollected(work: Callable[Given, Result]) -> Callable[Given, Result]:
    """The work, in which no garbage is collected: that is done before or after, if it is done at all."""

    @wraps(work)
    def done(*given: Given.args, **named: Given.kwargs) -> Result:
        collects = gc.isenabled()
        gc.disable()
        try:
            return work(*given, **named)
        finally:
            if collects:
                gc.enable()

    return done
