"""Choose the priority at which a worker's process is a client of MPS.

A lower priority moves all of a client's streams below those of the others, as a hint to the GPU's
scheduler. It matters where both run kernels on one SM. Source: NVIDIA's MPS documentation, "Client
Priority Level Control".
"""

from __future__ import annotations

from typing import Final

from windrow.errors import UserError
from windrow.rundir import ENV_MPS_PRIORITY

CLIENT_PRIORITY: Final = "CUDA_MPS_CLIENT_PRIORITY"
CHOICES: Final = ("auto", "normal", "below")
_NORMAL, _BELOW = "0", "1"


def checked(choice: str) -> str:
    """Return a choice that is one of `CHOICES`. Raises UserError for another."""
    if choice not in CHOICES:
        raise UserError(
            f"{choice!r} is not a valid priority of workers",
            field=ENV_MPS_PRIORITY,
            remedy=f"Write {', '.join(CHOICES[:-1])} or {CHOICES[-1]}.",
        )
    return choice


def client_priority(choice: str, *, on_every_sm: bool) -> dict[str, str]:
    """Return the variable that sets a worker's priority, for a worker that is a client of MPS.

    It is set in every case: one that the container has is meant for decode.

    Args:
        choice: one of `CHOICES`; auto: below normal where `on_every_sm`.
        on_every_sm: whether the policy lets the worker run on the whole GPU.
    """
    below = choice == "below" or (choice == "auto" and on_every_sm)
    return {CLIENT_PRIORITY: _BELOW if below else _NORMAL}
