"""Layers that run as CUDA graphs on a GPU learn what packed layers do there."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from windrow_sidecar.testing.rounding import no_farther

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

# A process of its own: in the tests' own, Triton interprets.
CODE = """
import copy, json, sys
import torch
from windrow_sidecar.compute.cuda_device import CudaDevice
from windrow_sidecar.finetune.data.split import Example
from windrow_sidecar.testing.architectures import random_model
from windrow_sidecar.testing.equality import (
    Cut, our_training, pefts_training, small_spec, tuned_model)
from windrow_sidecar.testing.rounding import apart

dtype, device = getattr(torch, sys.argv[2]), CudaDevice()
draw = torch.Generator().manual_seed(3)
ids = [tuple(torch.randint(3, 96, (32,), generator=draw).tolist()) for _ in range(12)]
rows = tuple(Example(i, i, f"rows:{n}") for n, i in enumerate(ids))
tuned = tuned_model(random_model(sys.argv[1]).to(dtype), small_spec())
truth = pefts_training(copy.deepcopy(tuned).double(), rows)["parameter"]
captures = device.captures()

def of_gpu(program, **more):
    cut = Cut(program=program, max_tokens=64, **more)
    found = our_training(copy.deepcopy(tuned).cuda(), rows, cut)["parameter"]
    found = {name: tensor.cpu() for name, tensor in found.items()}
    return apart(found, truth).of_norm

print(json.dumps({
    "graphs": of_gpu("graphs", captures=captures),
    "driver_bytes": captures.driver_bytes,
    "packed": of_gpu("packed"),
    "peft": apart(pefts_training(copy.deepcopy(tuned), rows)["parameter"], truth).of_norm,
}))
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["Llama", "Qwen2"])
def test_graphs_err_as_packed_layers_do_and_no_more(architecture, dtype):
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE, architecture, dtype],
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "not as graphs" not in done.stderr, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    theirs = [found["packed"], found["peft"]]
    assert no_farther([found["graphs"]], theirs, getattr(torch, dtype))
