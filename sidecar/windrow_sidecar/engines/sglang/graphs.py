"""Confine SGLang's decode to shares of a GPU's SMs: one set of its CUDA graphs for each share.

A graph keeps the green context that it was captured in, wherever it is replayed. So SGLang captures
its decode graphs once for every share, and a share is chosen by which of them is replayed: no
stream is moved. A batch for which there is no graph runs on every SM.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from windrow.errors import UserError
from windrow_sidecar.compute.sharing import ENV_PARTITION, DecodePartition, asked_partition
from windrow_sidecar.engines.confined import GraphShares
from windrow_sidecar.engines.sglang.compat import GRAPHS_MODULE

# What SGLang's runner calls for the stream on which all graphs are captured, a name of its module.
CAPTURE_STREAM = "get_or_create_global_graph_capture_stream"
# Attention's plans by batch size (flashinfer, fa3): a graph reads the buffers of the plan that it
# was captured with, so each share has plans of its own. The entry of a name serves all.
_PLANS = "decode_cuda_graph_metadata"
# A stream of the primary context on which models overlap small kernels while they are captured:
# what runs there would not be confined.
_SIDE_STREAM = "alt_stream"


def wanted_partition(environment: Mapping[str, str], args: Any) -> DecodePartition:  # noqa: ANN401
    """Return how decode's compute is to be confined, by the environment of an SGLang on a GPU.

    Raises:
        UserError: no such way, or one that this command line leaves no graphs for.
    """
    wanted = asked_partition(environment)
    if wanted == "green" and args.device == "cpu":
        raise UserError(
            "on cores decode is confined by CPU sets, without a choice",
            field=ENV_PARTITION,
            remedy="Unset it.",
        )
    if wanted == "green" and args.disable_cuda_graph:
        raise UserError(
            "decode is confined by its CUDA graphs, and there are none",
            field="--disable-cuda-graph",
            remedy=f"Leave it out, or unset {ENV_PARTITION}.",
        )
    if wanted == "green" and getattr(args, "speculative_algorithm", None):
        raise UserError(
            "decode is confined by the graphs of its model, and its drafts have others",
            field="--speculative-algorithm",
            remedy=f"Leave it out, or unset {ENV_PARTITION}.",
        )
    return wanted


def runner_class(runner: type[Any], shares: GraphShares) -> type[Any]:
    """Return SGLang's decode graph runner with a set of graphs for each of decode's shares.

    Args:
        runner: SGLang's `DecodeCudaGraphRunner`.
        shares: whose `units` say which set is replayed.
    """

    class ConfinedDecodeGraphRunner(runner):  # type: ignore[misc]
        """Captures for one share after the other, and replays those of the share in use."""

        def capture(self) -> None:
            """Capture every set, the whole device's first: it has the largest buffers."""
            self._plans: dict[int, dict[Any, Any]] = {}
            named = _named_plans(self.attn_backend)
            for units in reversed(shares.levels()):
                with shares.capturing(units) as stream:
                    if named is not None:
                        self._plans[units] = dict(named)
                        setattr(self.attn_backend, _PLANS, self._plans[units])
                    with _captured_on(stream), self._without_side_streams(units):
                        super().capture()
            self._use_plans()

        def load_batch(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
            """Plan attention for the share in use."""
            self._use_plans()
            super().load_batch(*args, **kwargs)

        def _make_graph_key(
            self,
            size: int,
            stream_idx: int | None = None,
            variant_label: str | None = None,
            attention_variant: str | None = None,
        ) -> Any:  # noqa: ANN401
            # The field is pdmux's, with which the plugin is off.
            return super()._make_graph_key(size, shares.units, variant_label, attention_variant)

        def _use_plans(self) -> None:
            plans = self._plans.get(shares.units)
            if plans is not None:
                setattr(self.attn_backend, _PLANS, plans)

        @contextmanager
        def _without_side_streams(self, units: int) -> Iterator[None]:
            holders = []
            if units != shares.total_units:
                modules = self.model_runner.model.modules()
                holders = [m for m in modules if getattr(m, _SIDE_STREAM, None) is not None]
            streams = [getattr(holder, _SIDE_STREAM) for holder in holders]
            for holder in holders:
                setattr(holder, _SIDE_STREAM, None)
            try:
                yield
            finally:
                for holder, stream in zip(holders, streams, strict=True):
                    setattr(holder, _SIDE_STREAM, stream)

    return ConfinedDecodeGraphRunner


def _named_plans(backend: Any) -> dict[str, Any] | None:  # noqa: ANN401
    """Return what all of a backend's plans have in common; None for one without plans by size."""
    plans = getattr(backend, _PLANS, None)
    if plans is None:
        return None
    return {key: value for key, value in plans.items() if isinstance(key, str)}


@contextmanager
def _captured_on(stream: Any) -> Iterator[None]:  # noqa: ANN401
    """Have SGLang's runner capture on that stream; its own getter knows one for the process."""
    module = sys.modules[GRAPHS_MODULE]
    own = getattr(module, CAPTURE_STREAM)
    setattr(module, CAPTURE_STREAM, lambda: stream)
    try:
        yield
    finally:
        setattr(module, CAPTURE_STREAM, own)
