"""The tiers that kernels are built for: architectures, PTX versions, the GPUs they run on. Data only.

A tier's PTX runs on its own architecture and all later ones; an "a" tier's on its own alone. The `.version` line
decides which drivers load it, so it is the lowest that the tier's instructions need, whatever the compiler writes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tier:
    """`number` is what kernels see as TIER; `targets` are the GPUs that ptxas must assemble its PTX for."""

    name: str
    number: int
    ptx_version: str
    targets: tuple[str, ...]

    @property
    def architecture(self) -> str:
        """The suffix of compute_ and sm_."""
        return self.name.removeprefix("t")


TIERS = {
    tier.name: tier
    for tier in (
        Tier("t70", 70, "8.0", ("70", "75", "80", "86", "89", "90", "100", "120")),
        Tier("t75", 75, "8.0", ("75", "80", "86", "89", "90", "100", "120")),
        Tier("t80", 80, "8.0", ("80", "86", "89", "90", "100", "120")),
        Tier("t89", 89, "8.4", ("89", "90", "100", "120")),  # 8.4: FP8 matrix products
        Tier("t90", 90, "8.0", ("90", "100", "120")),
        Tier("t90a", 90, "8.0", ("90a",)),
    )
}

MINIMUM_DRIVERS = {"8.0": 525, "8.1": 530, "8.2": 535, "8.3": 545, "8.4": 550}
"""The first driver branch whose CUDA knows a PTX version (NVIDIA's release notes)."""

OLDEST_PTXAS = {"8.0": "12.0.140", "8.4": "12.4.131"}
"""The ptxas that is as old as the oldest driver which a PTX version promises to load on."""

NEWEST_PTXAS = "12.9.86"
"""The only ptxas that knows every target, from sm_70 on."""
