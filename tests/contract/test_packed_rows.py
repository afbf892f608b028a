"""Rows in lines of few widths learn what padded rows learn, and nobody waits for the device."""

from __future__ import annotations

import copy
import json
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from windrow.crd import parse_job_spec
from windrow.errors import UserError
from windrow_sidecar.finetune.data.split import BatchPlan, DataSplit, lengths_of
from windrow_sidecar.finetune.engine.grouping import RowGrouping
from windrow_sidecar.finetune.engine.packing import MOST_SIZES, LineSizes
from windrow_sidecar.finetune.engine.sizing import Windows
from windrow_sidecar.finetune.job.packing import Packing, packing_of
from windrow_sidecar.finetune.model.decoder_stack import DecoderStack
from windrow_sidecar.finetune.tasklets import MicroLimits
from windrow_sidecar.finetune.training.checkpoint import JobFolder, Position
from windrow_sidecar.finetune.training.evaluation import EvaluationPolicy
from windrow_sidecar.qos.view import Phase
from windrow_sidecar.testing.architectures import random_model
from windrow_sidecar.testing.equality import (
    Cut,
    our_gradients,
    our_training,
    pefts_gradients,
    pefts_training,
    small_rows,
    small_spec,
    stream_of,
    tuned_model,
)
from windrow_sidecar.testing.rounding import apart, in_float64, in_type_of
from windrow_sidecar.testing.tinyjob import adapter_of, finish, tiny_job, tiny_llama

pytestmark = pytest.mark.usefixtures("one_thread")

# Rows have 5 to 39 tokens: micro-batches of 96 tokens are two lines, smaller ones are one.
SIZES = LineSizes(line=48, most=96)
LINES = Cut(packed=True, line_sizes=SIZES)
CUTS = {
    "lines": LINES,
    "a line": Cut(max_tokens=48, packed=True, line_sizes=SIZES),
    "windows of 7": Cut(Windows(7), packed=True, line_sizes=SIZES),
    "layers packed": Cut(packed=True, line_sizes=SIZES, program="packed"),
    "graphs": Cut(packed=True, line_sizes=SIZES, program="graphs"),
}


def tuned_of(architecture):
    return tuned_model(random_model(architecture).double(), small_spec())


# A mask of its own for some layers: Mistral and Gemma2 see a window of tokens.
@pytest.mark.parametrize("architecture", ["Llama", "Mistral", "Gemma2"])
def test_gradients_of_rows_in_lines_equal_those_of_peft(architecture):
    tuned = tuned_of(architecture)
    theirs = pefts_gradients(tuned, small_rows())
    for cut in CUTS.values():
        if architecture != "Gemma2" or cut.program == "eager":
            ours = our_gradients(copy.deepcopy(tuned), small_rows(), cut)
            assert apart(ours, theirs).by_rounding


def test_five_steps_of_rows_in_lines_equal_those_of_peft():
    tuned = tuned_of("Llama")
    theirs = pefts_training(tuned, small_rows())
    for cut in (LINES, CUTS["graphs"]):
        ours = our_training(copy.deepcopy(tuned), small_rows(), cut)
        assert ours.keys() == theirs.keys()
        for kind in ours:
            assert apart(ours[kind], theirs[kind]).by_rounding, kind


def test_graphs_of_rows_in_lines_are_captured_for_few_shapes():
    tuned = tuned_of("Llama")
    with in_type_of(tuned):
        stream = stream_of(tuned, small_rows(), CUTS["graphs"])
        shapes = set()
        while (tasklet := stream.peek()) is not None:
            if tasklet.micro is not None:
                shapes.add((tasklet.micro.lines, tasklet.micro.width))
            stream.run(tasklet)
    graphs = stream.parts.stack.graphs
    assert graphs.captured, "lines ran by graphs"
    assert not graphs.refused
    assert shapes <= {SIZES.shape(size) for size in SIZES.sizes}


