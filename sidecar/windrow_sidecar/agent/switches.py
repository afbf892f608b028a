"""Read what people and engines leave in the run directory for the sidecar: its switch, refusals."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import Final

from windrow.rundir import MOST_SLOTS, RunDir

_log = logging.getLogger(__name__)

_MOST_BYTES = 4096
NEVER_CALLED: Final = (
    "no engine with Windrow's plugin has called the sidecar: see that decode's image holds the "
    "plugin, that the engine runs with WINDROW_RUN_DIR, and what its log says of windrow"
)


@dataclass(frozen=True, slots=True)
class Off:
    """Reason why a sidecar harvests nothing whatever its policy says.

    Attributes:
        switched: by the pod's switch; jobs lose the device at once.
        lease_ended: the operator was not heard; jobs finish their step.
    """

    switched: str = ""
    lease_ended: str = ""

    @property
    def why(self) -> str:
        """Return both in words; empty: it obeys its policy."""
        return self.switched or self.lease_ended


def switch_text(run_dir: RunDir) -> str:
    """Return why harvesting is turned off in this pod, as its switch says; empty: it is not."""
    path = run_dir.off_switch
    try:
        with path.open("rb") as file:
            reason = file.read(_MOST_BYTES).decode(errors="replace").strip()
    except FileNotFoundError:
        return ""
    except OSError as error:  # somebody has put something there that cannot be read
        reason = error.strerror or "unreadable"
    return f"turned off in the pod by {path}" + (f": {reason}" if reason else "")


def refusals(run_dir: RunDir) -> dict[int, str]:
    """Return why plugins of engines have switched harvesting off, by slot."""
    found = {}
    for index in range(MOST_SLOTS):
        path = run_dir.of_slot(index).refusal()
        try:
            text = path.read_text(encoding="utf-8")
        except OSError:
            continue
        try:
            found[index] = str(json.loads(text)["reason"])
        except (ValueError, KeyError, TypeError):
            _log.debug("%s is half-written", path)
    return found
