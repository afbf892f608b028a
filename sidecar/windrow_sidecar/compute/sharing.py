"""Choose whether decode and worker share a GPU in space or in time, by what it offers.

A process that cannot connect to the MPS daemon of its environment runs on without it, and without a
word; so the driver is asked, which knows once the context exists.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from windrow_sidecar import _core

# `none`: decode runs on every SM and only the worker is capped. `green`: decode runs on the
# complement of the worker's share.
DecodePartition = Literal["none", "green"]


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
    """What a GPU offers for sharing; a text says why something is missing, "" that it is there.

    Attributes:
        green_missing: why there are no green contexts.
        mps_missing: why there is no MPS daemon.
        decode_partition: where decode runs beside the worker.
        decode_sms: on which decode's share was measured to run; empty: nobody has measured.
        finetune_sms: the worker's, at the same level.
    """

    green_missing: str
    mps_missing: str
    decode_partition: DecodePartition = "none"
    decode_sms: Set[int] = frozenset()
    finetune_sms: Set[int] = frozenset()


def choose_sharing(capabilities: GpuCapabilities) -> Sharing:
    """Spatial where everything it needs is there, else temporal: decode comes first."""
    if capabilities.green_missing:
        return Sharing("temporal", f"no green contexts: {capabilities.green_missing}")
    if capabilities.mps_missing:
        return Sharing("temporal", f"no MPS daemon: {capabilities.mps_missing}")
    if capabilities.decode_partition == "none":
        return Sharing("spatial", "the worker is capped, decode runs on every SM")
    if not capabilities.decode_sms or not capabilities.finetune_sms:
        return Sharing("temporal", "the SMs of a share could not be measured")
    both = capabilities.decode_sms & capabilities.finetune_sms
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
    """Probe the GPU of that driver for sharing by a process with this environment."""
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
