"""Name the ranks that train a job together, and the model that is cut over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from windrow.crd import FinetuneJobSpec
from windrow_sidecar.compute.communicator import Communicator
from windrow_sidecar.engines.shard_cuts import ShardSizes
from windrow_sidecar.finetune.data.source_access import UNCONFINED, SourceAccess
from windrow_sidecar.finetune.tensor_parallel.adapter import AdapterParts, add_sharded_adapter
from windrow_sidecar.finetune.tensor_parallel.cross_entropy import VocabularyCrossEntropy


@dataclass(frozen=True, slots=True)
class Sharding:
    """The cut of one model over the ranks that train it.

    Attributes:
        ranks: this one among them.
        config: of the whole model, as transformers has it.
    """

    ranks: Communicator
    config: Any

    @property
    def cross_entropy(self) -> VocabularyCrossEntropy:
        """The loss of logits of which this rank has its words."""
        words = ShardSizes.of(self.config, self.ranks.ranks).words_of(self.ranks.rank)
        return VocabularyCrossEntropy(self.ranks, words)

    def add_adapter(
        self, base: nn.Module, spec: FinetuneJobSpec, access: SourceAccess = UNCONFINED
    ) -> tuple[Any, AdapterParts]:
        """Put a job's adapter into this rank's shard (see `add_sharded_adapter`).

        Raises:
            UserError: see there.
        """
        return add_sharded_adapter(base, self.config, spec, self.ranks, access)
