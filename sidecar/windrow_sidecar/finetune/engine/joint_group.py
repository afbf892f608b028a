"""Run the tasklets of one micro-batch that has rows of several jobs over one base model.

The rows of a job are neighbours, padded on the right to the longest of all. Layers compute on all
of them at once; each job's rows have their own low-rank products, dropout, loss and gradients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from windrow_sidecar.compute.queued import Reading
from windrow_sidecar.finetune.adapter.joint_linears import JointLinears
from windrow_sidecar.finetune.engine.micro_batch_group import (
    MicroBatchGroup,
    ModelParts,
    RowsOfJob,
)
from windrow_sidecar.finetune.model.boundaries import Boundaries
from windrow_sidecar.finetune.model.decoder_stack import DecoderStack
from windrow_sidecar.finetune.tasklets import MicroBatch, Tasklet


@dataclass(frozen=True, slots=True, eq=False)
class JointPart:
    """The rows of one job in a joint micro-batch.

    Attributes:
        key: of the job's adapter among the joint linears.
        parts: of the job's own model: its head and its adapter.
        rows: of its step.
        own_head: whether its head has an adapter, so that it is not the base's.
    """

    key: object
    parts: ModelParts
    rows: RowsOfJob
    own_head: bool = False

    def tasklet(self, joint: Tasklet) -> Tasklet:
        """Return a tasklet of the micro-batch as that of this job's rows alone."""
        micro = self.rows.micro
        return Tasklet(micro.step, joint.phase, joint.layer, joint.layer_end, joint.window, micro)


class JointGroup(MicroBatchGroup):
    """The tensors of a joint micro-batch between its first and its last tasklet.

    Args:
        stack: the base's layers, in which `linears` run.
        linears: with the adapter of each part's job.
        parts: one below the other, one at least.
        boundaries: where activations between layers live.
        number: of the micro-batch among those of the worker.
    """

    def __init__(
        self,
        stack: DecoderStack,
        linears: JointLinears,
        parts: Sequence[JointPart],
        boundaries: Boundaries,
        *,
        number: int,
    ) -> None:
        self._linears, self.parts = linears, tuple(parts)
        lengths = tuple(length for part in parts for length in part.rows.micro.lengths)
        first = parts[0].parts  # of a LoRA adapter nothing is asked that is not the same for all
        super().__init__(
            ModelParts(stack, first.head, first.adapter),
            [MicroBatch(number, tuple(range(len(lengths))), lengths)],
            [example for part in parts for example in part.rows.examples],
            boundaries,
            labels_in_batch=0,
            seed=0,
        )
        self._of_parts = [deque[Reading]() for _ in parts]
        self._read = [0.0] * len(parts)

    def loss_of(self, part: int) -> float:
        """Return the sum over a part's labels so far; waits until the device has computed it."""
        while self._of_parts[part]:
            self._read[part] += self._of_parts[part].popleft().value()
        return self._read[part]

    @property
    def loss_is_here(self) -> bool:
        """True where `loss_of` would not wait; on the host it never does."""
        return all(reading.is_here for of_part in self._of_parts for reading in of_part)

    def _learn(self, hidden: Tensor, targets: Tensor) -> Tensor:
        if not any(part.own_head for part in self.parts):
            return self._learn_by_one_head(hidden, targets)
        gradients = []
        for part, lines, losses in zip(self.parts, self._lines(), self._of_parts, strict=True):
            adapter = part.parts.adapter
            total, gradient = part.parts.head.loss_and_gradient(
                hidden[lines],
                targets[lines],
                labels_in_batch=part.rows.labels_in_batch,
                dropout=adapter.dropout if adapter.drops else None,
            )
            losses.append(Reading(total))
            gradients.append(gradient)
        return torch.cat(gradients)

    def _learn_by_one_head(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Pass all lines through the base's head; each job's gradient is by its own labels."""
        count = torch.tensor([part.rows.micro.lines for part in self.parts])
        of_line = torch.arange(len(self.parts)).repeat_interleave(count)
        of_token = of_line[:, None].expand(-1, targets.shape[1])
        totals, gradient = self._parts.head.row_losses(
            hidden, targets, of_token, len(self.parts), learn=True
        )
        assert gradient is not None
        for n, (part, lines) in enumerate(zip(self.parts, self._lines(), strict=True)):
            self._of_parts[n].append(Reading(totals[n]))
            gradient[lines] /= part.rows.labels_in_batch
        return gradient

    def _lines(self) -> list[slice]:
        """Return the lines of each part."""
        ends = list(accumulate(part.rows.micro.lines for part in self.parts))
        return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]

    def _learning(self, layer: int) -> list[nn.Parameter]:
        return self._linears.learning(self._parts.stack.layers[layer])

    def _seed_dropout(self, part: Tasklet, micro: MicroBatch, layer: int) -> None:
        del micro, layer
        self._linears.run_for([(each.key, each.rows.micro.lines) for each in self.parts])
        for each in self.parts:
            if each.parts.adapter.drops:
                of_job = each.rows.micro
                each.parts.adapter.dropout.at(each.rows.seed, of_job.step, of_job.rows, part.window)
