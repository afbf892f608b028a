"""Distance of our gradients from peft's, over architectures and ways to cut the work."""

from __future__ import annotations

import copy

from benchmarks.harness import Result
from windrow_sidecar.compute.device import ComputeDevice
from windrow_sidecar.finetune.engine.orders import layer_major, token_major
from windrow_sidecar.finetune.engine.sizing import Windows
from windrow_sidecar.testing.architectures import ARCHITECTURES, random_model
from windrow_sidecar.testing.equality import (
    Cut,
    our_gradients,
    pefts_gradients,
    small_rows,
    small_spec,
    tuned_model,
)
from windrow_sidecar.testing.rounding import apart

__all__ = ["ARCHITECTURES", "equality"]

CUTS = [Cut(), Cut(max_tokens=64)] + [
    Cut(Windows(tokens), order) for tokens in (1, 7, 64) for order in (layer_major, token_major)
]
OF_NORM, OF_TENSOR = 1e-5, 5e-5


def equality(architectures: list[str], device: ComputeDevice) -> list[Result]:
    """The worst of all combinations, in fp32, both sides on one device."""
    worst_of_norm = worst_of_tensor = 0.0
    for architecture in architectures:
        tuned = tuned_model(random_model(architecture), small_spec()).to(device.torch)
        theirs = pefts_gradients(tuned, small_rows())
        for cut in CUTS:
            off = apart(our_gradients(copy.deepcopy(tuned), small_rows(), cut), theirs)
            worst_of_norm = max(worst_of_norm, off.of_norm)
            worst_of_tensor = max(worst_of_tensor, off.of_tensor)
    where = "" if device.name == "cpu" else f", {device.name}"
    of = f"{len(architectures)} architectures x {len(CUTS)} cuts"
    what = f"gradients against peft, fp32, {of}{where}"
    return [
        Result(f"{what}: of all", worst_of_norm, "relative", "lower", goal=OF_NORM),
        Result(f"{what}: worst tensor", worst_of_tensor, "relative", "lower", goal=OF_TENSOR),
    ]
