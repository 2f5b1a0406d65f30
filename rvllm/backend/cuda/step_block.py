"""The step block: every input of a step in one piece of memory, for one copy. Knows offsets and padding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rvllm.program.program import Int32, Step

ALIGNMENT_BYTES = 256
PADDING_SLOT = -1  # a token of padding writes nothing to the cache


@dataclass(frozen=True, slots=True)
class Field:
    """An int32 array of the block. `padding` fills what a step does not."""

    offset: int
    shape: tuple[int, ...]
    padding: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each input lies, by the name of its tensor."""

    fields: Mapping[str, Field]
    nbytes: int


def layout(tokens: int, rows: int, sequences: int, groups: int, max_blocks: int) -> Layout:
    """Room for steps of up to these sizes."""
    shapes: dict[str, tuple[tuple[int, ...], int]] = {
        "ids": ((tokens,), 0),
        "positions": ((tokens,), 0),
        "lengths": ((tokens,), 0),
        "query_starts": ((sequences + 1,), 0),
        "kv_lengths": ((sequences,), 0),
        "rows": ((rows,), 0),
    }
    for group in range(groups):
        shapes[f"slots.{group}"] = ((tokens,), PADDING_SLOT)
        shapes[f"block_tables.{group}"] = ((sequences, max_blocks), 0)
    fields = {}
    offset = 0
    for name, (shape, padding) in shapes.items():
        fields[name] = Field(offset, shape, padding)
        nbytes = 4 * math.prod(shape)
        offset += -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return Layout(fields, offset)


def views(memory: npt.NDArray[np.uint8], where: Layout) -> dict[str, Int32]:
    """Each field of a block in host memory as an array."""
    return {
        name: memory[field.offset : field.offset + 4 * math.prod(field.shape)].view(np.int32).reshape(field.shape)
        for name, field in where.fields.items()
    }


def fill(arrays: Mapping[str, Int32], where: Layout, step: Step) -> None:
    """Write the step into a block's arrays; what it does not reach is padding."""
    for name, values in step.inputs().items():
        target = arrays[name]
        if values.shape == target.shape:
            target[...] = values
        elif values.ndim == 1:
            target[: len(values)] = values
            target[len(values) :] = where.fields[name].padding
        else:  # a block table: what is behind a sequence's blocks is never read
            target[: values.shape[0], : values.shape[1]] = values
