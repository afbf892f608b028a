"""Say which part of each tensor of a base model a rank has, as SGLang cuts them.

Attention is cut by heads (with fewer key-value heads than ranks, neighbouring ranks have the same
one), the MLP by its inner units, embedding and head by words. The words are padded to a multiple of
64 first (`DEFAULT_VOCAB_PADDING_SIZE` of SGLang's `layers/vocab_parallel_embedding.py`, SGLang
0.5.23; its `layers/linear.py` has the other cuts). Knows no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from windrow.conditions import Reason
from windrow.errors import UserError

VOCABULARY_PADDING = 64
# Architectures of transformers whose layers are `self_attn` and `mlp` with these projections.
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
BY_COLUMNS = ("o_proj", "down_proj")
BY_WORDS = ("embed_tokens", "lm_head")


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Part of a tensor that one rank has.

    Attributes:
        dim: that is cut; None: the rank has all of it.
        begin, end: of that dimension.
        first: the first rank that has this part.
        copies: how many neighbouring ranks have it.
    """

    dim: int | None
    begin: int
    end: int
    first: int
    copies: int


@dataclass(frozen=True, slots=True)
class ShardSizes:
    """Sizes of one rank's shard.

    Attributes:
        ranks: N.
        heads, key_value_heads: of a rank.
        copies: ranks that have the same key-value heads.
        head_units: units of a head.
        inner_units: of the MLP.
        words: rows of embedding and head; the last of them may be padding.
        vocabulary: words of the whole model.
    """

    ranks: int
    heads: int
    key_value_heads: int
    copies: int
    head_units: int
    inner_units: int
    words: int
    vocabulary: int

    @classmethod
    def of(cls, config: Any, ranks: int) -> ShardSizes:  # noqa: ANN401 - of transformers
        """Cut a model of a transformers configuration over so many ranks.

        Raises:
            UserError: it cannot be cut so, or is of an architecture that is not cut here.
        """
        kind = getattr(config, "model_type", "")
        if kind not in ARCHITECTURES:
            raise refused(
                f"models of type {kind!r} are not trained over several ranks yet",
                f"Train on one rank, or use one of: {', '.join(ARCHITECTURES)}.",
            )
        heads, inner = int(config.num_attention_heads), int(config.intermediate_size)
        key_values = int(getattr(config, "num_key_value_heads", None) or heads)
        for what, count in (("attention heads", heads), ("inner units of its MLP", inner)):
            if count % ranks:
                raise refused(
                    f"the model has {count} {what}, which {ranks} ranks cannot share evenly",
                    "Use a number of ranks that divides it.",
                )
        if key_values % ranks and ranks % key_values:
            raise refused(
                f"the model has {key_values} key-value heads, and {ranks} ranks can neither share "
                "them evenly nor copy each as often as another",
                "Use a number of ranks that divides them, or a multiple of them.",
            )
        if getattr(config, "attention_dropout", 0.0):
            raise refused(
                "the model drops units of its attention, which ranks would draw differently",
                "Set attention_dropout to 0 in its config.json.",
            )
        vocabulary = int(config.vocab_size)
        padded = -(-vocabulary // VOCABULARY_PADDING) * VOCABULARY_PADDING
        return cls(
            ranks=ranks,
            heads=heads // ranks,
            key_value_heads=max(1, key_values // ranks),
            copies=max(1, ranks // key_values),
            head_units=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
            inner_units=inner // ranks,
            words=-(-padded // ranks),
            vocabulary=vocabulary,
        )

    def words_of(self, rank: int) -> tuple[int, int]:
        """Return the words [begin, end) of a rank that are not padding."""
        begin = min(rank * self.words, self.vocabulary)
        return begin, min(begin + self.words, self.vocabulary)

    def part(self, parameter: str, rank: int) -> TensorPart:
        """Return a rank's part of a base parameter (`model.layers.0.self_attn.q_proj.weight`).

        The bias of a row-parallel layer is whole: rank 0 alone adds it.
        """
        module, _, kind = parameter.rpartition(".")
        name = module.rpartition(".")[2]
        if name in BY_WORDS:
            return TensorPart(0, *self.words_of(rank), rank, 1)
        if name in BY_ROWS:
            return self._cut(0, name, rank)
        if name in BY_COLUMNS and kind == "weight":
            return self._cut(1, name, rank)
        return TensorPart(None, 0, 0, 0, self.ranks)

    def _cut(self, dim: int, name: str, rank: int) -> TensorPart:
        copies = self.copies if name in ("k_proj", "v_proj") else 1
        if name in ("k_proj", "v_proj"):
            units = self.key_value_heads * self.head_units
        else:
            units = self.heads * self.head_units if name in ("q_proj", "o_proj") else 0
        units = units or self.inner_units
        at = rank // copies
        return TensorPart(dim, at * units, (at + 1) * units, at * copies, copies)


def refused(problem: str, remedy: str, field: str = "spec.model.name") -> UserError:
    """Return the error for what is not trained over several ranks."""
    return UserError(problem, field=field, remedy=remedy, reason=Reason.MODEL_UNSUPPORTED)
