"""Whether decode and the worker may run at once on a GPU, or only in turn, and why."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Sharing:
    """How a GPU is shared, and the reason in words for whoever asks.

    Attributes:
        mode: `spatial`: both at once, on shares of SMs. `temporal`: the worker launches only while
            decode runs no step.
        reason: why it is so.
    """

    mode: Literal["spatial", "temporal"]
    reason: str


@dataclass(frozen=True)
class Ground:
    """What was found on a GPU; a text says why something is missing, "" that it is there.

    Attributes:
        green_missing: why there are no green contexts.
        mps_missing: why there is no MPS daemon.
        decode_partition: `none`: decode runs on every SM and only the worker is capped. `green`: on
            the complement of the worker's share.
        decode_sms: on which decode's share was measured to run; empty: nobody has measured.
        finetune_sms: the worker's, at the same level.
    """

    green_missing: str
    mps_missing: str
    decode_partition: Literal["none", "green"] = "none"
    decode_sms: Set[int] = frozenset()
    finetune_sms: Set[int] = frozenset()


def choose_sharing(ground: Ground) -> Sharing:
    """Spatial where everything it needs is there, else temporal: decode comes first."""
    if ground.green_missing:
        return Sharing("temporal", f"no green contexts: {ground.green_missing}")
    if ground.mps_missing:
        return Sharing("temporal", f"no MPS daemon: {ground.mps_missing}")
    if ground.decode_partition == "none":
        return Sharing("spatial", "the worker is capped, decode runs on every SM")
    if not ground.decode_sms or not ground.finetune_sms:
        return Sharing("temporal", "the SMs of a share could not be measured")
    both = ground.decode_sms & ground.finetune_sms
    if both:
        return Sharing(
            "temporal", f"the shares meet on {len(both)} SMs, {min(both)} among them, as measured"
        )
    return Sharing("spatial", "decode and worker were measured on different SMs")
