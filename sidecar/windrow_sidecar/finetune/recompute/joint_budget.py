"""Set what layers may keep of the rows of several jobs: all of it, or only what they read.

What a layer computes differs from one joint micro-batch to the next, by whose lines are how many,
so nothing is planned for it: where a group does not fit whole, each layer runs a second time in its
backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from windrow_sidecar.finetune.recompute.activation_budget import GROUP_SHARE, ActivationBudget
from windrow_sidecar.finetune.recompute.checkpointed_layers import PlannedLayers


class JointBudget(ActivationBudget):
    """Bytes that the layers may keep of joint micro-batches.

    Args:
        planned: the layers of the joint stack; follows the budget.
        free_bytes: memory that may still be taken.
        release_caches: gives back what this process holds without using it.
    """

    def __init__(
        self,
        planned: PlannedLayers,
        free_bytes: Callable[[], int],
        release_caches: Callable[[], None] = lambda: None,
    ) -> None:
        self._planned, self._layers, self._free_bytes = planned, planned, free_bytes
        self._release_caches = release_caches
        self._least = self._has_prefix = False

    def follow(self, budgets: Sequence[ActivationBudget]) -> None:
        """Count from now on for jobs with these budgets, one at least.

        A token of a joint micro-batch takes what it takes of the job that keeps most; what learns
        is there for each.
        """
        most = max(budgets, key=lambda budget: budget.memory_model.graph)
        self._boundary = most.boundary_bytes_per_token
        self._longest = max(budget.longest for budget in budgets)
        state = sum(budget.memory_model.state_bytes for budget in budgets)
        self._memory_model = replace(most.memory_model, state_bytes=state)

    def keep_for(self, tokens: int) -> None:
        """Let layers keep all of a group of so many padded tokens, or nothing but their input."""
        room = int(GROUP_SHARE * self._free_bytes())
        fits = self._memory_model.within(tokens, room) is None
        self._layers.bytes_per_token = None if fits else 0
