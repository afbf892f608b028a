"""`windrow plan` shows what a step of the example job would run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from windrow_sidecar.finetune.adapter.adapters import add_adapter
from windrow_sidecar.finetune.job.assembly import read_job
from windrow_sidecar.finetune.model.boundaries import TorchBoundaries
from windrow_sidecar.finetune.model.decoder_stack import DecoderStack
from windrow_sidecar.finetune.model.loading import load_base

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "windrow-tiny"


def plan(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from windrow_cli import main; main()", "plan", *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_plan_of_a_step_names_phases_layers_tokens_bytes_and_times():
    done = plan("examples/finetunejob.yaml", "--window=64", "--order=token-major", "--json")
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    tasklets = shown["tasklets"]
    assert {at["phase"] for at in tasklets} == {"fwd", "loss", "bwd", "opt"}
    assert max(end - begin for begin, end in (at["tokens"] for at in tasklets)) == 64
    assert all(at["estimate_us"] > 0 for at in tasklets if at["phase"] != "opt")
    memory = shown["memory"]
    assert min(memory.values()) > 0
    # Keys and values of 4 heads of 32 in fp32; sums are those of one layer.
    assert memory["key_value_sums"] == shown["tokens_at_once"] * 2 * 4 * 32 * 4
    assert memory["key_values"] == shown["layers"] * memory["key_value_sums"]
    passed = {
        phase: sum(t["layers"][1] - t["layers"][0] for t in tasklets if t["phase"] == phase)
        for phase in ("fwd", "bwd")
    }
    assert passed["fwd"] == passed["bwd"] >= shown["layers"]


@pytest.mark.extended
def test_the_bytes_of_a_plan_are_those_that_the_graphs_of_its_layers_keep():
    done = plan("examples/finetunejob.yaml", "--json")
    assert done.returncode == 0, done.stderr
    tasklets = json.loads(done.stdout)["tasklets"]
    up = next(at for at in tasklets if at["phase"] == "fwd")
    down = next(at for at in tasklets if at["phase"] == "bwd" and at["rows"] == up["rows"])
    assert down["bytes"] == -up["bytes"]

    job = read_job(ROOT / "examples" / "finetunejob.yaml")
    base = load_base(MODEL)
    tuned = add_adapter(base.model, job.spec)
    stack = DecoderStack(base.model)
    rows, width = len(up["rows"]), up["tokens"][1]
    at = stack.begin(torch.arange(rows * width).view(rows, width) % base.config.vocab_size)
    for layer in range(stack.depth):
        stack.forward(at, layer, at.whole, TorchBoundaries(), learn=True)
    weights = {p.untyped_storage().data_ptr() for p in tuned.parameters()}
    kept = [kept_bytes(graphs[0].edge.node, weights) for graphs in at.graphs]
    expected = sum(kept) / stack.depth + at.inputs[1].nbytes
    # A mean over micro-batches of more or fewer rows, which share two tables of positions in fp32.
    tables = 2 * width * base.config.hidden_size // base.config.num_attention_heads * 4
    assert up["bytes"] == pytest.approx(expected, abs=tables)


def kept_bytes(node, weights: set[int]) -> int:
    """Read off autograd's own nodes which tensors they hold, weights left out."""
    kept, seen, to_do = {}, set(), [node]
    while to_do:
        if (node := to_do.pop()) is None or node in seen:
            continue
        seen.add(node)
        to_do += [before for before, _ in node.next_functions]
        for name in dir(node):
            if name.startswith("_saved_") and isinstance(held := getattr(node, name), torch.Tensor):
                storage = held.untyped_storage()
                kept[storage.data_ptr()] = storage.nbytes()
    return sum(n for at, n in kept.items() if at not in weights)


def test_a_model_that_is_not_there_is_told_in_one_line():
    done = plan("examples/finetunejob.yaml", "--model=nowhere/at/all/here")
    assert done.returncode == 2
    assert "spec.model.name" in done.stderr
