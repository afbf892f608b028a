"""The policies: each a pure function from what is seen to what is granted."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from windrow.errors import UserError
from windrow_sidecar.qos.policies.base import Context, Policy
from windrow_sidecar.qos.policies.fineinfer import FineInfer
from windrow_sidecar.qos.policies.flexllm import FlexLlm
from windrow_sidecar.qos.policies.harli import Harli
from windrow_sidecar.qos.policies.llmstation import LlmStation
from windrow_sidecar.qos.policies.static import Static
from windrow_sidecar.qos.policies.temporal import Temporal
from windrow_sidecar.qos.policies.windrow import Windrow

POLICIES: dict[str, Callable[[], Policy]] = {
    p.name: p for p in (Windrow, Harli, LlmStation, FlexLlm, FineInfer, Temporal, Static)
} | {"iterations": partial(Temporal, unit="iteration")}

__all__ = ["POLICIES", "Context", "Policy", "make_policy"]


def make_policy(name: str) -> Policy:
    """The policy of that name.

    Raises:
        UserError: there is none.
    """
    maker = POLICIES.get(name)
    if maker is None:
        raise UserError(
            f"there is no policy {name!r}",
            field="spec.policy",
            remedy=f"Choose one of: {', '.join(sorted(POLICIES))}.",
            reason="UnknownPolicy",
        )
    return maker()
