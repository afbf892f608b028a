"""Begin a training with the weights of an adapter that is there, in place of fresh ones."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from windrow.adapter_files import CACHE_FOLDER
from windrow.conditions import Reason
from windrow.crd import FinetuneJobSpec
from windrow.errors import UserError
from windrow.outputs import HELD_DIRECTORIES, OWN_FOLDER, path_of
from windrow_sidecar.finetune.adapter.served import as_served
from windrow_sidecar.finetune.data.confined_files import ConfinedFiles
from windrow_sidecar.finetune.data.source_access import UNCONFINED, SourceAccess
from windrow_sidecar.finetune.training.checkpoint import OWNER, owner_of

_FIELD: Final = "spec.adapter.from"
_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_MOST_CONFIG_BYTES = 1 << 20
# Numbers of 8 bytes are the largest there are; names and shapes come before them.
_BYTES_OF_NUMBER, _HEADER_BYTES = 8, 16 << 20
_REMEDY: Final = (
    f"Name a folder with {_CONFIG} and {_WEIGHTS}, as a finished job of the same namespace leaves "
    "it."
)
# What an adapter's numbers mean; the rest of its configuration is where it was trained and how.
_MEANING: Final = ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "bias")


def begin_with(
    tuned: Any,  # noqa: ANN401 - peft is untyped
    adapter: str,
    spec: FinetuneJobSpec,
    access: SourceAccess = UNCONFINED,
) -> None:
    """Give a fresh adapter the weights of the one that the job names; nothing where it names none.

    Args:
        tuned: peft's model.
        adapter: name of the fresh adapter in it.
        spec: the job's.
        access: what the job may read.

    Raises:
        UserError: it is not there, or is an adapter of another kind, rank, scale or base.
    """
    if spec.adapter.start_from is None:
        return
    from peft import get_peft_model_state_dict

    folder = Path(path_of(spec.adapter.start_from))
    said = _config(folder, access)
    fresh: dict[str, Tensor] = get_peft_model_state_dict(
        tuned, adapter_name=adapter, save_embedding_layers=False
    )
    written = {
        name: sorted(value) if isinstance(value, set) else value
        for name, value in tuned.peft_config[adapter].to_dict().items()
    }
    _, plain = as_served(tuned, adapter, fresh, tuned.peft_config[adapter].to_dict())
    _check_meaning(said, (plain, written))
    numbers = sum(tensor.numel() for tensor in fresh.values())
    found = _tensors(folder, access, numbers * _BYTES_OF_NUMBER + _HEADER_BYTES)
    _check_shapes(found, fresh)
    with torch.no_grad():
        # Into the parameters that are there, which the optimizer will be given.
        for name, parameter in fresh.items():
            parameter.copy_(found[name])


def _check_meaning(said: Mapping[str, Any], wanted: tuple[Mapping[str, Any], ...]) -> None:
    def meaning(config: Mapping[str, Any]) -> dict[str, Any]:
        return {name: config[name] for name in _MEANING if config.get(name)}

    there = meaning(said)
    if any(there == meaning(config) for config in wanted):
        return
    ours = meaning(wanted[0])
    differs = [name for name in _MEANING if there.get(name) != ours.get(name)]
    told = ", ".join(f"{name} {there.get(name)} and not {ours.get(name)}" for name in differs)
    raise _refused(
        f"the adapter there has {told}",
        "Set spec.adapter as that adapter was trained, or begin with another one.",
    )


def _check_shapes(found: Mapping[str, Tensor], fresh: Mapping[str, Tensor]) -> None:
    if lacking := sorted(fresh.keys() - found.keys()):
        raise _refused(
            f"the adapter there has no weights for {lacking[0]} and {len(lacking) - 1} more",
            "Name the same targets as it has, and the base model that it was trained over.",
        )
    if other := sorted(found.keys() - fresh.keys()):
        raise _refused(
            f"the adapter there has weights for {other[0]} and {len(other) - 1} more, which this "
            "job would not train",
            "Name the same targets as it has, and the base model that it was trained over.",
        )
    for name, tensor in sorted(found.items()):
        if tensor.shape != fresh[name].shape:
            raise _refused(
                f"{name} there is {list(tensor.shape)}, and {list(fresh[name].shape)} in this job",
                "Set the same rank, over the base model that it was trained over.",
            )
        if not bool(torch.isfinite(tensor).all()):
            raise _refused(f"{name} there holds numbers that are not finite", "Use another one.")


def _config(folder: Path, access: SourceAccess) -> dict[str, Any]:
    try:
        found = json.loads(_read(folder / _CONFIG, access, _MOST_CONFIG_BYTES))
    except (ValueError, RecursionError) as error:
        raise _refused(f"{_CONFIG} there is not JSON", "Name a folder that peft loads.") from error
    if not isinstance(found, dict):
        raise _refused(f"{_CONFIG} there is not an object", "Name a folder that peft loads.")
    return found


def _tensors(folder: Path, access: SourceAccess, most_bytes: int) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return dict(load(_read(folder / _WEIGHTS, access, most_bytes)))
    except SafetensorError as error:
        raise _refused(f"{_WEIGHTS} there is damaged ({error})", "Write it again.") from error


def _read(path: Path, access: SourceAccess, most: int) -> bytes:
    # A pipe would hold the open itself until somebody writes.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        if access.trees is None:
            at = os.open(path, flags)
        else:
            at = ConfinedFiles(access.trees, access.never).open(path, flags)
        with os.fdopen(at, "rb") as source:
            if access.trees is not None and not _may_begin_with(at, access.namespace):
                raise _absent(path.parent)
            about = os.fstat(at)
            if not stat.S_ISREG(about.st_mode):
                raise _refused(f"{path} is not a regular file", "Name an adapter's folder.")
            # Before it is read: a file of terabytes may take no room on its disk.
            found = source.read() if about.st_size <= most else b""
    except UserError as error:
        raise _refused(error.problem, error.remedy) from error
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _absent(path.parent) from error
    except OSError as error:
        raise _refused(f"{path} cannot be read ({error.strerror})", _REMEDY) from error
    if about.st_size > most:
        raise _refused(
            f"{path} has {about.st_size} bytes, more than the {most} that this job's adapter takes",
            "Name the folder of an adapter of the same rank and targets.",
        )
    return found


def _may_begin_with(file: int, namespace: str) -> bool:
    """Return whether an open file is of no job of another namespace, ended or not.

    Where several namespaces share a folder, its owner is who has written to it first, as for
    destinations.

    Args:
        file: its descriptor; the folder that it is in counts, whatever link has led there.
        namespace: of the job that begins.
    """
    folder = Path(os.readlink(f"{HELD_DIRECTORIES}/{file}")).parent
    # Copies for servers are in a folder of each namespace.
    if any(at == CACHE_FOLDER and name != namespace for at, name in pairwise(folder.parts)):
        return False
    within = (at for at in (folder, *folder.parents) if at.name == OWN_FOLDER)
    for place in (folder / OWN_FOLDER, *within):
        try:
            at = os.open(place / OWNER, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # of nobody's job, or of a version that kept no owner
        with os.fdopen(at, "rb") as said:
            if owner_of(said.read(_MOST_CONFIG_BYTES))[1] != namespace:
                return False
    return True


def _absent(folder: Path) -> UserError:
    """Return the error for a missing adapter and for one of another namespace, in equal words."""
    return _refused(f"{folder} cannot be read as an adapter of this job", _REMEDY)


def _refused(problem: str, remedy: str) -> UserError:
    return UserError(problem, field=_FIELD, remedy=remedy, reason=Reason.INVALID_SPEC)
