"""Look up in SGLang's objects what the plugin asks for more than once."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def allocator_of_tokens(allocator: Any) -> Any:  # noqa: ANN401
    """Return the allocator of the pages that can be lent.

    Of a model with sliding windows in some layers, that is the one of the other layers.
    """
    return getattr(allocator, "full_attn_allocator", allocator)


def lent_tokens(allocator: Any) -> int:  # noqa: ANN401
    """Return how many tokens of an allocator's pool a worker holds; 0 where nothing is lent."""
    return int(getattr(allocator_of_tokens(allocator), "lent_tokens", 0))


def model_folder(args: Any) -> Path:  # noqa: ANN401
    """Return the directory of the served checkpoint; a Hub model's is in the cache by now."""
    path = Path(args.model_path)
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            args.model_path,
            revision=args.revision,
            cache_dir=args.download_dir,
            local_files_only=True,
        )
    )
