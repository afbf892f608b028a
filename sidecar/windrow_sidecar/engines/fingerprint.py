"""Fingerprint a model: decode and worker share weights only if theirs are equal."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from windrow.errors import UserError
from windrow_sidecar.engines.weight_files import (
    SERVED_FIELD,
    read_header,
    weight_files,
)

# Of each tensor its beginning, middle and end are hashed, so many bytes of each: whichever tensors
# a finetuned copy has changed, its fingerprint differs without reading gigabytes. The 291 tensors
# of an 8B shape take 0.05 s from a cold disk and 4 ms from the page cache (EPYC, virtio disk); all
# of their bytes would take a second for each 1.2 GB.
_SAMPLE_BYTES = 4096


def model_fingerprint(model_dir: Path) -> str:
    """Return a sha256 (hex) of config.json, the weights' names, types, shapes, and samples.

    Tensors of up to 12 KiB count as a whole; of a larger one, single numbers may differ unnoticed.

    The same directory gives the same answer in every process. A directory with a config.json alone
    describes a shape: the server makes up its weights  (`--random-weights`), and a worker that
    shares them gets them from the server. Files beside the model's own count for nothing.

    Raises:
        UserError: there is no config.json, or a file is missing, cut short, or no safetensors file.
    """
    digest = hashlib.sha256(read_config_bytes(model_dir))
    for path in weight_files(model_dir, field=SERVED_FIELD):
        header = read_header(path, field=SERVED_FIELD)
        digest.update(json.dumps(header.tensors, sort_keys=True).encode())
        # Without a buffer, which would read ahead of every sample.
        with path.open("rb", buffering=0) as weights:
            for begin, end in sorted(at["data_offsets"] for at in header.tensors.values()):
                for start, n_bytes in _samples(begin, end):
                    digest.update(os.pread(weights.fileno(), n_bytes, header.begin + start))
    return digest.hexdigest()


def _samples(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield (start, bytes) of what is hashed of a tensor at [begin, end)."""
    if end - begin <= 3 * _SAMPLE_BYTES:
        yield begin, end - begin
        return
    for start in (begin, (begin + end - _SAMPLE_BYTES) // 2, end - _SAMPLE_BYTES):
        yield start, _SAMPLE_BYTES


def read_config_bytes(model_dir: Path) -> bytes:
    """Return the bytes of config.json. Raises UserError where there is none."""
    path = model_dir / "config.json"
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(
            f"{str(model_dir)!r} holds no readable config.json ({error.strerror})",
            field=SERVED_FIELD,
            remedy="Name the directory of a transformers checkpoint.",
            reason="ModelNotFound",
        ) from error


def served_files(model_dir: Path) -> list[Path]:
    """Return the safetensors files that are served. Raises UserError where there are none."""
    files = weight_files(model_dir, field=SERVED_FIELD)
    if not files:
        raise UserError(
            f"{str(model_dir)!r} holds no *.safetensors file",
            field=SERVED_FIELD,
            remedy="Save the model with save_pretrained(..., safe_serialization=True), or let the "
            "engine make up weights of that shape with --random-weights SEED.",
            reason="ModelNotFound",
        )
    return files
