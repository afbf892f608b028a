"""Where the frozen base model comes from: decode's own weights where they are the same, or a file.

Shared weights are mapped read-only and become the parameters themselves; nothing is copied.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from windrow.conditions import Reason
from windrow.errors import UserError

log = logging.getLogger(__name__)

# Of the memory that is free: what the frozen weights may take, the rest is for activations.
WEIGHTS_SHARE = 0.8
MODEL_FIELD = "spec.model.name"


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A causal language model in fp32 and its tokenizer."""

    model: nn.Module
    config: Any
    tokenizer: Any
    shared: bool  # the weights are decode's


@dataclass(frozen=True, slots=True)
class ExportedWeights:
    """What decode exported: a manifest and the bytes (uint8, read-only)."""

    manifest: dict[str, Any]
    storage: Tensor

    @property
    def fingerprint(self) -> str:
        """Of the model that decode serves."""
        return str(self.manifest["fingerprint"])

    def tensors(self) -> dict[str, Tensor]:
        """Each parameter as a tensor over the bytes."""
        return {
            name: self.storage[at["offset"] :]
            .view(torch.uint8)[: _n_bytes(at)]
            .view(getattr(torch, at["dtype"]))
            .view(at["shape"])
            for name, at in self.manifest["tensors"].items()
        }


def read_manifest(path: Path) -> dict[str, Any] | None:
    """Return decode's manifest of weights, or None where it exports none."""
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return manifest


def find_model(name: str, revision: str) -> Path:
    """Return the directory of a model that is named by path or by its Hub name.

    Raises:
        UserError: there is none.
    """
    path = Path(name)
    if path.is_dir():
        if (path / "config.json").is_file():
            return path
        raise _not_found(f"{path} holds no config.json")
    if path.is_absolute() or name.startswith("."):
        raise _not_found(f"{path} is not a directory")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                name, revision=revision, allow_patterns=["*.json", "*.safetensors", "*.model"]
            )
        )
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise _not_found(f"{name!r} is no directory, and the Hub gave: {error}") from error


def load_base(directory: Path, exported: ExportedWeights | None = None) -> BaseModel:
    """Build the model, over `exported` where that is given, else from the directory's files.

    Raises:
        UserError: an architecture that transformers cannot build without code of the model's own,
            a checkpoint that cannot be read, or one too large for this machine.
    """
    from transformers import AutoConfig, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise _unsupported(directory, error) from error
    if exported is None:
        _check_size(directory)
    model = _build(directory, config, exported.tensors() if exported else None)
    model.requires_grad_(requires_grad=False)
    return BaseModel(model, config, tokenizer, shared=exported is not None)


def _build(directory: Path, config: Any, tensors: dict[str, Tensor] | None) -> nn.Module:  # noqa: ANN401
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": False}
    try:
        if tensors is None:
            model = AutoModelForCausalLM.from_pretrained(directory, config=config, **options)
        else:
            model = _over(tensors, config)
    except (OSError, ValueError, RuntimeError) as error:
        raise _unsupported(directory, error) from error
    return model  # type: ignore[no-any-return]


def _over(tensors: dict[str, Tensor], config: Any) -> nn.Module:  # noqa: ANN401
    """Build the model with `tensors` as its parameters; nothing is copied."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    architecture = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model = architecture.from_pretrained(
        None, config=config, state_dict=tensors, dtype=torch.float32
    )
    own = {tensor.data_ptr() for tensor in tensors.values()}
    copied = [name for name, p in model.named_parameters() if p.data_ptr() not in own]
    if copied:
        raise ValueError(f"the exported weights lack {copied[0]} and {len(copied) - 1} more")
    return model  # type: ignore[no-any-return]


def _check_size(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    stored = {"float32": 4, "float64": 8}.get(config.get("dtype", config.get("torch_dtype")), 2)
    on_disk = sum(f.stat().st_size for f in directory.glob("*.safetensors"))
    wanted = on_disk * 4 // stored
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = max(free, _available_bytes())
    if wanted > WEIGHTS_SHARE * free:
        raise UserError(
            f"the model takes {wanted / 2**30:.1f} GiB in fp32, {free / 2**30:.1f} GiB are free",
            field=MODEL_FIELD,
            remedy="Use a smaller model, or a slot that serves this one, whose weights are shared.",
            reason=Reason.MODEL_TOO_LARGE,
        )


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _n_bytes(at: dict[str, Any]) -> int:
    n = int(getattr(torch, at["dtype"]).itemsize)
    for size in at["shape"]:
        n *= size
    return n


def _not_found(problem: str) -> UserError:
    return UserError(
        problem,
        field=MODEL_FIELD,
        remedy="Name a transformers model directory on a mounted volume, or a Hub model.",
        reason=Reason.MODEL_NOT_FOUND,
    )


def _unsupported(directory: Path, error: Exception) -> UserError:
    return UserError(
        f"{directory} cannot be loaded: {str(error).splitlines()[0]}",
        field=MODEL_FIELD,
        remedy="Use a decoder-only transformers checkpoint (safetensors) without code of its own.",
        reason=Reason.MODEL_UNSUPPORTED,
    )
