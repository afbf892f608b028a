"""Whether rows may stand one after the other in one line: whether a model's layers keep them apart.

Rows are told apart by positions that begin anew. A model whose mask is made without positions, or
whose layers carry a state from token to token, lets a row see the one before it.
"""

from __future__ import annotations

import torch

from windrow_sidecar.finetune.base.structure import in_mode
from windrow_sidecar.finetune.layers.layerwise import DecoderStack
from windrow_sidecar.finetune.layers.probing import sees_before

# Tokens of the two rows of the probe.
FIRST, SECOND = 3, 4


def packing_refused(stack: DecoderStack) -> str:
    """Return why rows may not stand in one line; "" if they may.

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
            return "its positions do not begin anew with a row"
        for index, call in enumerate(calls):
            if sees_before(stack, index, hidden, call, FIRST):
                return f"in layer {index} a row sees the one before it"
    return ""
