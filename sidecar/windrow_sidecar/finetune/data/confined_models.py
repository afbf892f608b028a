"""Confine the folder of a model that a job names: to its volumes, with all that is in it."""

from __future__ import annotations

import os
from pathlib import Path

from windrow.conditions import Reason
from windrow.errors import UserError
from windrow_sidecar.finetune.data.confined_files import ConfinedFiles
from windrow_sidecar.finetune.data.source_access import SourceAccess


def check_model(folder: Path, access: SourceAccess) -> None:
    """Refuse a folder that the job may not read, or of which a file leads elsewhere.

    A name of the Hub passes: its files are in this process's own cache. So does the model that
    decode serves: the creator of the pod chose its folder.

    Args:
        folder: as the job names it.
        access: what the job may read.

    Raises:
        UserError: names the directories that the job may read, and no other.
    """
    if access.trees is None or _is_served(folder, access):
        return
    if not folder.is_absolute() and not folder.is_dir():
        return
    confined = ConfinedFiles(access.trees, access.never)
    try:
        confined.resolve(folder)
        _check_links(folder, confined)
    except UserError as error:
        raise refused(
            error.problem, error.remedy.replace("a file below", "a model below")
        ) from error
    except OSError as error:
        raise refused(
            f"{folder} cannot be read ({error.strerror})",
            "Name a folder on a volume of the HarvestPolicy (spec.sidecar.volumes).",
        ) from error


def is_confined(folder: Path, access: SourceAccess) -> bool:
    """Return whether a folder is on the job's volumes, where others may write.

    One that is on none of them is not the job's: of the Hub, or decode's own.
    """
    if not access.trees or _is_served(folder, access):
        return False
    if not folder.is_absolute() and not folder.is_dir():
        return False
    return any(map(Path(os.path.abspath(folder)).is_relative_to, access.trees))


def _is_served(folder: Path, access: SourceAccess) -> bool:
    if access.serves_model is None:  # an older operator lists the folder itself
        return folder in (access.trees or ())
    return access.serves_model


def _check_links(folder: Path, confined: ConfinedFiles) -> None:
    # Libraries open files of it by name, some of them in folders below.
    for at, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(at, name)
            if path.is_symlink():
                confined.resolve(path)


def refused(problem: str, remedy: str) -> UserError:
    """Return the error for a model that the job may not read."""
    return UserError(problem, field="spec.model.name", remedy=remedy, reason=Reason.MODEL_NOT_FOUND)
