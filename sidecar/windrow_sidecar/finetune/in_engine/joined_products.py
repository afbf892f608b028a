"""Let a decode step's rows pass a finetune layer's matrix products (FlexLLM, LLMStation).

A forward of packed layers asks here at each product whether a decode step still needs the same
weight. If so, one product computes both, and each side goes on with its own rows. What the backward
needs is saved as without: it runs by the same tasklets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from windrow_sidecar.engines.builtin.llama.riding import Product, RidingPass
from windrow_sidecar.finetune.adapter.packed_layer import PackedLayer
from windrow_sidecar.finetune.model.decoder_stack import DecoderStack
from windrow_sidecar.finetune.model.layer_program import program_of


@dataclass(slots=True)
class RiderSeat:
    """Place of the decode step that rides along now. One thread at a time.

    Attributes:
        riding: that step; None: none does.
    """

    riding: RidingPass | None = None


def join_products(
    stack: DecoderStack, weights: Callable[[int, Product], tuple[int, ...]], seat: RiderSeat
) -> str:
    """Have a stack's packed layers share their products with whatever step is in the seat.

    Args:
        stack: over the same weights as decode's.
        weights: returns the shape of decode's weight of a layer's product: (out, in).
        seat: is looked at in each product.

    Returns:
        why they cannot; "": they do.
    """
    programs = [program_of(layer) for layer in stack.layers]
    packed = [program for program in programs if isinstance(program, PackedLayer)]
    if len(packed) < len(programs) or not packed:
        return "layers run eagerly: their products are apart"
    for layer, program in enumerate(packed):
        for product, group in zip(Product, program.groups, strict=True):
            out = sum(p.weight.shape[0] for p in group.projections)
            if (out, group.projections[0].weight.shape[1]) != tuple(weights(layer, product)):
                return f"layer {layer} is not the one that decode serves"
    for layer, program in enumerate(packed):
        for product, group in zip(Product, program.groups, strict=True):
            group.joining = _joining(seat, layer, product)
    return ""


def _joining(seat: RiderSeat, layer: int, product: Product) -> Callable[[Tensor], Tensor | None]:
    def join(x: Tensor) -> Tensor | None:
        riding = seat.riding
        if riding is None or not riding.reaches(layer, product):
            return None
        return riding.join(layer, product, x)

    return join
