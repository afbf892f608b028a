"""Layers that run as graphs learn what peft's own do; where they cannot, packed layers run."""

from __future__ import annotations

import copy
import logging

import pytest
import torch

from windrow_sidecar.compute.captures import NoMemory
from windrow_sidecar.compute.host_device import HostDevice
from windrow_sidecar.finetune.adapter.adapters import ADAPTER
from windrow_sidecar.finetune.adapter.layer_graphs import MOST_SHAPES, MOST_SHARES
from windrow_sidecar.finetune.adapter.layer_programs import use_graphs, use_program, wanted_program
from windrow_sidecar.finetune.data.split import Example
from windrow_sidecar.finetune.engine.orders import token_major
from windrow_sidecar.finetune.engine.sizing import Windows
from windrow_sidecar.finetune.engine.suspension import BrokenOff
from windrow_sidecar.finetune.model.boundaries import Replayed
from windrow_sidecar.finetune.model.decoder_stack import DecoderStack
from windrow_sidecar.finetune.recompute.checkpointed_layers import PlannedLayers
from windrow_sidecar.qos.view import Phase
from windrow_sidecar.testing.architectures import random_model
from windrow_sidecar.testing.equality import (
    Cut,
    our_training,
    pefts_training,
    small_spec,
    stream_of,
    tuned_model,
)
from windrow_sidecar.testing.replays import HostReplays
from windrow_sidecar.testing.rounding import apart, in_type_of, no_farther

pytestmark = pytest.mark.usefixtures("one_thread")

# Micro-batches of two rows, so that a step has several of them.
TOKENS = 24
MODELS = {
    "Llama": ("Llama", None),
    "Qwen2, DoRA": ("Qwen2", {"lora": {"rank": 4, "alpha": 8, "useDora": True}}),
    "Qwen3": ("Qwen3", None),
}


def rows(n=12, length=12):
    """Rows of one length, as packed lines have: their shapes repeat."""
    draw = torch.Generator().manual_seed(3)
    ids = [tuple(torch.randint(3, 96, (length,), generator=draw).tolist()) for _ in range(n)]
    return tuple(Example(i, i, f"rows:{n}") for n, i in enumerate(ids))


def tuned_of(name="Llama", dtype=torch.float64):
    architecture, adapter = MODELS[name]
    return tuned_model(random_model(architecture).to(dtype), small_spec(adapter))


def cut_of(captures, **more):
    return Cut(program="graphs", captures=captures, max_tokens=TOKENS, **more)


def equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    return all(apart(ours[kind], theirs[kind]).by_rounding for kind in ours)


def through(stream, until=lambda tasklet: False):
    """Run tasklets to the end, or up to one; returns it."""
    while (tasklet := stream.peek()) is not None and not until(tasklet):
        stream.run(tasklet)
    return tasklet


@pytest.mark.equality
@pytest.mark.parametrize("name", MODELS)
def test_training_by_graphs_equals_that_of_peft(name):
    captures, tuned = HostReplays(), tuned_of(name)
    theirs = pefts_training(copy.deepcopy(tuned), rows())
    ours = our_training(copy.deepcopy(tuned), rows(), cut_of(captures))
    assert equal(ours, theirs)
    layers = len(tuned.get_base_model().model.layers)
    # Of two rows, and of the last, single one: forward and backward.
    assert captures.captured == 2 * 2 * layers
    assert captures.launches > 4 * layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_in_fewer_bits_graphs_err_as_packed_layers_do(dtype):
    tuned = tuned_of(dtype=dtype)
    truth = pefts_training(copy.deepcopy(tuned).double(), rows())["parameter"]
    theirs = [apart(pefts_training(copy.deepcopy(tuned), rows())["parameter"], truth).of_norm]
    packed = our_training(copy.deepcopy(tuned), rows(), Cut(program="packed", max_tokens=TOKENS))[
        "parameter"
    ]
    ours = our_training(copy.deepcopy(tuned), rows(), cut_of(HostReplays()))["parameter"]
    assert no_farther([apart(ours, truth).of_norm], theirs, dtype)
    assert all(torch.equal(ours[n], packed[n]) for n in ours), "the same operations run"


