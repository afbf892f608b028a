"""Choose whether decode and worker share a GPU in space or in time, by what it offers.

A process that cannot connect to the MPS daemon of its environment runs on without it, and without a
word; so the driver is asked, which knows once the context exists.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from windrow.conditions import Reason
from windrow.errors import UserError
from windrow.rundir import ENV_SHARING
from windrow_sidecar import _core

# `none`: decode runs on every SM and only the worker is capped. `green`: decode runs on the
# complement of the worker's share.
DecodePartition = Literal["none", "green"]
ENV_PARTITION = "WINDROW_DECODE_PARTITION"  # "none" (the default) or "green"


@dataclass(frozen=True, slots=True)
class Lack:
    """Reason why sharing in space is not possible.

    Attributes:
        code: as one of the reasons of the slot's condition SharedInSpace.
        text: in words.
    """

    code: Reason
    text: str


@dataclass(frozen=True)
class Sharing:
    """Way in which a GPU is shared, with the reason in words.

    Attributes:
        mode: `spatial`: both at once, on shares of SMs. `temporal`: the worker launches only while
            decode runs no step.
        reason: why it is so.
        code: the same as one of the reasons of the slot's condition SharedInSpace.
    """

    mode: Literal["spatial", "temporal"]
    reason: str
    code: str = Reason.REASON_NOT_SAID


@dataclass(frozen=True)
class GpuCapabilities:
    """Capabilities of a GPU for sharing; a text says why one is missing, "" that it is there.

    Attributes:
        green_missing: why there are no green contexts.
        mps_missing: why there is no MPS daemon.
        decode_partition: where decode runs beside the worker.
        decode_sms: on which decode's share was measured to run; empty: nobody has measured.
        finetune_sms: the worker's, at the same level.
        mps_code: why there is no MPS daemon, as a reason of a condition.
    """

    green_missing: str
    mps_missing: str
    decode_partition: DecodePartition = "none"
    decode_sms: Set[int] = frozenset()
    finetune_sms: Set[int] = frozenset()
    mps_code: Reason = Reason.NO_MPS_DAEMON


def choose_sharing(capabilities: GpuCapabilities) -> Sharing:
    """Spatial where everything it needs is there, else temporal: decode comes first."""
    if capabilities.green_missing:
        why = f"no green contexts: {capabilities.green_missing}"
        return Sharing("temporal", why, Reason.NO_GREEN_CONTEXTS)
    if capabilities.mps_missing:
        why = f"no MPS daemon: {capabilities.mps_missing}"
        return Sharing("temporal", why, capabilities.mps_code)
    if capabilities.decode_partition == "none":
        why = "the worker is capped, decode runs on every SM"
        return Sharing("spatial", why, Reason.MPS_CLIENTS)
    if not capabilities.decode_sms or not capabilities.finetune_sms:
        why = "the SMs of a share could not be measured"
        return Sharing("temporal", why, Reason.SHARES_MEET)
    both = capabilities.decode_sms & capabilities.finetune_sms
    if both:
        why = f"the shares meet on {len(both)} SMs, {min(both)} among them, as measured"
        return Sharing("temporal", why, Reason.SHARES_MEET)
    why = "decode and worker were measured on different SMs"
    return Sharing("spatial", why, Reason.MPS_CLIENTS)


# The folder in which a daemon's clients find it (see `mps.MpsDaemon.environment`), and its
# entry as long as the daemon runs.
PIPE_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"
CONTROL_PIPE = "control"
# Set by decode's start for its processes, where it brought up no daemon: "CODE: TEXT" of the lack.
WITHOUT_MPS = "WINDROW_WITHOUT_MPS"
ASKED_IN_TIME = Lack(Reason.POLICY_TEMPORAL, "the policy says sharing: temporal")


def probe(driver: str, environ: Mapping[str, str]) -> GpuCapabilities:
    """Probe the GPU of that driver for sharing by a process with this environment."""
    lack = find_mps_lack(driver, environ)
    return GpuCapabilities(
        green_missing=green_missing(driver),
        mps_missing=lack.text if lack else "",
        mps_code=lack.code if lack else Reason.MPS_CLIENTS,
    )


def green_missing(driver: str) -> str:
    """Say why that GPU has no shares of SMs; "" where it has."""
    try:
        _core.driver(driver).partition()
    except _core.Error as error:
        return str(error)
    return ""


def find_mps_lack(driver: str, environ: Mapping[str, str]) -> Lack | None:
    """Say why this process is not a client of the daemon that its environment names; None: it is.

    Args:
        driver: of the GPU; this process has a context on it from now on.
        environ: with which this process first used CUDA.
    """
    if environ.get(ENV_SHARING) == "temporal":
        return ASKED_IN_TIME
    folder = environ.get(PIPE_DIRECTORY)
    if not folder:
        text = f"{PIPE_DIRECTORY} is not set: no daemon was started for this slot"
        return _told_lack(environ) or Lack(Reason.NO_MPS_DAEMON, text)
    if not (Path(folder) / CONTROL_PIPE).exists():
        return Lack(Reason.OTHER_PIPE_DIRECTORY, f"no daemon answers in {folder}")
    if not _core.driver(driver).facts["is_mps_client"]:
        return Lack(
            Reason.MPS_NOT_CONNECTED,
            f"the driver did not connect this process to the daemon in {folder} "
            "(another user, another GPU, or too many clients; its log says which)",
        )
    return None


def asked_partition(environment: Mapping[str, str]) -> DecodePartition:
    """Return how decode's compute is to be confined. Raises UserError for no such way."""
    wanted = environment.get(ENV_PARTITION, "") or "none"
    if wanted not in ("none", "green"):
        raise UserError(
            f"decode cannot be confined by {wanted!r}",
            field=ENV_PARTITION,
            remedy="Write none or green.",
        )
    return cast("DecodePartition", wanted)


def told_lack(lack: Lack) -> str:
    """Return a lack as `WITHOUT_MPS` has it."""
    return f"{lack.code}: {lack.text}"


def _told_lack(environ: Mapping[str, str]) -> Lack | None:
    code, _, text = environ.get(WITHOUT_MPS, "").partition(": ")
    return Lack(Reason(code), text) if code in set(Reason) else None
