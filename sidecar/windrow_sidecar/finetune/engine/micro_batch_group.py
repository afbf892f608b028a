"""Run the tasklets of one group of micro-batches: the tensors that pass through the layers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from windrow_sidecar.compute.queued import Reading, to_device
from windrow_sidecar.finetune.adapter.adapters import Adapter
from windrow_sidecar.finetune.data.split import IGNORED, PAIR, Example
from windrow_sidecar.finetune.engine.group_progress import GroupProgress
from windrow_sidecar.finetune.model.boundaries import Activations, Boundaries, TorchBoundaries
from windrow_sidecar.finetune.model.coded import weight_elements
from windrow_sidecar.finetune.model.decoder_stack import DecoderStack
from windrow_sidecar.finetune.model.loss import Head
from windrow_sidecar.finetune.model.token_dropout import places
from windrow_sidecar.finetune.tasklets import MicroBatch, PackedLines, Tasklet
from windrow_sidecar.finetune.training.preference import PreferenceLoss
from windrow_sidecar.qos.view import Phase

_SEED_BITS = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class ModelParts:
    """The parts of a model that tasklets call: decoder layers, head and adapter."""

    stack: DecoderStack
    head: Head
    adapter: Adapter

    @property
    def weights(self) -> int:
        """Parameters of the largest layer, or of the model's head where that is larger."""
        head: nn.Module | None = self.stack.model.get_output_embeddings()  # type: ignore[operator]
        modules = [*self.stack.layers, *([head] if head is not None else [])]
        return max(weight_elements(module) for module in modules)


@dataclass(frozen=True, slots=True)
class PairsToCompare:
    """The loss of a group whose rows are pairs of answers.

    Attributes:
        loss: of the pairs.
        references: the base model's log-probability of some rows, float64 [rows]; None: the base
            itself runs.
    """

    loss: PreferenceLoss
    references: Callable[[Sequence[int]], Tensor] | None


@dataclass(frozen=True, slots=True)
class RowsOfJob:
    """Rows of a job's step that pass through the layers together.

    Attributes:
        micro: their numbers and lengths.
        examples: what they are, in the same order.
        labels_in_batch: by which the job's loss is divided.
        seed: of the job's dropout.
    """

    micro: MicroBatch
    examples: tuple[Example, ...]
    labels_in_batch: int
    seed: int