def test_rows_in_lines_drop_the_units_that_padded_rows_drop():
    def learnt(**options):
        base = tiny_llama().double()
        with in_type_of(base):
            job = tiny_job(base=base, **options)
            finish(job)
        return adapter_of(job)

    sizes = LineSizes(line=24, most=48)
    ours = learnt(max_tokens=48, evaluation_policy=EvaluationPolicy(packed=True), line_sizes=sizes)
    assert apart(ours, learnt()).by_rounding


@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=40),
    batch=st.integers(1, 40),
    max_tokens=st.integers(1, 2048),
    max_rows=st.integers(0, 8),
    together=st.sampled_from([1, 2]),
)
@settings(max_examples=60, deadline=None)
def test_every_row_passes_once_in_one_of_four_shapes(
    lengths, batch, max_tokens, max_rows, together
):
    lengths = lengths * together
    longest = max(lengths) * together
    sizes = LineSizes.of(lengths, longest=longest, max_length=256, batch=batch, most=1024)
    assert len(sizes.sizes) <= MOST_SIZES
    assert all(2 * a >= b for a, b in pairwise(sizes.sizes))
    examples = tuple(SimpleNamespace(length=n) for n in lengths)
    grouping = RowGrouping(
        lambda: MicroLimits(max_tokens),
        most_rows=max_rows * together,
        packed=True,
        line_sizes=sizes,
        together=together,
    )
    grouping.lengths = lengths
    grouping._lengths[id(examples)] = lengths
    grouping.begin(0, examples, range(len(lengths)))
    shapes = {sizes.shape(size) for size in sizes.sizes}
    planned, passed = list(grouping.coming()), []
    while not grouping.is_empty:
        (micro,) = grouping.take()
        assert [micro] == planned.pop(0)
        passed += micro.rows
        lines = micro.packed
        assert micro.lengths == tuple(lengths[row] for row in micro.rows)
        assert tuple(n for line in lines.lengths for n in line) == micro.lengths
        assert max(lines.filled) <= lines.width
        assert len(micro.rows) % together == 0
        assert not max_rows or len(micro.rows) <= max_rows * together
        if (micro.lines, micro.width) not in shapes or micro.padded_tokens > max_tokens:
            # Memory has no room for a size that takes the longest rows.
            assert micro.padded_tokens == micro.tokens
    assert sorted(passed) == list(range(len(lengths)))


def test_a_group_that_is_given_up_passes_again_as_it_was():
    rows = small_rows()
    grouping = RowGrouping(lambda: MicroLimits(96), packed=True, line_sizes=SIZES)
    grouping.begin(0, rows, range(len(rows)))
    first = grouping.take()
    grouping.put_back(tuple(row for micro in first for row in micro.rows))
    assert grouping.take() == first


class NothingIsRead(TorchDispatchMode):
    """Refuses what makes the host wait for a device, as a GPU's driver would not."""

    WAITS = frozenset(
        {
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.nonzero.default,
            torch.ops.aten.equal.default,
            torch.ops.aten.masked_select.default,
            torch.ops.aten._unique2.default,
        }
    )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in self.WAITS, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("architecture", ["Llama", "Mistral", "Gemma2"])
def test_layers_of_packed_rows_wait_for_nothing_that_the_device_computes(architecture):
    tuned = tuned_of(architecture)
    with in_type_of(tuned):
        stream = stream_of(tuned, small_rows(), LINES)
        ran = set()
        while (tasklet := stream.peek()).phase is not Phase.OPTIMIZER:
            ran.add(tasklet.phase)
            if tasklet.phase is Phase.LOSS:  # its labels are the host's
                stream.run(tasklet)
                continue
            with NothingIsRead():
                stream.run(tasklet)
    assert {Phase.FORWARD, Phase.BACKWARD} <= ran


def test_without_row_numbers_masks_of_packed_rows_do_wait():
    stack = DecoderStack(random_model("Llama"))
    ids = torch.ones(1, 6, dtype=torch.int64)
    with pytest.raises(AssertionError, match="waits for the device"), NothingIsRead():
        stack.begin(ids, positions=torch.arange(6)[None] % 3)


