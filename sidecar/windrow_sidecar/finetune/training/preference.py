"""Direct preference optimization: the loss of pairs of answers, and the base's view of them.

A pair is two neighbouring examples: the chosen answer, then the rejected one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from windrow.crd import TrainingSpec

REFERENCE = "reference"  # kind of a checkpoint's tensors, of which each name begins with one


@dataclass(frozen=True, slots=True)
class PreferenceLoss:
    """The sigmoid loss of DPO (Rafailov et al. 2023), with the label smoothing of its authors.

    Attributes:
        beta: weight of the distance from the base model.
        label_smoothing: share of the pairs whose preference may be the wrong way round.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0

    @classmethod
    def of(cls, spec: TrainingSpec) -> PreferenceLoss | None:
        """Read it from the spec; None: the method is another one."""
        dpo = spec.preferences
        return None if dpo is None else cls(dpo.beta, dpo.label_smoothing)

    def losses(self, tuned: Tensor, reference: Tensor) -> Tensor:
        """Return the loss of each pair, [pairs].

        Args:
            tuned: log-probabilities of the answers, [pairs, 2], float64.
            reference: the base model's, [pairs, 2], float64.
        """
        scaled = self.beta * _margins(tuned, reference)
        right, wrong = functional.logsigmoid(scaled), functional.logsigmoid(-scaled)
        return -(1.0 - self.label_smoothing) * right - self.label_smoothing * wrong

    def slopes(self, tuned: Tensor, reference: Tensor) -> Tensor:
        """Return d(loss)/d(log-probability) of each answer, [pairs, 2]; see `losses`."""
        scaled = self.beta * _margins(tuned, reference)
        right, wrong = torch.sigmoid(-scaled), torch.sigmoid(scaled)
        of_margin = -self.beta * (
            (1.0 - self.label_smoothing) * right - self.label_smoothing * wrong
        )
        return torch.stack((of_margin, -of_margin), dim=-1)


def _margins(tuned: Tensor, reference: Tensor) -> Tensor:
    over_reference = tuned - reference
    return over_reference[:, 0] - over_reference[:, 1]


class References:
    """Log-probabilities that the base model gives each answer: computed once and kept.

    Its tensors are replaced, never changed, so that a checkpoint can read them meanwhile.

    Args:
        train: examples to train on.
        held_out: examples that are held out.
    """

    def __init__(self, train: int, held_out: int) -> None:
        self._known = {
            name: torch.full((count,), torch.nan, dtype=torch.float64)
            for name, count in (("train", train), ("held_out", held_out))
        }

    def unknown(self, part: str, examples: Sequence[int]) -> tuple[int, ...]:
        """Return those of some examples that are not known yet, in their order."""
        lacking = torch.isnan(self._known[part][list(examples)]).tolist()
        return tuple(row for row, lacks in zip(examples, lacking, strict=True) if lacks)

    def of(self, part: str, examples: Sequence[int]) -> Tensor:
        """Return those of some examples, [examples]; NaN where one is not known."""
        return self._known[part][list(examples)]

    def note(self, part: str, known: Mapping[int, float]) -> None:
        """Keep some, by example."""
        replaced = self._known[part].clone()
        replaced[list(known)] = torch.tensor(list(known.values()), dtype=torch.float64)
        self._known[part] = replaced

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint holds: [examples] of each part, by name."""
        return {f"{REFERENCE}/{name}": known for name, known in self._known.items() if len(known)}

    def load(self, held: Mapping[str, Tensor]) -> None:
        """Take over what `tensors` returned, [examples] each; those that it lacks are unknown."""
        for name, values in self._known.items():
            found = held.get(f"{REFERENCE}/{name}")
            known = found if found is not None and found.shape == values.shape else None
            self._known[name] = (
                torch.full_like(values, torch.nan) if known is None else known.cpu().clone()
            )
