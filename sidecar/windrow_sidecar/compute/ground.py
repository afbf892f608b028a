"""What a GPU and this process's environment offer for sharing (see `mode.Ground`)."""

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
    return Ground(green_missing=green_missing(driver), mps_missing=mps_missing(environ))


def green_missing(driver: str) -> str:
    """Say why that GPU has no shares of SMs; "" where it has."""
    try:
        _core.driver(driver).partition()
    except _core.Error as error:
        return str(error)
    return ""


def mps_missing(environ: Mapping[str, str]) -> str:
    """Say why a process with this environment is no client of an MPS daemon; "" where it is one."""
    folder = environ.get(PIPE_DIRECTORY)
    if not folder:
        return f"{PIPE_DIRECTORY} is not set: no daemon was started for this slot"
    if not (Path(folder) / _CONTROL).exists():
        return f"no daemon answers in {folder}"
    return ""
