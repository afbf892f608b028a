"""What a GPU and this process's environment offer for sharing (see `mode.Ground`).

A process that cannot connect to the MPS daemon of its environment runs on without it, and without a
word; so the driver is asked, which knows once the context exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from windrow_sidecar import _core
from windrow_sidecar.compute.mode import Ground

# The folder in which a daemon's clients find it (see `mps.MpsDaemon.environment`), and what lies
# there as long as it runs.
PIPE_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"
_CONTROL = "control"


def look(driver: str, environ: Mapping[str, str]) -> Ground:
    """Look at the GPU of that driver, as a process with this environment would share it."""
    return Ground(green_missing=green_missing(driver), mps_missing=mps_missing(driver, environ))


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
