"""Find etcd, kube-apiserver and kube-controller-manager; the cache of built executables.

A cached build is whole and proved by a manifest, or it does not count.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from windrow.errors import UserError

KUBERNETES_VERSION = "v1.36.3"
ETCD_VERSION = "v3.6.14"
CONTAINERD_VERSION = "v2.4.2"
COREDNS_VERSION = "v1.13.1"
HELM_VERSION = "v4.2.4"
VERSITYGW_VERSION = "v1.8.0"
KUEUE_VERSION = "v0.17.0"
MANIFEST = "manifest.json"

# What is built together, by name: the versions that its folder is named after.
CONTROL_PLANE, NODE, OBJECT_STORE, KUEUE = "controlplane", "node", "objectstore", "kueue"
_VERSIONS = {
    CONTROL_PLANE: f"{KUBERNETES_VERSION}-etcd-{ETCD_VERSION}",
    NODE: f"{KUBERNETES_VERSION}-containerd-{CONTAINERD_VERSION}-coredns-{COREDNS_VERSION}"
    f"-helm-{HELM_VERSION}",
    OBJECT_STORE: VERSITYGW_VERSION,
    KUEUE: KUEUE_VERSION,
}


@dataclass(frozen=True)
class BuiltFile:
    """One executable as the manifest knows it."""

    name: str
    n_bytes: int
    sha256: str
    mtime_ns: int


def cache_root(environment: Mapping[str, str], kit: str = CONTROL_PLANE) -> Path:
    """Return the directory below the user's cache that is ours; it need not exist."""
    base = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME", "~"), ".cache")
    return Path(base).expanduser() / "windrow" / kit


def cache_directory(environment: Mapping[str, str], kit: str = CONTROL_PLANE) -> Path:
    """Return where the executables of the wanted versions belong."""
    return cache_root(environment, kit) / _VERSIONS[kit]


def cached_tools(environment: Mapping[str, str]) -> Path | None:
    """Return the directory of the cached executables if it is whole, else None."""
    directory = cache_directory(environment)
    return directory if is_whole(directory) else None


def write_manifest(
    directory: Path, names: tuple[str, ...], go_version: str, kit: str = CONTROL_PLANE
) -> None:
    """Seal a finished build; the manifest is the last file that is written."""
    manifest = {
        "versions": _VERSIONS[kit],
        "go": go_version,
        "files": [asdict(_describe(directory / name)) for name in names],
    }
    unfinished = directory / f"{MANIFEST}.tmp"
    unfinished.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(directory / MANIFEST)


def is_whole(directory: Path) -> bool:
    """Tell whether each file is as the manifest describes it.

    The checksum is taken only when size or time of change differ from the manifest (230 MB take
    most of a second, and this runs at each start).
    """
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        wanted = [BuiltFile(**fields) for fields in manifest["files"]]
        return bool(wanted) and all(_is_as_described(directory, file) for file in wanted)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _is_as_described(directory: Path, wanted: BuiltFile) -> bool:
    path = directory / wanted.name
    status = path.stat()
    if status.st_size != wanted.n_bytes or not os.access(path, os.X_OK):
        return False
    return status.st_mtime_ns == wanted.mtime_ns or _sha256(path) == wanted.sha256


def _describe(path: Path) -> BuiltFile:
    status = path.stat()
    return BuiltFile(path.name, status.st_size, _sha256(path), status.st_mtime_ns)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
