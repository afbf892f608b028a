"""Apply our custom resource definitions to an API server, from the files a cluster gets."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import httpx
import yaml

from windrow.errors import WindrowError
from windrow_lab.machine.resources import resource_directory

_COLLECTION = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


def apply_crds(client: httpx.Client, within: timedelta = timedelta(seconds=30)) -> list[str]:
    """Apply `crds/*.yaml` and wait until they are served; returns their names."""
    paths = sorted(resource_directory("crds").glob("*.yaml"))
    collections = {name: served_at for path in paths for name, served_at in [_apply(client, path)]}
    deadline = time.monotonic() + within.total_seconds()
    # Listed, not only Established: for a moment after that the server answers 429.
    while missing := [name for name, path in collections.items() if client.get(path).is_error]:
        if time.monotonic() > deadline:
            raise WindrowError(f"custom resources are not served yet: {', '.join(missing)}")
        time.sleep(0.05)
    return list(collections)


def _apply(client: httpx.Client, path: Path) -> tuple[str, str]:
    """Apply one definition; returns its name and the path of the collection that it defines."""
    text = path.read_text(encoding="utf-8")
    definition = yaml.safe_load(text)
    name, spec = definition["metadata"]["name"], definition["spec"]
    answer = client.patch(
        f"{_COLLECTION}/{name}",
        params={"fieldManager": "windrow", "force": "true"},
        content=text.encode(),
        headers={"Content-Type": "application/apply-patch+yaml"},
    )
    if answer.is_error:
        raise WindrowError(f"{path} was refused: {answer.json().get('message', answer.text)}")
    version = spec["versions"][0]["name"]
    return name, f"/apis/{spec['group']}/{version}/{spec['names']['plural']}"
