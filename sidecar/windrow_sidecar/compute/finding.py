"""Find the compute device of a name."""

from __future__ import annotations

import re

from windrow.errors import UserError
from windrow_sidecar.compute.device import ComputeDevice
from windrow_sidecar.compute.host_device import HostDevice

_NAMES = re.compile(r"(cpu|host)|cuda(?::(\d+))?")


def find_device(name: str, *, field: str = "--device") -> ComputeDevice:
    """Return the device of that name: "cpu" (or "host"), "cuda" (the first GPU), or "cuda:N".

    Raises:
        UserError: no such name, or no such device here.
    """
    found = _NAMES.fullmatch(name)
    if found is None:
        raise UserError(
            f"{name!r} is not a valid device", field=field, remedy="Write cpu, cuda, or cuda:N."
        )
    if found[1]:
        return HostDevice()
    from windrow_sidecar.compute.cuda_device import CudaDevice

    return CudaDevice(int(found[2] or 0), field=field)
