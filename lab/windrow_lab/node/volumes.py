"""The volumes of a pod as real directories."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from windrow_lab.node.api import Api, Json
from windrow_lab.node.configs import read
from windrow_lab.node.expansion import ConfigError, field_value

# A token is renewed when this share of its lifetime is over, as a kubelet does.
_RENEW_AT = 0.8


@dataclass(frozen=True)
class ProjectedToken:
    """One service-account token that is kept fresh in a file."""

    path: Path
    audience: str
    lifetime_seconds: int


class Volumes:
    """Makes the directories of one pod below `root` and keeps its tokens fresh."""

    def __init__(self, api: Api, pod: Json, root: Path) -> None:
        self._api, self._pod, self._root = api, pod, root
        self._namespace: str = pod["metadata"]["namespace"]
        self._directories: dict[str, Path] = {}
        self._tokens: list[ProjectedToken] = []

    async def prepare(self) -> None:
        """Make all volumes; raises ConfigError when one cannot be made (yet)."""
        self._tokens.clear()
        for volume in self._pod["spec"].get("volumes") or []:
            self._directories[volume["name"]] = await self._make(volume)
        await self.renew_tokens()

    def mounts_of(self, container: Json) -> Mapping[str, Path]:
        """Return mount path -> real directory; raises ConfigError for an unknown volume."""
        mounts: dict[str, Path] = {}
        for mount in container.get("volumeMounts") or []:
            if (directory := self._directories.get(mount["name"])) is None:
                raise ConfigError(f"volume {mount['name']!r} is not defined", field="volumeMounts")
            mounts[mount["mountPath"]] = directory / mount.get("subPath", "")
        return mounts

    async def renew_tokens(self) -> float | None:
        """Write fresh tokens; returns the seconds until they must be renewed, None: never."""
        due = [await self._renew(token) for token in self._tokens]
        return min(due) if due else None

    async def _make(self, volume: Json) -> Path:
        if host_path := volume.get("hostPath"):
            return _host_directory(host_path)
        directory = _own_directory(self._root / volume["name"])
        if "emptyDir" in volume:
            return directory
        if "projected" in volume:
            for source in volume["projected"].get("sources") or []:
                await self._project(source, directory)
            return directory
        for kind, name_field in (("configMap", "name"), ("secret", "secretName")):
            if kind in volume:
                source = volume[kind]
                await self._write_config(kind, source[name_field], source, directory)
                return directory
        if "downwardAPI" in volume:
            self._write_fields(volume["downwardAPI"], directory)
            return directory
        kind = next((key for key in volume if key != "name"), "none")
        raise ConfigError(
            f"a process node has no volumes of the kind {kind}",
            field=f"volumes {volume['name']}",
            remedy="Use emptyDir, hostPath, configMap, secret, downwardAPI or projected.",
        )

    async def _project(self, source: Json, directory: Path) -> None:
        if token := source.get("serviceAccountToken"):
            self._tokens.append(
                ProjectedToken(
                    directory / token["path"],
                    token.get("audience", ""),
                    token.get("expirationSeconds", 3600),
                )
            )
        elif fields := source.get("downwardAPI"):
            self._write_fields(fields, directory)
        else:
            kind = next(iter(source))
            if kind not in ("configMap", "secret"):
                raise ConfigError(f"unknown source {kind!r}", field="projected")
            await self._write_config(kind, source[kind]["name"], source[kind], directory)

    async def _write_config(self, kind: str, name: str, source: Json, directory: Path) -> None:
        data = await read(self._api, self._namespace, kind, name)
        if data is None:
            if source.get("optional"):
                return
            raise ConfigError(f"{kind} {name!r} not found", field="volumes")
        chosen = {item["key"]: item["path"] for item in source.get("items") or []}
        for key, path in (chosen or {key: key for key in data}).items():
            if key in data:
                _write(directory / path, data[key])
            elif not source.get("optional"):
                raise ConfigError(f"{kind} {name!r} has no key {key!r}", field="volumes")

    def _write_fields(self, source: Json, directory: Path) -> None:
        for item in source.get("items") or []:
            if "fieldRef" not in item:
                raise ConfigError("only fieldRef is known in a volume", field="downwardAPI")
            value = field_value(self._pod, item["fieldRef"]["fieldPath"])
            _write(directory / item["path"], value.encode())

    async def _renew(self, token: ProjectedToken) -> float:
        metadata, spec = self._pod["metadata"], self._pod["spec"]
        account = spec.get("serviceAccountName") or "default"
        request = {
            "spec": {
                "audiences": [token.audience] if token.audience else [],
                "expirationSeconds": token.lifetime_seconds,
                "boundObjectRef": {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "name": metadata["name"],
                    "uid": metadata["uid"],
                },
            }
        }
        answer = await self._api.create(
            f"/api/v1/namespaces/{self._namespace}/serviceaccounts/{account}/token", request
        )
        _write(token.path, answer["status"]["token"].encode())
        expires = datetime.fromisoformat(answer["status"]["expirationTimestamp"])
        return max(1.0, (expires - datetime.now(UTC)).total_seconds() * _RENEW_AT)


def _own_directory(path: Path) -> Path:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def _host_directory(source: Json) -> Path:
    path, kind = Path(source["path"]), source.get("type", "")
    if kind == "DirectoryOrCreate":
        path.mkdir(parents=True, exist_ok=True)
    elif kind and not path.exists():
        raise ConfigError(f"hostPath {path} ({kind}) does not exist", field="volumes")
    return path


def _write(path: Path, content: bytes) -> None:
    # Renamed into place: a reader sees the old content or the new, never a part.
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"..{path.name}")
    unfinished.touch(mode=0o600)
    unfinished.write_bytes(content)
    os.replace(unfinished, path)
