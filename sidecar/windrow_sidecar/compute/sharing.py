"""Whether decode and the worker may run at once on a GPU, and what of it the GPU offers.

A process that cannot connect to the MPS daemon of its environment runs on without it, and without a
word; so the driver is asked, which knows once the context exists.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from windrow_sidecar import _core


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
class GpuCapabilities:
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


def choose_sharing(ground: GpuCapabilities) -> Sharing:
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


# The folder in which a daemon's clients find it (see `mps.MpsDaemon.environment`), and what lies
# there as long as it runs.
PIPE_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"
_CONTROL = "control"


def probe(driver: str, environ: Mapping[str, str]) -> GpuCapabilities:
    """Look at the GPU of that driver, as a process with this environment would share it."""
    return GpuCapabilities(
        green_missing=green_missing(driver), mps_missing=mps_missing(driver, environ)
    )


def green_missing(driver: str) -> str:
    """Say why that GPU has no shares of SMs; "" where it has."""
    try:
        _core.driver(driver).partition()
    except _core.Error as error:
        return str(error)
    return ""


def mps_missing(driver: str, environ: Mapping[str, str]) -> str:
    """Say why this process is no client of the daemon that its environment names; "" where it is.

    Args:
        driver: of the GPU; this process has a context on it from now on.
        environ: with which this process first used CUDA.
    """
    folder = environ.get(PIPE_DIRECTORY)
    if not folder:
        return f"{PIPE_DIRECTORY} is not set: no daemon was started for this slot"
    if not (Path(folder) / _CONTROL).exists():
        return f"no daemon answers in {folder}"
    if not _core.driver(driver).facts["is_mps_client"]:
        return (
            f"the driver did not connect this process to the daemon in {folder} "
            "(another user, another GPU, or too many clients; its log says which)"
        )
    return ""
