"""Open the device that the engine's settings name."""

from __future__ import annotations

from windrow_sidecar.engines.builtin.settings import EngineSettings
from windrow_sidecar.engines.builtin.threads import Threads
from windrow_sidecar.engines.confined import GraphShares, confine
from windrow_sidecar.engines.device import EngineDevice, open_cores, open_gpu


def open_device(settings: EngineSettings, threads: Threads) -> EngineDevice:
    """Return the device that was asked for.

    Raises:
        UserError: it is not there, torch cannot use it, or decode cannot be confined on it.
    """
    if settings.in_engine:
        return open_cores(threads, shared=False, in_turns=True)
    if settings.device == "cpu":
        alone = settings.run_dir is None and settings.profile_only is None
        return open_cores(threads, shared=not alone)
    gpu = open_gpu(settings.device)
    if settings.decode_partition == "none":
        return gpu
    return confine(gpu, GraphShares(settings.device))