class MicroBatchGroup:
    """The tensors of one group of micro-batches between its first and its last tasklet.

    Args:
        parts: of the model.
        group: the micro-batches.
        examples: what their rows are.
        boundaries: where activations between layers live.
        labels_in_batch: by which the loss is divided; pairs, where rows are compared.
        seed: of dropout. Each (step, row, token, module) drops on its own account, so that the same
            units are dropped however the work is cut, and again when it runs again.
        longest: tokens of the longest row of the step or evaluation.
        pairs: set where each two neighbouring rows are the answers of a pair.
    """

    def __init__(
        self,
        parts: ModelParts,
        group: Sequence[MicroBatch],
        examples: Sequence[Example],
        boundaries: Boundaries,
        *,
        labels_in_batch: int,
        seed: int,
        longest: int = 0,
        pairs: PairsToCompare | None = None,
    ) -> None:
        self._parts, self._examples, self._boundaries = parts, examples, boundaries
        self._labels_in_batch, self._seed, self._longest = labels_in_batch, seed, longest
        self._at: dict[MicroBatch, Activations] = {}
        self._targets: dict[MicroBatch, Tensor] = {}  # on the host
        self.progress = GroupProgress(group, parts.stack.depth)
        self._loss_read, self._losses = 0.0, deque[Reading]()
        self._pairs = pairs
        self._row_losses: dict[MicroBatch, Tensor] = {}  # of pairs: float64 [rows]

    @property
    def group(self) -> tuple[MicroBatch, ...]:
        """The micro-batches."""
        return self.progress.group

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of all micro-batches."""
        return tuple(row for micro in self.group for row in micro.rows)

    @property
    def loss(self) -> float:
        """Sum over the labels, or pairs, so far; waits until the device has computed it."""
        while self._losses:
            self._loss_read += self._losses.popleft().value()
        return self._loss_read

    def log_probabilities(self) -> dict[int, float]:
        """Return those of answers whose loss is known, by row; waits for the device."""
        return {
            row: -loss
            for micro, losses in self._row_losses.items()
            for row, loss in zip(micro.rows, losses.tolist(), strict=True)
        }

    @property
    def loss_is_here(self) -> bool:
        """True where `loss` would not wait; on the host it never does."""
        return all(reading.is_here for reading in self._losses)

    def run(self, tasklet: Tasklet) -> None:
        """Run a tasklet, and note the progress of the group.

        Raises:
            ValueError: it may not run yet.
        """
        progress, micro, run = self.progress, tasklet.micro, self._RUN[tasklet.phase]
        for layer in tasklet.layers:
            progress.check(tasklet, layer)
            assert micro is not None
            run(self, tasklet, micro, layer)
            progress.note(tasklet, layer)
        if tasklet.phase is Phase.BACKWARD and self.progress.done:
            self._finish()

    def can_repeat(self, backward: Tasklet) -> bool:
        """Return whether an interrupted backward may run again as if it never had.

        A window has added to the sums of its keys and values, or to those of the prefix, by then.
        """
        assert backward.micro is not None
        at = self._at[backward.micro]
        return backward.window == backward.micro.whole and at.prefix is None

    @property
    def can_spill(self) -> bool:
        """True where only layers depend on the adapter; a prefix does too."""
        return all(at.prefix is None for at in self._at.values())

    @property
    def spill_bytes(self) -> int:
        """Bytes of host memory that `spill` takes."""
        return sum(x.nbytes for at in self._at.values() for x in at.inputs if x is not None)

    def forget(self) -> None:
        """Forget what layers can compute again from their inputs; nothing is copied.

        Layers that have run up run forward once more, each before its backward, so nothing changes
        in what is learnt.
        """
        for at in self._at.values():
            at.forget_graphs()
        if (graphs := self._parts.stack.graphs) is not None:
            graphs.leave(tuple(self._at.values()))

    def spill(self) -> None:
        """Move what later tasklets need to the host and forget the rest; boundaries are cleared.

        On the host further boundaries are in memory of its own as well.
        """
        self.forget()
        for at in self._at.values():
            at.move_inputs()
        if (graphs := self._parts.stack.graphs) is not None:
            graphs.leave(tuple(self._at.values()))
        self._boundaries.clear()
        self._boundaries = TorchBoundaries()

    def _forward(self, part: Tasklet, micro: MicroBatch, layer: int) -> None:
        at = self._at.get(micro) or self._begin(part, micro)
        self._seed_dropout(part, micro, layer)
        self._parts.stack.forward(
            at, layer, part.window, self._boundaries, learn=not micro.evaluation
        )

    def _begin(self, part: Tasklet, micro: MicroBatch) -> Activations:
        examples = [self._examples[row] for row in micro.rows]
        positions = row_of = None
        if micro.packed:
            ids, targets = packed(examples, micro.packed)
            row_of, positions = (
                to_device(tensor, self._parts.stack.device) for tensor in places(micro.packed)
            )
        else:
            ids, targets = padded(examples)
        ids, self._targets[micro] = to_device(ids, self._parts.stack.device), targets
        prefix = self._parts.adapter.prefix(micro.lines, learn=not micro.evaluation)
        if not self._at and not micro.evaluation:
            tokens = max(other.padded_tokens for other in self.group)
            self._boundaries.expect(len(self.group), tokens)
        stack, dropout = self._parts.stack, self._parts.adapter.dropout
        if stack.drops_embeddings and not micro.evaluation:
            dropout.at(self._seed, part.step, micro.rows, micro.whole, packed=micro.packed)
        at = self._at[micro] = stack.begin(
            ids, prefix, positions, dropout, self._longest, row_of=row_of
        )
        return at

    def _loss(self, part: Tasklet, micro: MicroBatch, layer: int) -> None:
        at, window = self._at[micro], part.window
        hidden = at.inputs[-1]
        assert hidden is not None
        part_of_row = (slice(None), slice(window.begin, window.end))
        hidden = hidden.detach()[part_of_row].to(at.ids.device)
        targets = self._targets[micro][part_of_row]
        if self._pairs is not None:
            self._compare(self._pairs, part, micro, layer, hidden)
            return
        if micro.evaluation:
            self._losses.append(Reading(self._parts.head.loss(hidden, targets)))
            return
        self._seed_dropout(part, micro, layer)  # for an adapter of the head
        gradient = self._learn(hidden, targets)
        if window == micro.whole:
            at.gradient = gradient
            return
        if at.gradient is None:
            at.gradient = gradient.new_empty(*at.ids.shape, gradient.shape[-1])
        at.gradient[part_of_row] = gradient

    def _learn(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Note the loss; return its gradient at the last layer's output, [lines, tokens, hidden].

        Args:
            hidden: that output.
            targets: [lines, tokens], int64, on the host.
        """
        adapter = self._parts.adapter
        total, gradient = self._parts.head.loss_and_gradient(
            hidden,
            targets,
            labels_in_batch=self._labels_in_batch,
            dropout=adapter.dropout if adapter.drops else None,
        )
        self._losses.append(Reading(total))
        return gradient

    def _learning(self, layer: int) -> list[nn.Parameter]:
        """Return the parameters that learn in a layer."""
        return self._parts.adapter.learning(self._parts.stack.layers[layer])

    def _compare(
        self, pairs: PairsToCompare, part: Tasklet, micro: MicroBatch, layer: int, hidden: Tensor
    ) -> None:
        """Take the losses of answers in a window; with the last one the pairs' own are known.

        The gradient is that of the answers' sum until then: each answer's share in its pair's loss
        depends on all tokens of both.
        """
        at, window, adapter = self._at[micro], part.window, self._parts.adapter
        part_of_row = (slice(None), slice(window.begin, window.end))
        row_of, learn = _row_of(micro), not micro.evaluation
        self._seed_dropout(part, micro, layer)
        losses, gradient = self._parts.head.row_losses(
            hidden,
            self._targets[micro][part_of_row],
            row_of[part_of_row],
            len(micro.rows),
            learn=learn,
            dropout=adapter.dropout if learn and adapter.drops else None,
        )
        if micro in self._row_losses:
            losses = self._row_losses[micro] + losses
        if gradient is not None and window == micro.whole:
            at.gradient = gradient
        elif gradient is not None:
            if at.gradient is None:
                at.gradient = gradient.new_empty(*at.ids.shape, gradient.shape[-1])
            at.gradient[part_of_row] = gradient
        if window.end == micro.width:
            tuned = -losses.view(-1, PAIR)
            reference = tuned
            if pairs.references is not None:
                known = to_device(pairs.references(micro.rows), tuned.device)
                reference = known.view(-1, PAIR)
            if at.gradient is not None:
                shares = -pairs.loss.slopes(tuned, reference).flatten() / self._labels_in_batch
                wide = torch.promote_types(at.gradient.dtype, torch.float32)
                of_tokens = shares.to(wide)[to_device(row_of, shares.device)]
                at.gradient.mul_(of_tokens[..., None])
            self._losses.append(Reading(pairs.loss.losses(tuned, reference).sum()))
        self._row_losses[micro] = losses

    def _backward(self, part: Tasklet, micro: MicroBatch, layer: int) -> None:
        self._seed_dropout(part, micro, layer)  # for what runs its forward a second time
        stack, at = self._parts.stack, self._at[micro]
        if stack.backward_by_graphs(at, layer, part.window):
            return
        with _whole_or_nothing(self._learning(layer)):
            stack.backward(at, layer, part.window)

    _RUN = {  # noqa: RUF012 - a table of methods
        Phase.FORWARD: _forward,
        Phase.LOSS: _loss,
        Phase.BACKWARD: _backward,
    }

    def _seed_dropout(self, part: Tasklet, micro: MicroBatch, layer: int) -> None:
        if micro.evaluation:
            return
        if self._parts.adapter.drops:
            self._parts.adapter.dropout.at(
                self._seed,
                part.step,
                micro.rows,
                part.window,
                packed=micro.packed,
            )
        if self._parts.stack.own_dropout:
            key = (self._seed, part.step, micro.rows[0], layer)
            torch.manual_seed(hash(key) & _SEED_BITS)

    def _finish(self) -> None:
        for at in self._at.values():
            if at.prefix is not None:
                at.prefix.backward()
        self._at.clear()
        self._boundaries.clear()


