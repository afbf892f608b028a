"""Which model this is: decode and worker share weights only when their fingerprints are equal."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

from windrow.errors import UserError

# Bytes of each weights file that are hashed at both ends, besides its table of tensors: tells a
# finetuned copy from its base without reading gigabytes.
_SAMPLE_BYTES = 1 << 20


def model_fingerprint(model_dir: Path) -> str:
    """Return a sha256 (hex) of config.json, the weights' names, types, shapes, and samples of them.

    The same directory gives the same answer in every process. One that holds a config.json alone
    stands for a shape: its weights are made up by whoever serves it (`--random-weights`), and who
    shares them has them from there. Raises UserError where there is no config.json, or a file that
    is not in safetensors form.
    """
    digest = hashlib.sha256(read_config_bytes(model_dir))
    for path in sorted(model_dir.glob("*.safetensors")):
        table, data_start = _tensor_table(path)
        digest.update(json.dumps(table, sort_keys=True).encode())
        with path.open("rb") as weights:
            size = weights.seek(0, 2)
            for start in (data_start, max(data_start, size - _SAMPLE_BYTES)):
                weights.seek(start)
                digest.update(weights.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def read_config_bytes(model_dir: Path) -> bytes:
    """Return config.json as it stands. Raises UserError where there is none."""
    path = model_dir / "config.json"
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(
            f"{str(model_dir)!r} holds no readable config.json ({error.strerror})",
            field="--model-path",
            remedy="Name the directory of a transformers checkpoint.",
            reason="ModelNotFound",
        ) from error


def weight_files(model_dir: Path) -> list[Path]:
    """Return the checkpoint's safetensors files, sorted. Raises UserError where there are none."""
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise UserError(
            f"{str(model_dir)!r} holds no *.safetensors file",
            field="--model-path",
            remedy="Save the model with save_pretrained(..., safe_serialization=True), or let the "
            "engine make up weights of that shape with --random-weights SEED.",
            reason="ModelNotFound",
        )
    return files


def _tensor_table(path: Path) -> tuple[dict[str, Any], int]:
    """Return a safetensors file's header and the offset at which its data begin."""
    with path.open("rb") as weights:
        prefix = weights.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        header = weights.read(length) if 0 < length <= path.stat().st_size else b""
    try:
        table = json.loads(header)
    except ValueError as error:
        raise UserError(
            f"{path.name} is not a safetensors file, or is cut short",
            field="--model-path",
            remedy="Copy the checkpoint again.",
            reason="ModelUnreadable",
        ) from error
    table.pop("__metadata__", None)
    return table, 8 + length
