"""Tell transformers which tokens of a line are of one row; nobody waits for a device.

transformers finds packed rows by positions that start over, and asks the device whether there is
more than one row, for which the host waits until the device has run all that is queued. Where rows
are known, its masks are made of their numbers instead.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

_FINDS = "find_packed_sequence_indices"


class _Rows(threading.local):
    """Row numbers of the call that a thread is in."""

    row_of: Tensor | None = None


_rows = _Rows()


@contextmanager
def rows_are(row_of: Tensor | None) -> Iterator[None]:
    """Have masks that are made inside, in this thread, keep these rows apart.

    Args:
        row_of: the row of each token, int64 [lines, tokens]; None: as positions say.
    """
    _install()
    before, _rows.row_of = _rows.row_of, row_of
    try:
        yield
    finally:
        _rows.row_of = before


def _install() -> None:
    """Have transformers ask here first, in all threads; it answers as before outside `rows_are`."""
    from transformers import masking_utils

    theirs: Any = getattr(masking_utils, _FINDS, None)
    if theirs is None or hasattr(theirs, "asks_first"):
        return

    def found(position_ids: Tensor) -> Tensor | None:
        known = _rows.row_of
        if known is not None and known.shape == position_ids.shape:
            return known
        answer: Tensor | None = theirs(position_ids)
        return answer

    found.asks_first = True  # type: ignore[attr-defined]
    setattr(masking_utils, _FINDS, found)
