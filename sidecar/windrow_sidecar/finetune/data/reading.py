"""Rows of a job from a dataset: every file read once, every wrong row named."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from windrow.conditions import Reason
from windrow.crd import DatasetSpec
from windrow.errors import UserError
from windrow.redaction import redacted
from windrow.rows import READ, row_of
from windrow_sidecar.finetune.data.places import find_files
from windrow_sidecar.finetune.data.preparation_budget import PreparationBudget
from windrow_sidecar.finetune.data.reading_memory import bounded_memory
from windrow_sidecar.finetune.data.records import read_records
from windrow_sidecar.finetune.data.remote import Credentials
from windrow_sidecar.finetune.data.request_form import rows_are
from windrow_sidecar.finetune.data.source_access import UNCONFINED, SourceAccess
from windrow_sidecar.finetune.data.split import (
    PAIR,
    DataSplit,
    Example,
    examples_of,
    held_out_rows,
    weighted,
)
from windrow_sidecar.finetune.data.store import StoredRows, TokenFile
from windrow_sidecar.finetune.data.tokens import RowTokenizer

log = logging.getLogger(__name__)

# Wrong rows that one message names; reading ends there.
NAMED = 10


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits of what a model can take."""

    vocabulary: int
    positions: int | None  # tokens of a row; None: the model names no bound
    prefix: int = 0  # positions that virtual tokens take before each row

    @classmethod
    def of(cls, config: Any, *, prefix: int = 0) -> ModelLimits:  # noqa: ANN401
        """Read them from transformers' configuration of a model."""
        text = config.get_text_config()
        return cls(int(text.vocab_size), getattr(text, "max_position_embeddings", None), prefix)


@dataclass(slots=True)
class _WrongRows:
    """Wrong rows found so far, and what that means."""

    skip: bool
    found: list[UserError] = field(default_factory=list)
    count: int = 0
    first: str = ""

    def add(self, error: UserError) -> None:
        if error.reason != Reason.DATASET_INVALID or error.field.startswith("spec."):
            raise error
        self.count += 1
        if self.skip:
            log.warning("row left out: %s", error)
            self.first = self.first or f"{error.field}: {error.problem}"
        else:
            self.found.append(error)
            if len(self.found) == NAMED:
                self.settle()

    def notes(self) -> Iterator[str]:
        """Yield what is left out, in a sentence."""
        if self.first:
            yield f"{rows_are(self.count)} wrong and left out (first {self.first})"

    def settle(self) -> None:
        """Raise what was found, as one error."""
        if len(self.found) == 1:
            raise self.found[0]
        if self.found:
            first, *others = self.found
            also = "; ".join(f"{e.field}: {e.problem}" for e in others)
            more = ", reading ended there" if len(self.found) == NAMED else ""
            raise UserError(
                f"{first.problem}; also wrong{more}: {also}",
                field=first.field,
                remedy=f"{first.remedy} Or set spec.dataset.badRows to skip.",
                reason=Reason.DATASET_INVALID,
            )


