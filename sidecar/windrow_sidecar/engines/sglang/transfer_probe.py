"""Register memory of two handles with a transfer library, as a decode instance registers its KV.

Run by `transfers.RangeProbe`. The last line of output is `{"refused": "why"}`; "": it worked.
"""

from __future__ import annotations

import argparse
import json
import sys
import uuid
from collections.abc import Sequence

import torch

from windrow_sidecar._core import Arena
from windrow_sidecar.memory.geometry import KvShape, geometry_for
from windrow_sidecar.memory.tensors import kv_tensor

_BLOCK_BYTES = 2 << 20  # what a GPU's virtual memory maps
_HANDLES = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Register, release, print the answer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", required=True, choices=("mooncake", "nixl"))
    parser.add_argument("--device", required=True, help="cuda:N, or cpu")
    parser.add_argument("--ib-device", help="as SGLang's --disaggregation-ib-device")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    refused = ""
    try:
        register = _mooncake if options.backend == "mooncake" else _nixl
        register(_keys(device), device.index or 0, options.ib_device)
    except Exception as error:  # noqa: BLE001 - whatever a library raises is the answer
        refused = (str(error).strip() or type(error).__name__).splitlines()[0]
    print(json.dumps({"refused": refused}), flush=True)
    return 0


def _keys(device: torch.device) -> torch.Tensor:
    """Return the keys of an arena of one layer: a range of bytes over two handles.

    They keep the arena alive.
    """
    shape = KvShape(layers=1, kv_heads=1, head_dim=64, dtype_bytes=2)
    geometry = geometry_for(
        shape, block_bytes=_BLOCK_BYTES, arena_bytes=_HANDLES * 2 * _BLOCK_BYTES
    )
    driver = "host" if device.type == "cpu" else str(device)
    arena = Arena.create(geometry, reserved_chunks=1, driver=driver)
    keys = kv_tensor(arena, 0, torch.float16, value=False)
    if keys.nbytes != _HANDLES * _BLOCK_BYTES or not keys.is_contiguous():
        raise RuntimeError(f"the range has {keys.nbytes} bytes, not {_HANDLES * _BLOCK_BYTES}")
    return keys


def _mooncake(keys: torch.Tensor, gpu: int, ib_device: str | None) -> None:
    from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
        MooncakeTransferEngine,
    )
    from sglang.srt.utils.network import get_local_ip_auto

    engine = MooncakeTransferEngine(get_local_ip_auto(), gpu, ib_device)
    if code := engine.batch_register([keys.data_ptr()], [keys.nbytes]):
        raise RuntimeError(f"Mooncake's registration returned {code}")
    engine.batch_deregister([keys.data_ptr()])


def _nixl(keys: torch.Tensor, gpu: int, ib_device: str | None) -> None:
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(str(uuid.uuid4()), nixl_agent_config(backends=[]))
    agent.create_backend("UCX", {"device_list": ib_device} if ib_device else {})
    kind = "VRAM" if keys.is_cuda else "DRAM"
    registered = agent.register_memory([(keys.data_ptr(), keys.nbytes, gpu, "")], kind)
    if not registered:
        raise RuntimeError("NIXL registered nothing")
    agent.deregister_memory(registered)


if __name__ == "__main__":
    sys.exit(main())
