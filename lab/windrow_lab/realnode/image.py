"""Images of one layer, as archives that a container runtime imports without a registry."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path


def write_image(
    archive: Path, name: str, files: dict[str, Path], entrypoint: Sequence[str]
) -> None:
    """Write an OCI archive of an image with one layer that holds `files`, by their paths in it.

    Args:
        archive: the file to write.
        name: full, with registry and tag: else the runtime looks for it on a network.
        files: path in the image -> file of this machine.
        entrypoint: what a container runs.
    """
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as made:
        for path, source in files.items():
            made.add(source, arcname=path)
    blobs: dict[str, bytes] = {}

    def keep(content: bytes) -> str:
        digest = hashlib.sha256(content).hexdigest()
        blobs[digest] = content
        return f"sha256:{digest}"

    oci = "application/vnd.oci.image"
    diff = keep(layer.getvalue())
    config = {
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, "amd64"),
        "os": "linux",
        "config": {"Entrypoint": list(entrypoint), "Env": ["PATH=/bin:/usr/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [diff]},
    }
    encoded = json.dumps(config).encode()
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{oci}.manifest.v1+json",
        "config": {
            "mediaType": f"{oci}.config.v1+json",
            "digest": keep(encoded),
            "size": len(encoded),
        },
        "layers": [
            {
                "mediaType": f"{oci}.layer.v1.tar",
                "digest": diff,
                "size": len(layer.getvalue()),
            }
        ],
    }
    described = json.dumps(manifest).encode()
    index = {
        "schemaVersion": 2,
        "manifests": [
            {
                "mediaType": f"{oci}.manifest.v1+json",
                "digest": keep(described),
                "size": len(described),
                "annotations": {"io.containerd.image.name": name},
            }
        ],
    }
    with tarfile.open(archive, "w") as out:
        _add(out, "oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
        _add(out, "index.json", json.dumps(index).encode())
        for digest, content in blobs.items():
            _add(out, f"blobs/sha256/{digest}", content)


def _add(archive: tarfile.TarFile, path: str, content: bytes) -> None:
    entry = tarfile.TarInfo(path)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))