def read_dataset(
    spec: DatasetSpec,
    tokenizer: RowTokenizer,
    limits: ModelLimits,
    *,
    seed: int,
    alive: Callable[[], None] = lambda: None,
    into: TokenFile | None = None,
    credentials: Credentials | None = None,
    access: SourceAccess = UNCONFINED,
) -> DataSplit:
    """Read, check and tokenize all rows; hold out some by the seed, or those of `evalSource`.

    `alive` is called at each row, since a large set may take hours. `into`: where they are put.
    `credentials`: for the place where they are. `access`: what may be read.

    Raises:
        UserError: a file or row is wrong (the message names up to ten rows with their places), a
            row is longer than the model allows, there are too few rows, or a confined job's rows
            take too much memory or computing.
        Transient: the place does not answer.
    """
    stored = TokenFile() if into is None else into
    rows = _Rows(spec, tokenizer, limits, stored, alive, credentials, access)
    together = PAIR if spec.format == "preference" else 1
    ends, weights = [], [spec.weight, *(mixed.weight for mixed in spec.mixture)]
    with nullcontext() if access.trees is None else bounded_memory():
        rows.read("source", spec.source)
        ends.append(len(stored))
        for number, mixed in enumerate(spec.mixture):
            rows.read(f"mixture[{number}].source", mixed.source)
            ends.append(len(stored))
        trained = len(stored)
        if spec.eval_source is not None:
            rows.read("evalSource", spec.eval_source)
    rows.wrong.settle()
    if spec.eval_source is None:
        drawn = held_out_rows(trained // together, eval_fraction=spec.eval_fraction, seed=seed)
        held = frozenset(examples_of(drawn, together))
    else:
        held = frozenset(range(trained, len(stored)))
    notes = (*rows.notes, *rows.wrong.notes(), *tokenizer.notes())
    notes = (*notes, *_of_unread(rows.unread, spec.format))
    for note in notes:
        log.warning("%s", note)
    kept: list[int] = []
    # A weight of 100 makes of ten million rows more numbers than a machine's memory holds.
    with nullcontext() if access.trees is None else bounded_memory():
        for part, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
            left = [row for row in range(begin, end, together) if row not in held]
            if left:
                kept += weighted(left, weights[part], seed=seed, part=part)
        numbers = [row + i for row in kept for i in range(together)]
    # Where evaluation rows begin, and how often rows come, is not in their tokens.
    digest = stored.digest if spec.eval_source is None else f"{stored.digest}/{trained}"
    if any(weight != 1.0 for weight in weights):
        digest = f"{digest}/{list(zip(ends, weights, strict=True))}"
    return DataSplit(
        StoredRows(stored, numbers),
        StoredRows(stored, sorted(held)),
        rows.wrong.count,
        tokenizer.cut,
        notes,
        digest,
        tokenizer.unlike_before,
        together,
    )


class _Rows:
    """Rows on their way from their places to a file of tokens.

    Args: as those of `read_dataset`.
    """

    def __init__(
        self,
        spec: DatasetSpec,
        tokenizer: RowTokenizer,
        limits: ModelLimits,
        stored: TokenFile,
        alive: Callable[[], None],
        credentials: Credentials | None,
        access: SourceAccess,
    ) -> None:
        self._spec, self._tokenizer, self._limits, self._stored = spec, tokenizer, limits, stored
        self._alive, self._credentials, self._access = alive, credentials, access
        confined = access.trees is not None
        self._budget = PreparationBudget(access.preparation_s) if confined else None
        self.wrong = _WrongRows(skip=spec.bad_rows == "skip")
        self.notes: list[str] = []
        self.unread: Counter[str] = Counter()

    def read(self, field: str, source: str) -> None:
        """Read, check, tokenize and store the rows of one place, which a field names.

        Raises:
            UserError: see `read_dataset`; no row can be used.
        """
        before, wrong = len(self._stored), self.wrong.count
        with _about(f"spec.dataset.{field}"):
            self._read(source)
        if len(self._stored) == before:
            self.wrong.settle()
            raise _empty(field, redacted(source), self.wrong.count - wrong, self.wrong.first)

    def _read(self, source: str) -> None:
        spec, note = self._spec, self.notes.append
        for file in find_files(source, spec.split, note, self._credentials, self._access):
            holds_any = False
            for record in read_records(file):
                self._alive()
                holds_any = True
                try:
                    row = row_of(record, spec.format, spec.columns)
                    examples = self._tokenizer.examples(row)
                except UserError as error:
                    self.wrong.add(error)
                    examples = ()
                # Not one of the wrong rows, which may be left out: it ends the reading.
                if self._budget is not None:
                    self._budget.count(record.where, self._tokenizer.characters)
                if not examples:
                    continue
                for example in examples:
                    _check_fits(example, self._limits)
                for example in examples:
                    self._stored.add(example)
                self.unread.update(row.unread)
            if not holds_any:
                note(f"{file.name} holds no row")


@contextmanager
def _about(field: str) -> Iterator[None]:
    """Hold while the rows of a field are read: what is wrong with their place names the field."""
    try:
        yield
    except UserError as error:
        if error.field != "spec.dataset.source":
            raise
        raise UserError(
            error.problem,
            field=field,
            remedy=error.remedy,
            reason=error.reason,
        ) from error


def _of_unread(rows: Counter[str], form: str) -> Iterator[str]:
    """Yield which fields of rows do not count, in a sentence."""
    if rows:
        named = ", ".join(f"{name} ({n})" for name, n in rows.most_common(NAMED))
        more = f" and {len(rows) - NAMED} more" if len(rows) > NAMED else ""
        counts = ", ".join(sorted(READ[form]))
        yield (
            f"fields of rows that are not read: {named}{more}; of a row of the format {form} these "
            f"are: {counts}"
        )


def _check_fits(example: Example, limits: ModelLimits) -> None:
    if limits.positions is not None and limits.prefix + example.length > limits.positions:
        raise _too_long(example, limits.positions, limits.prefix)
    if max(example.ids) >= limits.vocabulary:
        raise UserError(
            f"the tokenizer makes token {max(example.ids)} ({example.where}), the model's "
            f"vocabulary ends before {limits.vocabulary}",
            field="spec.model.name",
            remedy="Use the model's own tokenizer, or resize the model's embeddings.",
            reason=Reason.MODEL_UNSUPPORTED,
        )


def _too_long(example: Example, positions: int, prefix: int) -> UserError:
    problem = f"{example.where} has {example.length} tokens, the model allows {positions}"
    remedy = f"Set it to {positions - prefix} or less: longer rows are cut."
    if prefix:
        problem += f", of which spec.adapter.prefix.virtualTokens takes {prefix}"
        remedy = (
            f"{remedy} Or lower virtualTokens." if prefix < positions else "Lower virtualTokens."
        )
    return UserError(
        problem,
        field="spec.training.maxSequenceLength",
        remedy=remedy,
        reason=Reason.DATASET_INVALID,
    )


def _empty(field: str, source: str, wrong: int, first: str) -> UserError:
    why = "it holds no row"
    if wrong:
        why = f"all of its {wrong} rows are wrong (first {first})"
    return UserError(
        f"{source} has nothing to {'evaluate' if field == 'evalSource' else 'train'} on: {why}",
        field=f"spec.dataset.{field}",
        remedy="Write one JSON object a line.",
        reason=Reason.DATASET_EMPTY,
    )
