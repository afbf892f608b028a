"""Check whether torch can use a GPU here, and which driver its build for CUDA needs."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

import torch

from windrow.errors import UserError

# The oldest driver that runs programs built for a major version of CUDA (NVIDIA's table of minor
# version compatibility).
_OLDEST_DRIVER = {11: "R450", 12: "R525", 13: "R580"}


@dataclass(frozen=True, slots=True)
class TorchCuda:
    """Finding about torch and CUDA.

    Attributes:
        torch: version.
        built_for: CUDA that torch was built for, as "13.2"; "" for a torch without CUDA.
        driver: newest CUDA that the driver here knows, as "12.5"; "" where there is none.
        gpus: that torch sees.
        visible: CUDA_VISIBLE_DEVICES; None: not set.
    """

    torch: str
    built_for: str
    driver: str
    gpus: int
    visible: str | None

    @property
    def oldest_driver(self) -> str:
        """NVIDIA's driver that this torch needs at least."""
        major = int(self.built_for.partition(".")[0] or 0)
        return f"{_OLDEST_DRIVER.get(major, f'for CUDA {major}')} or newer"

    @property
    def versions(self) -> str:
        """Torch's CUDA beside the driver's."""
        built = f"CUDA {self.built_for}" if self.built_for else "no CUDA"
        driver = f"the driver's CUDA is {self.driver}" if self.driver else "there is no driver"
        return f"torch {self.torch} is built for {built}, {driver}"

    @property
    def missing(self) -> str:
        """Reason why torch sees no GPU; "" where it sees one."""
        if self.gpus:
            return ""
        if not self.built_for:
            return f"torch {self.torch} is built without CUDA"
        if self.driver and self.visible is not None and not self._driver_is_too_old:
            return f"{self.versions}, and CUDA_VISIBLE_DEVICES is {self.visible!r}"
        return self.versions

    @property
    def remedy(self) -> str:
        """Remedy for it."""
        if not self.built_for:
            return "Install a torch that is built for CUDA."
        if not self.driver:
            return (
                f"Install NVIDIA's driver, {self.oldest_driver}, or give the container a GPU "
                "(nvidia.com/gpu)."
            )
        if self._driver_is_too_old:
            major = self.driver.partition(".")[0]
            return (
                f"Update NVIDIA's driver to {self.oldest_driver}, or install a torch that is built "
                f"for CUDA {major}."
            )
        return "Let CUDA_VISIBLE_DEVICES name a GPU of this machine, and see what nvidia-smi says."

    @property
    def _driver_is_too_old(self) -> bool:
        """Programs of a newer minor version run, those of a newer major version do not."""
        return int(self.driver.partition(".")[0]) < int(self.built_for.partition(".")[0])


def look_at_torch() -> TorchCuda:
    """Ask torch and the driver; nothing is initialised, so an allocator may still be chosen."""
    built_for = torch.version.cuda or ""
    version = driver_version()
    return TorchCuda(
        torch=torch.__version__,
        built_for=built_for,
        driver=f"{version // 1000}.{version % 1000 // 10}" if version else "",
        gpus=torch.cuda.device_count() if torch.cuda.is_available() else 0,
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )


def driver_version() -> int:
    """Return the newest CUDA that the driver here knows, 12050 for 12.5; 0: there is no driver."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value


def require_torch_cuda(field: str) -> TorchCuda:
    """Return what torch sees.

    Raises:
        UserError: no GPU; says torch's CUDA and the driver's, and which of them to change.
    """
    found = look_at_torch()
    if found.missing:
        raise UserError(
            f"torch sees no GPU here: {found.missing}",
            field=field,
            remedy=f"{found.remedy} Without a GPU, use the host (cpu).",
            reason="NoCudaDevice",
        )
    return found
