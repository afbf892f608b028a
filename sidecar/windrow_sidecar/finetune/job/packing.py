"""Decide whether the rows of a job are packed into lines, of which sizes, and say what it saves.

Rows are separated by their numbers and by positions that restart. A model whose mask is made
without positions, or whose layers carry a state from token to token, lets a row see the one before.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from windrow.crd import TrainingSpec
from windrow.errors import UserError
from windrow_sidecar.finetune.adapter.compiled_layer import MOST_SHAPES, Shape
from windrow_sidecar.finetune.data.split import BatchPlan, DataSplit, examples_of, lengths_of
from windrow_sidecar.finetune.engine.grouping import RowGrouping
from windrow_sidecar.finetune.engine.packing import LineSizes
from windrow_sidecar.finetune.model.capabilities import sees_before
from windrow_sidecar.finetune.model.decoder_stack import DecoderStack
from windrow_sidecar.finetune.model.structure import in_mode
from windrow_sidecar.finetune.tasklets import MicroLimits

# Tokens of the two rows of the probe.
FIRST, SECOND = 3, 4
# Steps that padding is counted over.
_STEPS = 8


@dataclass(frozen=True, slots=True)
class Packing:
    """Arrangement of the rows of a job in micro-batches.

    Attributes:
        packed: one after the other in lines.
        sizes: of packed micro-batches; None: one line, as wide as its rows.
        refused: why rows are not packed where the job leaves it open; "": nothing is against it.
        padding: of what layers compute on in the first steps, the part that is padding: packed,
            and not packed; (0, 0) where rows are not packed.
        shapes: of micro-batches, that of the most tokens in the first steps first, where layers
            need shapes that repeat.
    """

    packed: bool
    sizes: LineSizes | None = None
    refused: str = ""
    padding: tuple[float, float] = (0.0, 0.0)
    shapes: tuple[Shape, ...] = ()

    @property
    def told(self) -> str:
        """Text on it; "" where there is nothing to say."""
        if not self.packed:
            return f"rows are not packed: {self.refused}" if self.refused else ""
        ours, theirs = self.padding
        line = f" of {self.sizes.line} tokens at most" if self.sizes is not None else ""
        return (
            f"rows are packed into lines{line}: {ours:.0%} of what layers compute on is padding, "
            f"{theirs:.0%} without packing"
        )


def packing_of(
    training: TrainingSpec,
    stack: DecoderStack,
    rows: DataSplit,
    plan: BatchPlan,
    *,
    prefix: bool,
    tokens: int,
    unasked: bool,
    repeats: bool,
) -> Packing:
    """Decide how the rows of a job stand together.

    Args:
        training: what the job says of it.
        stack: the model's layers, with the adapter.
        rows: of the job.
        plan: in which order they come.
        prefix: whether the adapter is one.
        tokens: of a micro-batch, where nobody waits for the device.
        unasked: whether rows are packed where the job leaves it open.
        repeats: whether the program that runs the layers needs shapes that repeat.

    Raises:
        UserError: the job asks for packing, and the model or the adapter refuses it.
    """
    refused = ""
    packed = training.packing or (training.packing is None and unasked)
    if packed:
        try:
            check_packing(stack, prefix=prefix)
        except UserError as error:
            if training.packing:
                raise
            packed, refused = False, error.problem
    sizes = None
    if repeats and training.packing is not False:
        lengths = lengths_of(rows.train)
        sizes = LineSizes.of(
            lengths,
            longest=max((*lengths, *lengths_of(rows.held_out))) * rows.together,
            max_length=training.max_sequence_length * rows.together,
            batch=training.batch_size * rows.together,
            most=tokens,
        )
    theirs, found = _counted(rows, plan, tokens, packed=False, sizes=None)
    if not packed:
        return Packing(packed=False, sizes=sizes, refused=refused, shapes=_most(found, repeats))
    ours, found = _counted(rows, plan, tokens, packed=True, sizes=sizes)
    if sizes is not None:  # the others come where memory is short
        for size in reversed(sizes.sizes):
            found.setdefault(sizes.shape(size), 0)
    return Packing(True, sizes, "", (ours, theirs), _most(found, repeats, packed=True))


def _most(
    found: Counter[tuple[int, int]], repeats: bool, packed: bool = False
) -> tuple[Shape, ...]:
    """Return the shapes (lines, tokens of a line) that most tokens have; none unless wanted."""
    most = found.most_common(MOST_SHAPES) if repeats else ()
    return tuple(Shape(*shape, packed) for shape, _ in most)


def _counted(
    rows: DataSplit, plan: BatchPlan, tokens: int, *, packed: bool, sizes: LineSizes | None
) -> tuple[float, Counter[tuple[int, int]]]:
    """Form the micro-batches of a job's first steps.

    Returns:
        which part of what layers compute on is padding, and the tokens of each shape (lines, tokens
        of a line).
    """
    shapes: Counter[tuple[int, int]] = Counter()
    grouping = RowGrouping(
        lambda: MicroLimits(tokens), packed=packed, line_sizes=sizes, together=rows.together
    )
    real = padded = 0
    for step in range(_STEPS):
        grouping.begin(step, rows.train, examples_of(plan.rows_of(step), rows.together))
        for group in grouping.coming():
            real += sum(micro.tokens for micro in group)
            padded += sum(micro.padded_tokens for micro in group)
            for micro in group:
                shapes[micro.lines, micro.width] += micro.padded_tokens
    return 1 - real / padded, shapes


def check_packing(stack: DecoderStack, *, prefix: bool) -> None:
    """Refuse packing where packed rows would train differently from padded ones.

    Args:
        stack: the model's layers, with the adapter.
        prefix: whether the adapter is one.

    Raises:
        UserError: says why.
    """
    if prefix:
        raise UserError(
            "rows in one line would share one prefix",
            field="spec.training.packing",
            remedy="Set it to false for this type of adapter.",
        )
    if why := packing_refused(stack):
        raise UserError(
            f"{type(stack.model).__name__} cannot take several rows in one line: {why}",
            field="spec.training.packing",
            remedy="Set it to false for this model.",
        )


def packing_refused(stack: DecoderStack) -> str:
    """Return why rows cannot be packed into one line; "" if they can.

    Each layer runs once, on two rows of a few tokens: what it makes of the second row must not
    depend on the first.
    """
    ids = torch.arange(FIRST + SECOND, device=stack.device)[None]
    positions = torch.cat([torch.arange(FIRST), torch.arange(SECOND)])[None].to(stack.device)
    with in_mode(stack.model, training=False):
        with torch.no_grad():
            hidden, calls = stack.record(ids, positions=positions)
            alone, _ = stack.record(ids[:, FIRST:])
        if not torch.allclose(hidden[:, FIRST:], alone, rtol=1e-2, atol=1e-3):
            return "its positions do not start over with a row"
        for index, call in enumerate(calls):
            if sees_before(stack, index, hidden, call, FIRST):
                return f"in layer {index} a row sees the one before it"
    return ""
