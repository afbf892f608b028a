"""Describe the machine and the versions that a figure was measured with."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

# Of the machine: before this process leaves cores to what it measures.
_CORES = len(os.sched_getaffinity(0))
_PACKAGES = ("windrow-harvest", "torch", "transformers", "peft", "numpy")


def environment() -> dict[str, Any]:
    """Return processor, memory, GPU, versions and the load of the moment."""
    return {
        "cpu": _cpu_model(),
        "cores": _CORES,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": _gpu(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "load_average_before": round(os.getloadavg()[0], 2),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _gpu() -> str | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)))
    except pynvml.NVMLError:
        return None
