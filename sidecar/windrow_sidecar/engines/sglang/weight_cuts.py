"""Say which part of a checkpoint's tensor one rank of SGLang holds, and in what shape.

A rank that has all of the model holds each tensor whole; so says `WHOLE`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from windrow.errors import UserError
from windrow_sidecar.engines.shard_cuts import BY_WORDS, ShardSizes, TensorPart
from windrow_sidecar.engines.weight_files import SERVED_FIELD
from windrow_sidecar.engines.weight_formats import weight_format


@dataclass(frozen=True, slots=True)
class ModelCut:
    """The part of a model that one rank holds.

    Attributes:
        sizes: of the shard; None: the rank holds all of the model.
        rank: whose part it is.
    """

    sizes: ShardSizes | None = None
    rank: int = 0

    @property
    def ranks(self) -> int:
        """Ranks that share the model."""
        return 1 if self.sizes is None else self.sizes.ranks

    def shape(self, name: str, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape in which the rank holds a tensor of that shape, padding included."""
        part = self._part(name)
        if part is None or part.dim is None:
            return whole
        n = part.end - part.begin
        if self.sizes is not None and _is_of_words(name):
            n = self.sizes.words
        return (*whole[: part.dim], n, *whole[part.dim + 1 :])

    def rows(self, name: str, whole: int) -> tuple[int, int]:
        """Return which rows [begin, end) of a tensor of so many the rank holds, without padding."""
        part = self._part(name)
        return (part.begin, part.end) if part is not None and part.dim == 0 else (0, whole)

    def columns(self, name: str) -> slice:
        """Return which columns of a matrix the rank holds."""
        part = self._part(name)
        cut = part is not None and part.dim == 1
        return slice(part.begin, part.end) if part is not None and cut else slice(None)

    def _part(self, name: str) -> TensorPart | None:
        return None if self.sizes is None else self.sizes.part(name, self.rank)


WHOLE = ModelCut()


def cut_of(model: Any, folder: Path, ranks: int, rank: int) -> ModelCut:  # noqa: ANN401
    """Return the part of a loaded model that a rank holds.

    Args:
        model: SGLang's.
        folder: of its checkpoint.
        ranks: that share it.
        rank: whose part is asked for.

    Raises:
        UserError: a worker over so many ranks cannot train that model.
    """
    if ranks == 1:
        return WHOLE
    try:
        sizes = ShardSizes.of(model.config, ranks)
    except UserError as error:
        raise _untrained(error.problem, ranks) from error
    if (stored_as := weight_format(folder, of=SERVED_FIELD)).codings:
        raise _untrained(
            f"weights stored by {stored_as.method} are not cut over ranks for a worker yet", ranks
        )
    return ModelCut(sizes, rank)


def has_zero_padding(name: str, held: torch.Tensor, n_words: int) -> bool:
    """Return whether rows of words that are padding are zero: a worker reads them too.

    `held`: what the rank has of the tensor, [rows, ...], of which `n_words` are words.
    """
    return not _is_of_words(name) or not bool(held[n_words:].any())


def _is_of_words(name: str) -> bool:
    return name.rpartition(".")[0].rpartition(".")[2] in BY_WORDS


def _untrained(problem: str, ranks: int) -> UserError:
    return UserError(
        problem,
        field=f"--tp-size {ranks}",
        remedy="Serve with --tp-size 1 to harvest it; over ranks decode serves it alone.",
        reason="TensorParallelUnsupported",
    )
