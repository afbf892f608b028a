"""`python -m windrow_sidecar.compute.survey`: how this machine's GPU would be shared, as JSON.

A process of its own, so that the caller keeps no context on the GPU: the agent asks before it
starts the MPS daemon, `windrow doctor` for people.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from windrow_sidecar import _core
from windrow_sidecar.compute.mps import CONTROL
from windrow_sidecar.compute.sharing import GpuCapabilities, choose_sharing, green_missing


@dataclass(frozen=True, slots=True)
class Survey:
    """Result of a survey; `gpu` is empty where there is none, and `why` says so.

    Attributes:
        green_missing, mps_missing: as in `GpuCapabilities`; MPS is there where its program is.
        mode, reason: what `choose_sharing` makes of it.
        is_mps_client: whether the process that looked was a client of an MPS daemon.
        uuids: of all GPUs that it sees; None: nobody knows.
    """

    gpu: str = ""
    why: str = ""
    units: int = 0
    green_missing: str = ""
    mps_missing: str = ""
    mode: str = ""
    reason: str = ""
    is_mps_client: bool = False
    uuids: Sequence[str] | None = None


def survey(driver: str = "cuda", path: str | None = None) -> Survey:
    """Look at a GPU.

    Args:
        driver: of the GPU.
        path: where programs are looked for (default: PATH).
    """
    try:
        uuids = _core.gpu_uuids()
    except _core.DriverUnavailable as error:
        return Survey(why=str(error), uuids=())
    try:
        facts = _core.driver(driver).facts
    except _core.Error as error:  # a GPU without room for one more context, say
        return Survey(why=str(error), uuids=uuids)
    green = green_missing(driver)
    found = shutil.which(CONTROL, path=path)
    mps = "" if found else f"{CONTROL} is not on PATH"
    chosen = choose_sharing(GpuCapabilities(green, mps))
    return Survey(
        gpu=facts["name"],
        units=facts["units"],
        green_missing=green,
        mps_missing=mps,
        mode=chosen.mode,
        reason=chosen.reason,
        is_mps_client=facts["is_mps_client"],
        uuids=uuids,
    )


if __name__ == "__main__":
    json.dump(asdict(survey(path=os.environ.get("PATH"))), sys.stdout)