def decided(training, *, on_gpu, architecture="Llama", prefix=False):
    rows = small_rows()
    spec = parse_job_spec(
        {
            "model": {"name": "m"},
            "dataset": {"source": "/rows.jsonl"},
            "training": {"maxSteps": 2, "batchSize": 5, "maxSequenceLength": 48} | training,
            "output": {"destination": "/out"},
        }
    ).training
    return packing_of(
        *(spec, DecoderStack(random_model(architecture)), DataSplit(rows, ())),
        BatchPlan(len(rows), 5, 17),
        prefix=prefix,
        tokens=96,
        unasked=on_gpu,
        repeats=on_gpu,
    )


def test_rows_are_packed_on_a_gpu_unless_the_job_says_otherwise():
    assert decided({}, on_gpu=False) == Packing(packed=False)
    padded = decided({"packing": False}, on_gpu=True)
    assert (padded.packed, padded.sizes, padded.told) == (False, None, "")
    found = decided({}, on_gpu=True)
    assert found.packed
    assert found.sizes == LineSizes(line=48, most=96)
    ours, theirs = found.padding
    assert 0 <= ours < theirs < 1
    assert f"{ours:.0%} of what layers compute on is padding, {theirs:.0%} without" in found.told
    # Of small shapes none has come yet, and they come where memory is short.
    assert {(shape.lines, shape.width) for shape in found.shapes} == {
        found.sizes.shape(size) for size in found.sizes.sizes
    }
    assert decided({"packing": True}, on_gpu=False).sizes is None


def test_a_model_that_lets_rows_see_each_other_is_not_packed_unless_the_job_insists():
    found = decided({}, on_gpu=True, architecture="OPT")
    assert not found.packed
    assert "rows are not packed: OPTForCausalLM cannot take several rows in one line" in found.told
    assert not decided({}, on_gpu=True, prefix=True).packed
    with pytest.raises(UserError) as refused:
        decided({"packing": True}, on_gpu=True, architecture="OPT")
    assert refused.value.field == "spec.training.packing"


@pytest.mark.parametrize("began", [True, False], ids=["packed", "padded"])
def test_a_job_that_resumes_keeps_the_packing_that_it_began_with(tmp_path, began):
    folder = JobFolder(tmp_path, "job", 1)
    folder.claim()
    first = tiny_job(evaluation_policy=EvaluationPolicy(packed=began, keeps_packing=True))
    first.stream.run(first.stream.peek())
    folder.save(first.stream.position, first.stream.tensors(), keep=1)
    found = folder.newest()
    for by_default in (True, False):
        policy = EvaluationPolicy(packed=by_default, keeps_packing=True)
        later = tiny_job(evaluation_policy=policy)
        assert later.stream.packed is by_default
        later.stream.restore(found.position, found.tensors)
        assert later.stream.packed is began
        assert bool(later.stream.peek().micro.packed) is began
        told = tiny_job(evaluation_policy=EvaluationPolicy(packed=by_default))
        told.stream.restore(found.position, found.tensors)
        assert told.stream.packed is by_default, "the job's own word counts"


def test_a_checkpoint_of_a_version_that_packed_no_rows_unasked_goes_on_without(tmp_path):
    folder = JobFolder(tmp_path, "job", 1)
    folder.claim()
    path = folder.save(Position(1), {"x": torch.ones(2)}, keep=1)
    assert "packed" not in json.loads((tmp_path / path / "state.json").read_text())
    manifest = tmp_path / path / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "packed": None}))
    assert folder.newest().position.packed is False


def test_lengths_of_rows_in_lines_count_real_tokens_alone():
    rows = small_rows()
    micro = SIZES.micro_batch(0, range(len(rows)), lengths_of(rows), max_tokens=96)
    with in_float64():
        stream = stream_of(tuned_of("Llama"), rows, LINES)
        tasklet = stream.peek()
    assert tasklet.real_tokens == tasklet.micro.tokens < tasklet.tokens
    assert micro.padded_tokens == 96
