"""Requirements of a node of `windrow_lab.realnode` on its machine, and what is missing here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from windrow.errors import UserError

_PACKAGES = {
    "runc": "runc",
    "iptables": "iptables",
    "ip": "iproute2",
    "unshare": "util-linux",
    "mount": "mount",
}
_CNI = (Path("/usr/lib/cni"), Path("/opt/cni/bin"))
_CNI_PACKAGE = "containernetworking-plugins"
CGROUPS = Path("/sys/fs/cgroup")


def missing() -> list[str]:
    """Return what keeps this machine from running a node, in sentences; empty: nothing."""
    found = []
    if os.geteuid() != 0:
        found.append("it needs root")
    filesystems = Path("/proc/filesystems").read_text(encoding="utf-8").split()
    if "overlay" not in filesystems:
        found.append("the kernel has no overlay file system")
    if not (CGROUPS / "cgroup.controllers").exists() and not (CGROUPS / "memory").is_dir():
        found.append(f"no cgroups are mounted at {CGROUPS}")
    if not found and shutil.which("unshare"):
        tried = ["unshare", "--net", "--mount", "--pid", "--fork", "true"]
        if subprocess.run(tried, capture_output=True, check=False).returncode != 0:
            found.append("namespaces cannot be made (a container without privileges?)")
    programs = _missing_packages()
    if programs:
        found.append(f"it needs the Debian packages {' '.join(programs)}, or the same of yours")
    return found


def _missing_packages() -> list[str]:
    absent = [package for program, package in _PACKAGES.items() if not shutil.which(program)]
    return absent if cni_folder() else [*absent, _CNI_PACKAGE]


def cni_folder() -> Path | None:
    """Return where the plugins of the pods' network lie, None where there are none."""
    return next((folder for folder in _CNI if (folder / "ptp").exists()), None)


def install_packages() -> None:
    """Install the Debian packages that are missing, where that is possible."""
    packages = _missing_packages()
    if not packages or os.geteuid() != 0 or not shutil.which("apt-get"):
        return
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for arguments in (["update", "-qq"], ["install", "-y", "-qq", *packages]):
        subprocess.run(["apt-get", *arguments], env=environment, check=False, stdout=sys.stderr)


def check() -> None:
    """Install what can be, and refuse a machine that cannot run a node.

    Raises:
        UserError: with all that is missing.
    """
    install_packages()
    if lacks := missing():
        raise UserError(
            f"this machine cannot run a node: {'; '.join(lacks)}", reason="NodeNotPossible"
        )
