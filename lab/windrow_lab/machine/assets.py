"""Find the demo's model, rows and example job in the checkout that this package runs from."""

from __future__ import annotations

from pathlib import Path

from windrow.errors import UserError

_CHECKOUT = Path(__file__).resolve().parents[3]
MODEL = Path("models/windrow-tiny")
JOB = Path("examples/finetunejob.yaml")
POLICY = Path("examples/harvestpolicy.yaml")
ROWS = Path("examples/support-tone/train.jsonl")


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
