"""Files of an adapter that servers load, and the digest by which a version of it is known."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Final

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
# Servers read these two alone; a model card beside them may change.
SERVED_FILES: Final = (CONFIG_FILE, WEIGHTS_FILE)
DIGEST_PATTERN: Final = r"[0-9a-f]{64}"
# Below the tree of a volume: copies of adapters, by namespace and digest.
CACHE_FOLDER: Final = ".windrow-adapters"
_PIECE_BYTES: Final = 2**20


def is_digest(text: str) -> bool:
    """Return whether a text has the form of a digest."""
    return re.fullmatch(DIGEST_PATTERN, text) is not None


def digest_of(sums: Mapping[str, str]) -> str:
    """Return the digest of an adapter, 64 hexadecimal digits.

    Args:
        sums: SHA-256 of each served file, by its name.
    """
    lines = "".join(f"{name} {sums[name]}\n" for name in SERVED_FILES)
    return hashlib.sha256(lines.encode()).hexdigest()


def sum_of(file: BinaryIO) -> str:
    """Return the SHA-256 of what a file holds from where it is read."""
    found = hashlib.sha256()
    while piece := file.read(_PIECE_BYTES):
        found.update(piece)
    return found.hexdigest()


def digest_of_folder(folder: Path) -> str:
    """Return the digest of the adapter in a folder.

    Raises:
        OSError: a file is missing or cannot be read.
    """
    sums = {}
    for name in SERVED_FILES:
        with (folder / name).open("rb") as file:
            sums[name] = sum_of(file)
    return digest_of(sums)