def test_rows_in_one_line_bring_their_positions_and_masks_with_each_group():
    tuned = tuned_of()
    captures, packed = HostReplays(), {"packed": True}
    given = rows(6, 12) + rows(6, 12)
    theirs = our_training(copy.deepcopy(tuned), given, Cut(max_tokens=TOKENS, **packed))
    assert equal(our_training(copy.deepcopy(tuned), given, cut_of(captures, **packed)), theirs)
    assert captures.launches > 0


def test_a_shape_is_captured_when_it_comes_again_and_only_so_many_are():
    captures, tuned = HostReplays(), tuned_of()
    with in_type_of(tuned):
        stream = stream_of(copy.deepcopy(tuned), rows(), cut_of(captures))
        begun = through(stream, lambda tasklet: tasklet.phase is Phase.LOSS)
        assert begun.phase is Phase.LOSS
        assert captures.captured == 0, "the first of a shape runs packed"
    stack = stream.parts.stack
    graphs = stack.graphs
    pairs = [(share, width) for share in range(MOST_SHARES + 1) for width in range(2, 9)]
    for share, width in pairs:
        captures.current = share
        for _ in range(2):
            at = stack.begin(torch.arange(3, 3 + width)[None])
            stack.forward(at, 0, at.whole, None, learn=False)
            del at
    shares = {key[0] for key in graphs._sets}
    assert len(shares) == MOST_SHARES
    assert len(graphs._sets) == MOST_SHARES * MOST_SHAPES


def test_another_group_runs_packed_while_one_is_on_its_way():
    captures, tuned = HostReplays(), tuned_of()
    with in_type_of(tuned):
        stream = stream_of(copy.deepcopy(tuned), rows(), cut_of(captures))
        stack, ids = stream.parts.stack, torch.arange(3, 15)[None]

        def up(layer_of=2):
            at = stack.begin(ids)
            for layer in range(layer_of):
                stack.forward(at, layer, at.whole, _Kept(), learn=True)
            return at

        del_first = up()
        del del_first
        ours = up()
        assert isinstance(ours.graphs[0][0], Replayed)
        kept = [hidden.clone() for hidden in ours.inputs[:3]]
        theirs = up()
        assert not isinstance(theirs.graphs[0][0], Replayed)
        assert all(map(torch.equal, ours.inputs[:3], kept))


class _Kept:
    """Boundaries in torch's memory."""

    def place(self, hidden):
        return hidden.detach()


@pytest.mark.parametrize("at_backward", [False, True])
def test_what_is_broken_off_between_two_graphs_runs_again(at_backward):
    tuned = tuned_of()
    theirs = pefts_training(copy.deepcopy(tuned), rows())
    armed = []

    def point():
        if armed:
            armed.pop()
            raise BrokenOff

    captures = HostReplays(point)
    with in_type_of(tuned):
        stream, broken = stream_of(copy.deepcopy(tuned), rows(), cut_of(captures)), 0
        phase = Phase.BACKWARD if at_backward else Phase.FORWARD
        steps = []
        while (tasklet := stream.peek()) is not None:
            graphed = captures.captured > 4 and tasklet.phase is phase
            if graphed and broken < 5:
                armed.append(True)
            try:
                done = stream.run(tasklet)
            except BrokenOff:
                broken += 1
                stream.break_off(tasklet)
                continue
            armed.clear()
            if tasklet.phase is Phase.OPTIMIZER:
                steps.append(done)
    assert broken == 5
    held = {
        n.removeprefix("parameter/"): t for n, t in stream.tensors().items() if "parameter" in n
    }
    assert apart(held, theirs["parameter"]).by_rounding


@pytest.mark.parametrize("way", ["forget", "spill", "buffers", "drop"])
def test_memory_is_left_in_the_middle_of_a_group_and_what_is_learnt_stays_the_same(way):
    tuned, captures = tuned_of(), HostReplays()
    theirs = pefts_training(copy.deepcopy(tuned), rows())
    with in_type_of(tuned):
        stream = stream_of(copy.deepcopy(tuned), rows(), cut_of(captures))
        leave = {
            "forget": stream.forget,
            "spill": lambda: stream.spill(1 << 40),
            "buffers": lambda: (
                stream.move_buffers(to_host=True),
                stream.move_buffers(to_host=False),
            ),
            "drop": lambda: (stream.drop(), stream.parts.stack.graphs.drop()),
        }[way]
        seen = 0
        while (tasklet := stream.peek()) is not None:
            is_middle = tasklet.phase is Phase.BACKWARD and tasklet.layer == 0
            if is_middle and captures.captured > 0 and seen < 2 and captures.backed_bytes():
                seen += 1
                leave()
                assert captures.backed_bytes() == 0
                tasklet = stream.peek()
            stream.run(tasklet)
    assert seen == 2
    held = {
        n.removeprefix("parameter/"): t for n, t in stream.tensors().items() if "parameter" in n
    }
    assert apart(held, theirs["parameter"]).by_rounding
    if way in ("forget", "spill"):  # each graph that was captured is there still
        assert 2 * captures.captured == stream.parts.stack.graphs.captured


