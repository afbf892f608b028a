"""Read the config maps and secrets that a pod refers to."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import httpx

from windrow_lab.node.api import Api, Json, NodeApiError
from windrow_lab.node.expansion import Lookup

_REFERENCES = {
    "configMapRef": "configMap",
    "configMapKeyRef": "configMap",
    "secretRef": "secret",
    "secretKeyRef": "secret",
}
_COLLECTIONS = {"configMap": "configmaps", "secret": "secrets"}


def references_of(container: Json) -> set[tuple[str, str]]:
    """Return (kind, name) of each config map and secret in a container's environment."""
    return set(_walk([container.get("env"), container.get("envFrom")]))


def _walk(node: Any) -> Iterator[tuple[str, str]]:  # noqa: ANN401
    if isinstance(node, list):
        for item in node:
            yield from _walk(item)
    elif isinstance(node, dict):
        for key, value in node.items():
            if key in _REFERENCES:
                yield _REFERENCES[key], value["name"]
            else:
                yield from _walk(value)


async def fetch(api: Api, namespace: str, references: Iterable[tuple[str, str]]) -> Lookup:
    """Read what is referred to; the result answers for these references only."""
    found = {reference: await read(api, namespace, *reference) for reference in references}

    def lookup(kind: str, name: str) -> Mapping[str, str] | None:
        data = found[kind, name]
        return None if data is None else {key: value.decode() for key, value in data.items()}

    return lookup


async def read(api: Api, namespace: str, kind: str, name: str) -> Mapping[str, bytes] | None:
    """Return the decoded data of a config map or secret, or None when there is none."""
    try:
        found = await api.get(f"/api/v1/namespaces/{namespace}/{_COLLECTIONS[kind]}/{name}")
    except NodeApiError as error:
        if error.code == httpx.codes.NOT_FOUND:
            return None
        raise
    binary = found.get("binaryData") or {}
    data = {key: base64.b64decode(value) for key, value in binary.items()}
    for key, value in (found.get("data") or {}).items():
        data[key] = base64.b64decode(value) if kind == "secret" else value.encode()
    return data
