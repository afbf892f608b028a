"""Keep a latency profile for the next start of an engine, and find those of earlier ones."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windrow.rundir import RunDir, profile_file

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeptProfile:
    """The profile that one start leaves for the next, in the run directory.

    Attributes:
        run_dir: of this pod.
        stored: directory of what other pods of the namespace have measured; None: nobody says.
    """

    run_dir: RunDir
    stored: Path | None = None

    def of(self, key: str) -> dict[str, Any] | None:
        """The profile of that kind of an earlier start, another slot or another pod, or None."""
        others = [] if self.stored is None else [self.stored / profile_file(key)]
        for path in (*self.run_dir.profiles(), *others):
            try:
                kept: dict[str, Any] = json.loads(path.read_text())
            except (OSError, ValueError):
                continue
            if isinstance(kept, dict) and kept.get("key") == key:
                return kept
        return None

    def keep(self, profile: Mapping[str, Any]) -> None:
        """Leave it; a reader sees the old one or the new one. Decode does not care if it fails."""
        path = self.run_dir.profile()
        # Decode's thread and the link's may both have one to keep.
        draft = path.with_suffix(f".{threading.get_native_id()}.tmp")
        try:
            draft.write_text(json.dumps(profile))
            os.replace(draft, path)
        except OSError as error:
            _log.warning("the latency profile is not kept for the next start: %s", error)
            with suppress(OSError):
                draft.unlink(missing_ok=True)