def test_without_memory_for_a_capture_layers_run_packed_and_try_again_later(caplog):
    tuned, captures = tuned_of(), HostReplays()
    captures.starved = True
    with in_type_of(tuned):
        stream = stream_of(copy.deepcopy(tuned), rows(), cut_of(captures))
        through(stream)
    assert captures.captured == 0
    assert stream.parts.stack.program == "graphs", "it may be there another time"


def test_a_capture_that_fails_is_said_once_and_layers_run_packed(caplog):
    tuned = tuned_of()
    theirs = pefts_training(copy.deepcopy(tuned), rows())

    class Broken(HostReplays):
        def capture(self, pool, prepare, run):
            raise RuntimeError("operation not permitted when stream is capturing")

    with caplog.at_level(logging.WARNING):
        ours = our_training(copy.deepcopy(tuned), rows(), cut_of(Broken()))
    assert equal(ours, theirs)
    said = [record for record in caplog.records if "not as graphs" in record.getMessage()]
    assert len(said) == 1
    assert "not permitted" in said[0].getMessage()


def test_layers_that_keep_a_part_run_packed():
    tuned, captures = tuned_of(), HostReplays()
    theirs = pefts_training(copy.deepcopy(tuned), rows())
    planned = PlannedLayers(tuned.get_base_model().model.layers)
    planned.bytes_per_token = 0
    assert equal(our_training(tuned, rows(), cut_of(captures, around_layer=planned)), theirs)
    assert captures.captured == 0


def test_windows_run_packed():
    tuned, captures = tuned_of(), HostReplays()
    theirs = pefts_training(copy.deepcopy(tuned), rows())
    windows = {"sizing": Windows(5), "order": token_major}
    assert equal(our_training(tuned, rows(), cut_of(captures, **windows)), theirs)
    assert captures.captured == 0


class _Clock:
    """Marks a given time apart."""

    def __init__(self, us):
        self.us, self.now = us, 0

    def __call__(self):
        self.now += round(self.us * 1000)
        return _At(self.now)


class _At:
    def __init__(self, ns):
        self._ns = ns

    def done(self):
        return True

    def at_ns(self):
        return self._ns


@pytest.mark.parametrize(("span_us", "bound_us", "most"), [(100, 900, 0), (400, 900, 9)])
def test_rows_are_split_where_the_longest_graph_takes_more_than_a_third_of_the_bound(
    span_us, bound_us, most
):
    tuned = tuned_of()
    stack = DecoderStack(tuned.get_base_model())
    assert use_program(stack, "packed", adapter=ADAPTER, repacks=True) == ""
    why = use_graphs(stack, HostReplays(), mark=_Clock(span_us), bound_us=lambda: bound_us)
    assert (why, stack.program) == ("", "graphs")
    for _ in range(3):
        at = stack.begin(torch.arange(3, 27)[None])
        for layer in range(stack.depth):
            stack.forward(at, layer, at.whole, _Kept(), learn=False)
    # Twice what a forward's part takes: 800 us for 24 tokens, where 300 are allowed.
    allowed = stack.graphs.most_tokens()
    assert (allowed if most else min(allowed, 24)) == (most or 24)


def test_a_processor_has_no_graphs_and_the_program_can_be_asked_for(caplog):
    stack = DecoderStack(tuned_of().get_base_model())
    assert use_program(stack, "graphs", adapter=ADAPTER, repacks=True) == ""
    device = HostDevice()
    assert use_graphs(stack, device.captures(), mark=device.mark) == "graphs need a GPU"
    assert stack.program == "packed"
    assert wanted_program({"WINDROW_LAYER_PROGRAM": "graphs"}) == "graphs"
    assert issubclass(NoMemory, Exception)
