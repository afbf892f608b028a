"""Find etcd, kube-apiserver and kube-controller-manager."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from windrow.errors import UserError
from windrow_lab.machine.tools_cache import KUBERNETES_VERSION, cached_tools

log = logging.getLogger(__name__)

NAMES = ("etcd", "kube-apiserver", "kube-controller-manager")
ENV_ASSETS = "KUBEBUILDER_ASSETS"


@dataclass(frozen=True)
class Tools:
    """The executables of one control plane, all from one place so that their versions agree."""

    etcd: Path
    kube_apiserver: Path
    kube_controller_manager: Path
    origin: str

    @classmethod
    def in_directory(cls, directory: Path, origin: str) -> Tools:
        """Name the three executables of a directory that holds them."""
        etcd, apiserver, manager = (directory / name for name in NAMES)
        return cls(etcd, apiserver, manager, origin)


def find_tools(
    explicit: Path | None = None, environment: Mapping[str, str] | None = None
) -> Tools | None:
    """Return the first complete set of: `explicit`, PATH, KUBEBUILDER_ASSETS, our cache.

    A place that lacks one of the three is passed over, because mixed versions fail in ways that
    are hard to read. Raises UserError when `explicit` is given and incomplete.
    """
    environment = os.environ if environment is None else environment
    if explicit is not None:
        if missing := missing_in(explicit):
            raise UserError(
                f"{explicit} holds no executable {', '.join(missing)}",
                field="tools",
                remedy=f"Name a directory with {', '.join(NAMES)}.",
                reason="ToolsMissing",
            )
        return Tools.in_directory(explicit, origin=str(explicit))
    if on_path := _on_path(environment.get("PATH")):
        return on_path
    if assets := environment.get(ENV_ASSETS):
        if not (missing := missing_in(Path(assets))):
            return Tools.in_directory(Path(assets), origin=ENV_ASSETS)
        log.warning("%s=%s holds no %s: not used", ENV_ASSETS, assets, ", ".join(missing))
    if cached := cached_tools(environment):
        return Tools.in_directory(cached, origin=f"cache ({KUBERNETES_VERSION})")
    return None


def _on_path(path: str | None) -> Tools | None:
    found = [Path(program) for name in NAMES if (program := shutil.which(name, path=path))]
    if len(found) < len(NAMES):
        return None
    etcd, apiserver, manager = found
    return Tools(etcd, apiserver, manager, origin="PATH")


def missing_in(directory: Path) -> list[str]:
    """Return which of the three executables a directory lacks."""
    return [name for name in NAMES if not os.access(directory / name, os.X_OK)]
