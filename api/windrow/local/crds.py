"""Brings our custom resource definitions into an API server, from the files a cluster gets."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import httpx
import yaml

from windrow.errors import WindrowError
from windrow.local.resources import resource_directory

_COLLECTION = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


def apply_crds(client: httpx.Client, within: timedelta = timedelta(seconds=30)) -> list[str]:
    """Apply `crds/*.yaml` and wait until they are served; returns their names."""
    names = [_apply(client, path) for path in sorted(resource_directory("crds").glob("*.yaml"))]
    deadline = time.monotonic() + within.total_seconds()
    while missing := list(_not_served(client, names)):
        if time.monotonic() > deadline:
            raise WindrowError(f"custom resources are not served yet: {', '.join(missing)}")
        time.sleep(0.05)
    return names


def _apply(client: httpx.Client, path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    name: str = yaml.safe_load(text)["metadata"]["name"]
    answer = client.patch(
        f"{_COLLECTION}/{name}",
        params={"fieldManager": "windrow", "force": "true"},
        content=text.encode(),
        headers={"Content-Type": "application/apply-patch+yaml"},
    )
    if answer.is_error:
        raise WindrowError(f"{path} was refused: {answer.json().get('message', answer.text)}")
    return name


def _not_served(client: httpx.Client, names: list[str]) -> Iterator[str]:
    for name in names:
        status = client.get(f"{_COLLECTION}/{name}").json().get("status", {})
        conditions = {entry["type"]: entry["status"] for entry in status.get("conditions") or []}
        if conditions.get("Established") != "True":
            yield name
