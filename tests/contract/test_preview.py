"""Check what a plan says of a step holds for the job's own form, device and optimizer."""

from __future__ import annotations

import json

import pytest
import torch
from support.examplejob import example_job

from windrow_sidecar.compute.host_device import HostDevice
from windrow_sidecar.finetune.engine.sizing import WholeRows
from windrow_sidecar.finetune.standalone import preview
from windrow_sidecar.finetune.standalone.preview import Preview

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def tasklets(tmp_path):
    def of(**training):
        job = example_job(tmp_path, **training)
        return Preview(job, WholeRows(), "layer-major", 1, 1, HostDevice())

    return of


def test_a_bf16_job_is_shown_the_bytes_of_bf16(tasklets):
    full, half = (tasklets(precision=precision) for precision in ("fp32", "bf16"))
    assert {weight.dtype for weight in half.session.stream.parts.stack.layers[0].parameters()} >= {
        torch.bfloat16
    }
    assert half._boundary_bytes * 2 == full._boundary_bytes
    held = [
        sum(at["bytes"] for at in shown.tasklets() if at["phase"] == "fwd")
        for shown in (full, half)
    ]
    # Less, but no half: adapters and norms compute in fp32 whatever the form, and keep that.
    assert 0 < held[1] < held[0]


def test_the_optimizer_has_an_estimate_and_leaves_no_trace(tasklets):
    shown = tasklets()
    last = shown.tasklets()[-1]
    assert last["phase"] == "opt"
    assert last["estimate_us"] > 0
    stream = shown.session.stream
    assert stream.position.step == 0
    assert not stream.position.committed_rows
    learnt = {name: t for name, t in stream.tensors().items() if "lora_B" in name}
    assert learnt
    assert not any(torch.count_nonzero(tensor) for tensor in learnt.values())
    assert not any(name.startswith("state/") for name in stream.tensors())


@pytest.mark.parametrize(
    ("flags", "status", "said"),
    [
        (
            ["--device", "tpu"],
            2,
            ("'tpu' is not a valid device", "--device", "Write cpu, cuda, or cuda:N."),
        ),
        (["--job", "/no/such/file"], 2, ("cannot be read", "/no/such/file", "")),
    ],
)
def test_an_error_is_said_whole_on_the_stream_that_is_read(capsys, flags, status, said):
    argv = flags if "--job" in flags else ["--job", "x", *flags]
    assert preview.main(argv) == status
    line = json.loads(capsys.readouterr().out)
    problem, field, remedy = said
    assert problem in line["error"]
    assert line["field"] == field
    assert remedy in line["remedy"]
