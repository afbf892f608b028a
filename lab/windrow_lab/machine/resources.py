"""Files of the project that are no Python: found in a checkout and in an installed wheel."""

from __future__ import annotations

from pathlib import Path

import windrow_lab
from windrow.errors import UserError

# The wheel carries these folders of the checkout below `windrow_lab/data` (CMakeLists.txt).
_IN_CHECKOUT = {
    "crds": "crds",
    "controlplane": "tools/controlplane",
    "node": "tools/node",
    "objectstore": "tools/objectstore",  # for tests: not in a wheel
}


def resource_directory(name: str) -> Path:
    """Return the folder of that name (see `_IN_CHECKOUT`); raises UserError for a broken wheel."""
    package = Path(windrow_lab.__file__).parent
    candidates = (package.parents[1] / _IN_CHECKOUT[name], package / "data" / name)
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    raise UserError(
        f"the folder {name} is missing in this installation (looked at "
        f"{', '.join(str(candidate) for candidate in candidates)})",
        remedy="Install windrow again, or run it from its checkout.",
        reason="BrokenInstallation",
    )
