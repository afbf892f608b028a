"""Bound the computing that the rows of a job take together before it trains.

One row has limits of its own (`row_limit`). Rows that stay below them and are all slow would hold
the worker, and the cores that it may use, for as long as somebody writes rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from windrow.conditions import Reason
from windrow.errors import UserError

# Where the policy names no budget. Rendering and tokenizing takes real models 1 ms for a row of a
# kilobyte, and 0.5 s for one of half a megabyte: these are ten times and more of that.
LEAST_S: Final = 600.0
_OF_ROW_S: Final = 0.1
_CHARACTERS_PER_S: Final = 200_000


class PreparationBudget:
    """Computing time of this process while it reads rows: decompression, template, tokenizer.

    Args:
        seconds: that the policy gives a job; None: LEAST_S, and more with each row and its text.
        clock: seconds that this process has computed.
    """

    def __init__(
        self, seconds: float | None = None, clock: Callable[[], float] = time.process_time
    ) -> None:
        self._seconds, self._clock = seconds, clock
        self._begun_s = self._last_s = clock()
        self._rows = 0
        self._slowest_s, self._slowest = 0.0, ""

    def count(self, where: str, characters: int) -> None:
        """Count a row that was read.

        Args:
            where: its place.
            characters: of text that all rows so far were rendered to.

        Raises:
            UserError: the rows so far took more than the budget; it names the slowest one.
        """
        self._rows += 1
        now_s = self._clock()
        if now_s - self._last_s > self._slowest_s:
            self._slowest_s, self._slowest = now_s - self._last_s, where
        self._last_s = now_s
        spent_s, most_s = now_s - self._begun_s, self._most_s(characters)
        if spent_s <= most_s:
            return
        raise UserError(
            f"{self._rows} rows took {spent_s:.0f} s of computing to prepare, more than the "
            f"{most_s:.0f} s that they may; this one took most, {self._slowest_s:.1f} s",
            field=self._slowest,
            remedy="Leave out rows that the model's chat template or tokenizer is slow over, or "
            "use a model that is done with such a row in a moment. Who keeps the HarvestPolicy "
            "can give more time in spec.access.preparation.",
            reason=Reason.DATASET_INVALID,
        )

    def _most_s(self, characters: int) -> float:
        if self._seconds is not None:
            return self._seconds
        return LEAST_S + _OF_ROW_S * self._rows + characters / _CHARACTERS_PER_S
