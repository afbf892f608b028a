"""Whether rows may stand one after the other in one line: whether a model's layers keep them apart.

Rows are told apart by positions that begin anew. A model whose mask is made without positions, or
whose layers carry a state from token to token, lets a row see the one before it.
"""

from __future__ import annotations

import torch

from windrow_sidecar.finetune.base.structure import record
from windrow_sidecar.finetune.layers.layerwise import DecoderStack

# Tokens of the two rows of the probe.
FIRST, SECOND = 3, 4


def packing_refused(stack: DecoderStack) -> str:
    """Return why rows may not stand in one line; "" if they may.

    Each layer runs once, on two rows of a few tokens: what it makes of the second row must not
    depend on the first, of which the gradient tells. That is exactly zero behind a mask, whatever
    the type, so nothing has to be judged by a tolerance.
    """
    ids = torch.arange(FIRST + SECOND, device=stack.device)[None]
    positions = torch.cat([torch.arange(FIRST), torch.arange(SECOND)])[None].to(stack.device)
    with torch.no_grad():
        hidden, calls = record(stack.decoder, stack.layers, ids, positions=positions)
        alone, _ = record(stack.decoder, stack.layers, ids[:, FIRST:])
    if not torch.allclose(hidden[:, FIRST:], alone, rtol=1e-2, atol=1e-3):
        return "its positions do not begin anew with a row"
    draw = torch.Generator().manual_seed(1)
    for index, (layer, call) in enumerate(zip(stack.layers, calls, strict=True)):
        rows = hidden.detach().clone().requires_grad_()
        with torch.enable_grad(), stack.around_layer.forward(index):
            out = layer(rows, *call.args, **call.kwargs)
            second = (out[0] if isinstance(out, tuple) else out)[:, FIRST:]
            noise = torch.randn(second.shape, generator=draw).to(second)
            (seen,) = torch.autograd.grad(second, rows, noise)
        if seen[:, :FIRST].count_nonzero():
            return f"in layer {index} a row sees the one before it"
    return ""