@contextmanager
def _whole_or_nothing(learns: Sequence[nn.Parameter]) -> Iterator[None]:
    """Add the gradients of the block to these parameters when it ends, none of them if it fails.

    Costs no addition more: without a `.grad` autograd hands over the gradient itself.
    """
    before = [(p, grad) for p in learns if (grad := p.grad) is not None]
    for parameter, _ in before:  # none in the first backward of a layer, most often the only one
        parameter.grad = None
    try:
        yield
    except BaseException:
        for parameter in learns:
            parameter.grad = None
        for parameter, gradient in before:
            parameter.grad = gradient
        raise
    added, to = [], []
    for parameter, gradient in before:
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            added.append(parameter.grad)
            to.append(gradient)
    if added:  # in one call: a GPU is queued fourteen of them otherwise
        torch._foreach_add_(added, to)


def _row_of(micro: MicroBatch) -> Tensor:
    """Return to which row of a micro-batch each token belongs: [lines, width], int64."""
    if micro.packed:
        row_of, _ = places(micro.packed)
        return row_of.clamp(max=len(micro.rows) - 1)  # padding has no loss
    return torch.arange(len(micro.rows))[:, None].expand(-1, micro.width)


def padded(examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
    """Return ids and targets, [rows, width] int64, padded on the right.

    `targets[:, i]` is what the model has to say after token i; -100 where the loss does not look.
    """
    width = max(e.length for e in examples)
    ids = torch.zeros(len(examples), width, dtype=torch.int64)
    targets = torch.full((len(examples), width), IGNORED, dtype=torch.int64)
    for i, example in enumerate(examples):
        ids[i, : example.length] = torch.tensor(example.ids)
        targets[i, : example.length - 1] = torch.tensor(example.labels[1:])
    return ids, targets


def packed(examples: Sequence[Example], lines: PackedLines) -> tuple[Tensor, Tensor]:
    """Return ids and targets as `padded` does, [lines, width] int64, row after row in each line."""
    ids = torch.zeros(len(lines.lengths), lines.width, dtype=torch.int64)
    targets = torch.full_like(ids, IGNORED)
    rest = iter(examples)
    for line, lengths in enumerate(lines.lengths):
        end = 0
        for length in lengths:
            example, begin = next(rest), end
            end = begin + length
            ids[line, begin:end] = torch.tensor(example.ids)
            targets[line, begin : end - 1] = torch.tensor(example.labels[1:])
    return ids, targets
