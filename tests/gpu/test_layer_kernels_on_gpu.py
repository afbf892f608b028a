"""Kernels of packed layers on a GPU learn what torch's operators do there, in bf16 and fp32."""

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
import copy, json, logging, sys
import torch
from windrow_sidecar.finetune.adapter import fused_layer, layer_programs
from windrow_sidecar.testing.architectures import random_model
from windrow_sidecar.testing.equality import (
    Cut, our_gradients, pefts_gradients, small_rows, small_spec, tuned_model)
from windrow_sidecar.testing.rounding import apart

said = []
layer_programs.log.setLevel(logging.INFO)
layer_programs.log.addFilter(lambda record: said.append(record.getMessage()) or False)
rows, dtype = small_rows(), getattr(torch, sys.argv[2])
tuned = tuned_model(random_model(sys.argv[1]).to(dtype), small_spec())
truth = pefts_gradients(copy.deepcopy(tuned).double(), rows)

def of_gpu():
    found = our_gradients(copy.deepcopy(tuned).cuda(), rows, Cut(program="packed"))
    return apart({name: gradient.cpu() for name, gradient in found.items()}, truth).of_norm

ours = of_gpu()
fused_layer.why_not = lambda device: "they are compared"
theirs = [of_gpu(), *(apart(pefts_gradients(tuned, rows, n), truth).of_norm for n in (0, 1))]
print(json.dumps({"said": said, "ours": ours, "theirs": theirs}))
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["Llama", "Qwen2"])
def test_kernels_err_as_torchs_operators_do_and_no_more(architecture, dtype):
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
    found = json.loads(done.stdout.splitlines()[-1])
    by_kernels, by_torch = found["said"]
    assert by_kernels.endswith("and Triton's kernels")
    assert by_torch.endswith("(not Triton's kernels: they are compared)")
    assert no_farther([found["ours"]], found["theirs"], getattr(torch, dtype))
