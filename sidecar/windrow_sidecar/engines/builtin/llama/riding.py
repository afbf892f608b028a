"""A decode step whose matrix products other rows may join (FlexLLM, LLMStation).

The pass stops before each product over a layer's weights. A caller that has rows of another kind
for the same weights computes the product over both; else the pass computes it for its own rows.
Attention, norms and activations are the pass's own.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch.nn import functional

from windrow_sidecar.engines.builtin.llama.layer_ops import LayerOps, Placed
from windrow_sidecar.engines.builtin.llama.model import Attention, LlamaModel


class Product(IntEnum):
    """The products over a layer's weights, in the order in which a pass computes them."""

    QKV = 0
    O = 1  # noqa: E741 - as models name it
    GATE_UP = 2
    DOWN = 3


class RidingPass:
    """One pass of a `LlamaModel` over n tokens, product by product. One thread at a time.

    Args:
        model: whose layers run.
        tokens, positions, slots: int64 [n] each; K and V are written at `slots` before attending.
        attend: attention of the tokens.
        ops: operations between products.

    Attributes:
        layer: that runs; the number of layers: the pass is through.
        product: that comes next in it.
        joined: products so far that had rows of others in them.
        joined_rows: rows of others in all of them.
        given_up: whether nobody may join any more, since the step is computed again without it.
    """

    def __init__(
        self,
        model: LlamaModel,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        attend: Attention,
        ops: LayerOps,
    ) -> None:
        self._model, self._attend, self._ops = model, attend, ops
        with torch.inference_mode():
            self._placed: Placed = ops.place(positions, slots)
            self._x = model.embed(tokens)
            self._rows = self._normed(0, self._x)
        self.layer, self.product, self.joined = 0, Product.QKV, 0
        self.joined_rows = 0
        self.given_up = False

    @property
    def done(self) -> float:
        """Part of its products that it has behind it, 0 to 1."""
        return (self.layer + self.product / len(Product)) / len(self._model.layers)

    @property
    def tokens(self) -> float:
        """Rows of others in a product, on average over all products of the pass."""
        return self.joined_rows / (len(Product) * len(self._model.layers))

    def reaches(self, layer: int, product: Product) -> bool:
        """Return whether others may join that product: it is still to come."""
        return not self.given_up and (self.layer, self.product) <= (layer, product)

    def join(self, layer: int, product: Product, others: torch.Tensor) -> torch.Tensor:
        """Compute a product over its own rows and others; runs alone what comes before it.

        Args:
            layer: of the product, which it reaches.
            product: of that layer.
            others: [m, in], of the pass's device and type.

        Returns:
            the product of the others' rows, [m, out]: a view of new memory, without a graph.
        """
        while (self.layer, self.product) < (layer, product):
            self._alone()
        own = self._rows.shape[0]
        with torch.no_grad(), self._model.holds(layer):
            made = functional.linear(torch.cat([self._rows, others]), self._weight)
        self._take(made[:own])
        self.joined += 1
        self.joined_rows += len(others)
        return made[own:]

    def finish(self) -> torch.Tensor:
        """Run alone what is left; returns [n, hidden], as `LlamaModel.forward` does."""
        while self.layer < len(self._model.layers):
            self._alone()
        return self._x

    def give_up(self) -> None:
        """Let nobody join any more: the step is computed again without this pass."""
        self.given_up = True

    @property
    def _weight(self) -> torch.Tensor:
        layer = self._model.layers[self.layer]
        return (layer.qkv, layer.out, layer.gate_up, layer.down)[self.product]

    @torch.inference_mode()
    def _alone(self) -> None:
        with self._model.holds(self.layer):
            made = functional.linear(self._rows, self._weight)
        self._take(made)

    @torch.inference_mode()
    def _take(self, made: torch.Tensor) -> None:
        """Go on with a product's rows, [n, out], to the input of the next.

        What it has is replaced at the end only: after an error in between it may be taken again.
        """
        layer = self._model.layers[self.layer]
        if self.product is Product.QKV:
            q = self._ops.rotate_and_store(self.layer, made, self._placed)
            self._rows, self.product = self._attend(self.layer, q), Product.O
        elif self.product is Product.O:
            x = self._x + made
            self._rows, self._x = self._model.rms_norm(x, layer.mlp_norm), x
            self.product = Product.GATE_UP
        elif self.product is Product.GATE_UP:
            self._rows, self.product = self._ops.gate(made), Product.DOWN
        else:
            x = self._x + made
            rows = self._normed(self.layer + 1, x)
            self._rows, self._x = rows, x
            self.layer, self.product = self.layer + 1, Product.QKV

    def _normed(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """Return what the first product of a layer reads; behind the last layer nothing does."""
        layers = self._model.layers
        return self._model.rms_norm(x, layers[layer].attention_norm) if layer < len(layers) else x
