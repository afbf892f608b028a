"""A fixed split, the baseline that needs no prediction: the guard alone protects decode.

Source: the StaticMode that Harli is compared with (60% of SMs and memory), and MPS percentages.
"""

from __future__ import annotations

from typing import ClassVar

from windrow_sidecar.qos.policies.base import Context, alone, has_work, share
from windrow_sidecar.qos.view import Grant, Offer, View


class Static:
    """The largest share that `maxSmPercent` allows, whatever decode does, also while it idles."""

    name: ClassVar[str] = "static"
    option: ClassVar[str] = ""

    def decide(self, view: View, offer: Offer, ctx: Context) -> Grant:
        """Return the same split always, while the worker has work."""
        del view
        if not has_work(offer) or ctx.allowed == 1:
            return alone(ctx)
        return share(ctx, ctx.allowed - 1)
