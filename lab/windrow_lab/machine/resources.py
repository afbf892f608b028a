"""Find files of the project that are not Python, in a checkout or in an installed wheel.

The model, rows and jobs of the demo are in a checkout only.
"""

from __future__ import annotations

from pathlib import Path

import windrow_lab
from windrow.errors import UserError

_CHECKOUT = Path(__file__).resolve().parents[3]
MODEL = Path("models/windrow-tiny")
JOB = Path("examples/finetunejob.yaml")
POLICY = Path("examples/harvestpolicy.yaml")
ROWS = Path("examples/support-tone/train.jsonl")

# The wheel carries these folders of the checkout below `windrow_lab/data` (CMakeLists.txt).
_IN_CHECKOUT = {
    "crds": "crds",
    "controlplane": "tools/controlplane",
    "node": "tools/node",
    "objectstore": "tools/objectstore",  # for tests: not in a wheel
    "kueue": "tools/kueue",  # likewise
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


def find(relative: Path, *, option: str, given: Path | None = None) -> Path:
    """Return the absolute path of `given`, else of a file of the checkout.

    Raises UserError, naming the option that gives it by hand, when there is none.
    """
    if given is not None:
        if not given.exists():
            raise UserError(
                f"{given} does not exist", field=option, remedy="Give a path that exists."
            )
        return given.resolve()
    for root in (_CHECKOUT, Path.cwd()):
        if (root / relative).exists():
            return root / relative
    raise UserError(
        f"{relative} is not beside this installation",
        field=option,
        remedy=f"Run from a checkout of the project, or give {option}.",
    )
