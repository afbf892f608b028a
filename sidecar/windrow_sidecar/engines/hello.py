"""Build the first message of an engine to its pod's agent, the same for every engine."""

from __future__ import annotations

import os

from windrow.proto import agent_pb2
from windrow.rundir import PROTOCOL_VERSION, RunDir
from windrow_sidecar._core import Arena, driver
from windrow_sidecar.engines.device import EngineDevice
from windrow_sidecar.engines.profile import Subject


def engine_hello(
    subject: Subject,
    arena: Arena,
    device: EngineDevice,
    run_dir: RunDir,
    *,
    model: str,
    endpoint: str,
    chats: str = "",
    adapters: agent_pb2.AdapterLimits | None = None,
) -> agent_pb2.EngineHello:
    """Build the hello of an engine of this process.

    Args:
        subject: what its latency profile is about.
        arena: of its KV.
        device: that it runs on.
        run_dir: that it shares with the agent, as its slot sees it.
        model: path or name of the served model.
        endpoint: URL at which it serves.
        chats: form in which it gives requests with turns to its chat template, of
            `windrow.served_chats`; "": it takes none.
        adapters: its limits on those that it loads; None: none are known.
    """
    sharing = device.sharing
    return agent_pb2.EngineHello(
        protocol_version=PROTOCOL_VERSION,
        slot=run_dir.slot,
        pid=os.getpid(),
        engine=subject.engine,
        engine_version=subject.engine_version,
        model=model,
        model_fingerprint=subject.model_fingerprint,
        device=subject.device,
        driver=subject.driver,
        compute_units=device.units,
        finetune_levels=device.finetune_levels,
        chunk_bytes=arena.geometry.chunk_bytes,
        chunks=arena.geometry.chunks,
        tensor_parallel=subject.tensor_parallel,
        endpoint=endpoint,
        arena_socket=str(run_dir.arena_socket()),
        weights_manifest=str(run_dir.weights_manifest()),
        sharing=sharing.mode if sharing else "",
        sharing_reason=sharing.reason if sharing else "",
        sharing_code=sharing.code if sharing else "",
        device_uuid=driver(device.driver).facts["uuid"],
        cores=device.cores,
        chats=chats,
        adapters=adapters,
    )
