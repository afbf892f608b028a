"""Hold the files of a model that a job names, so that nobody exchanges them while they are read.

Libraries open the files of a model by path, again and again. Who can write to its volume could
replace one of them by a link out of the volume after a check. So each file is opened once, below
the job's volumes, and libraries get a private folder in which each name leads to its descriptor.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from windrow.errors import UserError, WindrowError
from windrow.outputs import HELD_DIRECTORIES
from windrow_sidecar.finetune.data.confined_files import ConfinedFiles
from windrow_sidecar.finetune.data.confined_models import check_model, is_confined, refused
from windrow_sidecar.finetune.data.private_folders import PrivateFolder
from windrow_sidecar.finetune.data.source_access import SourceAccess

# Files that libraries read, and formats that an error names if no safetensors file is found.
_READ: Final = frozenset((".json", ".safetensors", ".model", ".jinja", ".txt", ".spm", ".bin"))
# Folders of it that count: templates beside the first one, and shards that an index names.
_DEEPEST: Final = 2
_MOST_FILES: Final = 900  # a process may have 1024 open by default
_TOKENIZER_CONFIG: Final = "tokenizer_config.json"
_MOST_CONFIG_BYTES: Final = 16 << 20


class HeldModel:
    """A model's folder for the libraries that read it.

    Attributes:
        folder: as it is named; errors name it.
        path: what libraries are given. It is the folder itself where the job's access does not
            confine it: decode's own model, one of the Hub, or all of them on a user's machine.

    Args:
        folder: of the model.
        access: what the job may read.
        of_hub: whether the folder is that of a model of the Hub, which the job was shown there: it
            may be read although it is on no volume of the job.

    Raises:
        UserError: see `check_model`; or a file of it cannot be held.
    """

    def __init__(self, folder: Path, access: SourceAccess, *, of_hub: bool = False) -> None:
        self.folder = self.path = folder
        self.of_hub = of_hub
        self._descriptors: list[int] = []
        self._private: PrivateFolder | None = None
        if not of_hub:
            check_model(folder, access)
        if not is_confined(folder, access):
            return
        self._private = PrivateFolder("model")
        self.path = self._private.path
        try:
            self._hold(folder, ConfinedFiles(access.trees or (), access.never))
        except BaseException:
            self.close()
            raise

    @property
    def is_held(self) -> bool:
        """Return whether its files are held; else nobody but who runs the machine writes there."""
        return self._private is not None

    @contextmanager
    def named(self) -> Iterator[Path]:
        """Yield `path`; an error within names the folder instead.

        Raises:
            WindrowError: as it was raised within.
        """
        try:
            yield self.path
        except WindrowError as error:
            if self._private is None or str(self._private.path) not in str(error):
                raise
            if isinstance(error, UserError):
                raise UserError(
                    self._by_name(error.problem),
                    field=error.field,
                    remedy=self._by_name(error.remedy),
                    reason=error.reason,
                ) from error
            raise type(error)(self._by_name(str(error))) from error

    def close(self) -> None:
        """Close all files, and remove the private folder."""
        while self._descriptors:
            os.close(self._descriptors.pop())
        if self._private is not None:
            self._private.close()

    def _by_name(self, said: str) -> str:
        return said.replace(str(self.path), str(self.folder))

    def _hold(self, folder: Path, confined: ConfinedFiles) -> None:
        try:
            self._hold_folder(folder, Path(), confined, _DEEPEST)
        except UserError as error:
            raise refused(error.problem, error.remedy) from error
        except OSError as error:
            raise refused(
                f"{folder} cannot be read ({error.strerror})",
                "Name a folder on a volume of the HarvestPolicy (spec.sidecar.volumes).",
            ) from error

    def _hold_folder(self, folder: Path, below: Path, confined: ConfinedFiles, deeper: int) -> None:
        with confined.opened(folder / below, os.O_RDONLY | os.O_DIRECTORY) as opened:
            names = sorted(os.listdir(opened))
        (self.path / below).mkdir(exist_ok=True)
        for name in names:
            place = below / name
            try:
                # A pipe would hold the open itself until somebody writes.
                found = confined.open(folder / place, os.O_PATH)
            except FileNotFoundError:
                (self.path / place).symlink_to("is-missing")
                continue
            mode = os.fstat(found).st_mode
            os.close(found)
            if stat.S_ISDIR(mode):
                if deeper and not name.startswith("."):
                    self._hold_folder(folder, place, confined, deeper - 1)
            elif stat.S_ISREG(mode) and place.suffix in _READ:
                self._hold_file(folder, place, confined)

    def _hold_file(self, folder: Path, place: Path, confined: ConfinedFiles) -> None:
        if len(self._descriptors) == _MOST_FILES:
            raise refused(
                f"{folder} has more than {_MOST_FILES} files that a model may be made of",
                "Name a folder that holds the model alone.",
            )
        found = confined.open(folder / place, os.O_RDONLY | os.O_NONBLOCK)
        self._descriptors.append(found)
        if not stat.S_ISREG(os.fstat(found).st_mode):  # it was a moment ago
            raise refused(f"{folder / place} is not a regular file", "Copy the model again.")
        without = _without_paths(found) if place.name == _TOKENIZER_CONFIG else None
        if without is not None:
            (self.path / place).write_bytes(without)
        else:
            (self.path / place).symlink_to(f"{HELD_DIRECTORIES}/{found}")


def _without_paths(descriptor: int) -> bytes | None:
    """Return a tokenizer's configuration without names of files, which transformers would open.

    None: it has none, or is not a configuration at all, which transformers says itself.
    """
    raw = os.pread(descriptor, _MOST_CONFIG_BYTES, 0)
    try:
        config: Any = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(config, dict):
        return None
    kept = {
        name: value
        for name, value in config.items()
        if not (name.endswith(("_file", "_files")) and _leads_elsewhere(value))
    }
    return None if len(kept) == len(config) else json.dumps(kept).encode()


def _leads_elsewhere(value: Any) -> bool:  # noqa: ANN401 - of JSON
    if isinstance(value, str):
        return "/" in value
    if isinstance(value, list | dict):
        return any(map(_leads_elsewhere, value if isinstance(value, list) else value.values()))
    return False
