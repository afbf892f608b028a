"""Which tokens a job trains on, in which order, and which it keeps aside to be judged by.

A step's rows follow from (seed, step) alone, so the position in the data is the step's number and
a resumed job reads what the interrupted one would have read.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from windrow.conditions import Reason
from windrow.errors import UserError
from windrow_sidecar.finetune.rows import Row, Segment

IGNORED = -100


@dataclass(frozen=True, slots=True)
class Example:
    """One tokenized row. `labels[i]` is `ids[i]`, or -100 where the loss does not look."""

    ids: tuple[int, ...]
    labels: tuple[int, ...]
    where: str

    @property
    def length(self) -> int:
        """Tokens."""
        return len(self.ids)

    @property
    def targets(self) -> int:
        """Tokens that are predicted: labels after the first position."""
        return sum(label != IGNORED for label in self.labels[1:])


@dataclass(frozen=True, slots=True)
class Split:
    """Rows to train on and rows that are held out."""

    train: tuple[Example, ...]
    held_out: tuple[Example, ...]


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The order of the rows: `rows` of them, `batch` a step, shuffled anew in each epoch."""

    rows: int
    batch: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """The last batch of an epoch may be smaller than the others."""
        return -(-self.rows // self.batch)

    def total_steps(self, *, epochs: int | None, max_steps: int | None) -> int:
        """Steps of a job that names one of the two."""
        return max_steps if max_steps is not None else (epochs or 1) * self.steps_per_epoch

    def rows_of(self, step: int) -> tuple[int, ...]:
        """Row numbers of step `step` (the first is 0)."""
        epoch, index = divmod(step, self.steps_per_epoch)
        order = _order(self.rows, self.seed, epoch)
        return order[index * self.batch : (index + 1) * self.batch]


@lru_cache(maxsize=2)
def _order(rows: int, seed: int, epoch: int) -> tuple[int, ...]:
    order = list(range(rows))
    random.Random(f"order:{seed}:{epoch}").shuffle(order)
    return tuple(order)


def split(examples: Sequence[Example], *, eval_fraction: float, seed: int) -> Split:
    """Hold out `eval_fraction` of the rows (at least one where it is above 0), by the seed.

    Raises:
        UserError: too few rows to hold one out.
    """
    n_held = max(1, round(len(examples) * eval_fraction)) if eval_fraction > 0 else 0
    if n_held >= len(examples):
        raise UserError(
            f"{len(examples)} row(s) are too few to hold out {n_held}",
            field="spec.dataset.evalFraction",
            remedy="Add rows, or set it to 0.",
            reason=Reason.DATASET_EMPTY,
        )
    held = set(random.Random(f"split:{seed}").sample(range(len(examples)), n_held))
    return Split(
        train=tuple(e for i, e in enumerate(examples) if i not in held),
        held_out=tuple(e for i, e in enumerate(examples) if i in held),
    )


def tokenize(rows: Sequence[Row], tokenizer: Any, *, max_length: int) -> list[Example]:  # noqa: ANN401
    """Turn rows into tokens with the tokenizer of the model; cut each to `max_length`.

    The loss counts what the assistant says (chat), the output (instruction) or everything (text).

    Raises:
        UserError: the tokenizer has no chat template, or a row has nothing left to learn from; the
            message names file and line.
    """
    return [_example(row, tokenizer, max_length) for row in rows]


def _example(row: Row, tokenizer: Any, max_length: int) -> Example:  # noqa: ANN401
    chat = bool(row.messages)
    segments = _chat_segments(row, tokenizer) if chat else row.segments
    ids: list[int] = []
    labels: list[int] = []
    if not chat and tokenizer.bos_token_id is not None:
        ids.append(tokenizer.bos_token_id)
        labels.append(IGNORED)
    for segment in segments:
        tokens = tokenizer.encode(segment.text, add_special_tokens=False)
        ids += tokens
        labels += tokens if segment.learn else [IGNORED] * len(tokens)
    if not chat and tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
        labels.append(tokenizer.eos_token_id)
    example = Example(tuple(ids[:max_length]), tuple(labels[:max_length]), row.where)
    if example.targets == 0:
        raise UserError(
            f"nothing to learn from is left within {max_length} tokens (the row has {len(ids)})",
            field=row.where,
            remedy="Raise spec.training.maxSequenceLength, or shorten or drop the row.",
            reason=Reason.DATASET_INVALID,
        )
    return example


def _chat_segments(row: Row, tokenizer: Any) -> tuple[Segment, ...]:  # noqa: ANN401
    """Cut the rendered conversation where the assistant begins and ends to speak."""
    if not tokenizer.chat_template:
        raise UserError(
            "the model's tokenizer has no chat template, so chat rows cannot be rendered",
            field="spec.dataset.format",
            remedy="Use a model with a template, or rows of the format instruction or text.",
            reason=Reason.DATASET_INVALID,
        )
    turns = [{"role": m.role, "content": m.content} for m in row.messages]
    segments: list[Segment] = []
    done = ""
    for i, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        prompt = _render(tokenizer, turns[:i], row, prompt=True)
        answered = _render(tokenizer, turns[: i + 1], row, prompt=False)
        if not (prompt.startswith(done) and answered.startswith(prompt)):
            raise UserError(
                "the model's chat template renders earlier turns anew with each answer, so the "
                "answers cannot be told apart",
                field=row.where,
                remedy="Give each row one turn of the assistant, the last.",
                reason=Reason.DATASET_INVALID,
            )
        segments.append(Segment(prompt[len(done) :], learn=False))
        segments.append(Segment(answered[len(prompt) :], learn=True))
        done = answered
    return tuple(segments)


def _render(tokenizer: Any, turns: list[dict[str, str]], row: Row, *, prompt: bool) -> str:  # noqa: ANN401
    from jinja2.exceptions import TemplateError

    try:
        return str(
            tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=prompt)
        )
    except TemplateError as error:
        raise UserError(
            f"the model's chat template refuses the turns: {error}",
            field=row.where,
            remedy="Order the turns as the template wants them.",
            reason=Reason.DATASET_INVALID,
        ) from error
