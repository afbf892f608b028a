"""A model of which few layers are in memory learns what it learns when all of them are."""

from __future__ import annotations

import threading

import pytest
import torch
from support.queueing_device import QueueingDevice
from transformers import AutoConfig, LlamaForCausalLM

from windrow.errors import UserError
from windrow_sidecar.compute.host_device import HostCopies
from windrow_sidecar.engines.streaming.copying import Copier, RateLimit
from windrow_sidecar.engines.streaming.tensor_files import OpenFiles, stored_tensors
from windrow_sidecar.finetune.engine.sizing import WholeRows, Windows
from windrow_sidecar.finetune.model.around import InTurn
from windrow_sidecar.finetune.model.loading import load_base
from windrow_sidecar.finetune.model.structure import find_layers
from windrow_sidecar.finetune.model.windowed import CannotWindow, load_windowed
from windrow_sidecar.finetune.offload.frozen_layers import FrozenLayers
from windrow_sidecar.finetune.recompute.checkpointed_layers import ALL, PlannedLayers
from windrow_sidecar.testing.models import save_random_llama
from windrow_sidecar.testing.tinyjob import adapter_of, bit_equal, tiny_job

LAYERS, PLENTY = 5, 10**9
SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_random_llama(folder, num_hidden_layers=LAYERS, **SIZES)
    return folder


@pytest.fixture
def windowed(checkpoint):
    """Model, window and what holds around a layer; the window can be asked for more than once."""
    opened = []

    def load(**options):
        config = AutoConfig.from_pretrained(checkpoint)
        model, frozen = load_windowed(checkpoint, config, room_bytes=PLENTY, **options)
        opened.append(frozen)
        planned = PlannedLayers(find_layers(model.get_decoder(), config))
        planned.bytes_per_token = ALL
        return model, frozen, InTurn(frozen, planned), planned

    yield load
    for frozen in opened:
        frozen.close()


def whole(checkpoint):
    return LlamaForCausalLM.from_pretrained(checkpoint).requires_grad_(requires_grad=False)


def trained(job, between=lambda number: None):
    number = 0
    while (tasklet := job.stream.peek()) is not None:
        between(number)
        job.stream.run(tasklet)
        number += 1
    return adapter_of(job)


@pytest.mark.parametrize(
    ("capacity", "micro_batches", "tokens"), [(1, 1, 0), (2, 1, 0), (3, 2, 0), (2, 2, 4)]
)
def test_training_is_bit_equal_with_and_without_a_window(
    checkpoint, windowed, capacity, micro_batches, tokens
):
    how = {
        "steps": 2,
        "micro_batches": micro_batches,
        "sizing": Windows(tokens) if tokens else WholeRows(),
    }
    expected = trained(tiny_job(base=whole(checkpoint), **how))
    model, frozen, around, _ = windowed()
    frozen.resize(capacity)
    found = trained(tiny_job(base=model, around_layer=around, **how))
    assert bit_equal(found, expected)
    assert len(frozen.resident) <= capacity
    assert frozen.moved.transfers > LAYERS


def test_growing_shrinking_and_vanishing_between_tasklets_changes_nothing(checkpoint, windowed):
    expected = trained(tiny_job(steps=2, base=whole(checkpoint)))
    model, frozen, around, planned = windowed()
    sizes, budgets = [2, 5, 0, 1, 3], [ALL, 0, 200.0]

    def between(number):
        frozen.resize(sizes[number % len(sizes)])
        assert len(frozen.resident) <= sizes[number % len(sizes)]
        planned.bytes_per_token = budgets[number % len(budgets)]

    assert bit_equal(trained(tiny_job(steps=2, base=model, around_layer=around), between), expected)


def test_several_micro_batches_share_the_transfer_of_a_visit(checkpoint, windowed):
    moved = []
    for micro_batches in (1, 3):
        model, frozen, around, _ = windowed()
        frozen.resize(2)
        job = tiny_job(
            steps=1, base=model, around_layer=around, max_tokens=8, micro_batches=micro_batches
        )
        trained(job)
        moved.append(frozen.moved.n_bytes)
    assert moved[1] < 0.5 * moved[0]


def test_layers_that_are_not_there_hold_no_memory_and_compute_nothing_unnoticed(windowed):
    model, frozen, around, _ = windowed()
    tiny_job(steps=1, base=model, around_layer=around)
    frozen.resize(1)
    gone = [i for i in range(LAYERS) if i not in frozen.resident]
    assert len(gone) == LAYERS - 1
    weight = model.model.layers[gone[0]].mlp.up_proj.weight
    assert weight.untyped_storage().nbytes() == weight.itemsize
    assert torch.isnan(weight).all()


def test_weights_are_converted_on_their_way(tmp_path, checkpoint):
    whole(checkpoint).to(torch.bfloat16).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    model, frozen = load_windowed(tmp_path, config, room_bytes=PLENTY)
    expected = whole(checkpoint).to(torch.bfloat16).to(torch.float32)
    with frozen.forward(3):
        found = model.model.layers[3].mlp.up_proj.weight
        assert found.dtype == torch.float32
        assert torch.equal(found, expected.model.layers[3].mlp.up_proj.weight)
    frozen.close()


def test_a_rate_limit_holds_the_copy_back(windowed):
    waits = []
    copier = Copier(RateLimit(1000.0), clock=lambda: 0.0, pause=waits.append)
    _, frozen, _, _ = windowed(copier=copier)
    with frozen.forward(0):
        first = frozen.slot_bytes
    assert max(waits) > 0
    assert max(waits) <= 5 * first / 1000.0


def test_shrinking_takes_back_a_layer_that_is_on_its_way(windowed):
    moving, go_on = threading.Event(), threading.Event()

    def pause(_):
        moving.set()
        go_on.wait()

    limit = RateLimit(None)
    copier = Copier(limit, clock=lambda: 0.0, pause=pause)
    _, frozen, _, _ = windowed(copier=copier)
    frozen.resize(2)
    with frozen.forward(0):
        pass
    frozen.resize(0)
    limit._rate = 1.0  # from now on every piece waits
    frozen.resize(2)
    waiter = threading.Thread(target=lambda: frozen.forward(0).__enter__())
    waiter.start()
    assert moving.wait(10)
    go_on.set()
    waiter.join(10)
    frozen.resize(0)
    assert frozen.resident == frozenset()


def test_a_file_that_was_cut_short_is_told_and_leaves_no_layer_behind(tmp_path, checkpoint):
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = AutoConfig.from_pretrained(tmp_path)
    _, frozen = load_windowed(tmp_path, config, room_bytes=PLENTY)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[: min(s.begin for s in stored_tensors(tmp_path).values())])
    with pytest.raises(OSError, match="ends before"), frozen.forward(0):
        pass
    assert 0 not in frozen.resident
    frozen.close()


def test_too_little_memory_is_refused_with_what_is_needed(checkpoint):
    config = AutoConfig.from_pretrained(checkpoint)
    with pytest.raises(CannotWindow, match="bytes are needed for two layers, 1000 are there"):
        load_windowed(checkpoint, config, room_bytes=1000)


def test_a_model_that_is_too_large_for_its_room_is_loaded_with_a_window(checkpoint):
    whole_bytes = sum(at.n_bytes for at in stored_tensors(checkpoint).values())
    assert load_base(checkpoint).frozen is None
    base = load_base(checkpoint, room_bytes=whole_bytes * 3 // 4)
    assert 2 <= base.frozen.capacity < LAYERS
    base.frozen.close()


def test_a_room_for_less_than_two_layers_is_an_error_that_names_the_bytes(checkpoint):
    with pytest.raises(UserError, match=r"\d+ bytes are needed for two layers") as refused:
        load_base(checkpoint, room_bytes=1000)
    assert refused.value.field == "spec.model.name"


def test_a_checkpoint_of_another_model_is_refused(tmp_path, checkpoint):
    save_random_llama(tmp_path, num_hidden_layers=LAYERS - 1, **SIZES)
    with pytest.raises(UserError, match=r"lacks model\.layers\.4\.input_layernorm\.weight and 8"):
        load_windowed(tmp_path, AutoConfig.from_pretrained(checkpoint), room_bytes=PLENTY)


def test_capacity_is_what_the_room_holds(checkpoint):
    config = AutoConfig.from_pretrained(checkpoint)
    _, all_of_it = load_windowed(checkpoint, config, room_bytes=PLENTY)
    assert all_of_it.capacity == LAYERS
    rest = sum(
        at.n_bytes for name, at in stored_tensors(checkpoint).items() if ".layers." not in name
    )
    room = rest + 2 * all_of_it.slot_bytes
    _, two = load_windowed(checkpoint, config, room_bytes=room)
    assert isinstance(two, FrozenLayers)
    assert two.capacity == 2
    all_of_it.close()
    two.close()


class Queueing(QueueingDevice):
    """A device that queues: its copies take time, and its memory is the host's."""

    def copies(self):
        return _Slow(self)


class _Slow(HostCopies):
    def start(self, to, source):
        self._device.work(source.numel())  # a microsecond a byte
        super().start(to, source)


@pytest.mark.parametrize("pinned", [PLENTY, 300, 0], ids=["all", "some", "none"])
def test_a_device_that_queues_is_fed_from_pinned_copies_and_learns_the_same(
    checkpoint, windowed, monkeypatch, pinned
):
    monkeypatch.setattr("windrow_sidecar.engines.streaming.copying.PIECE_BYTES_ON_GPU", 256)
    expected = trained(tiny_job(steps=2, base=whole(checkpoint)))
    device = Queueing()
    copier = Copier(device=device, pinned_bytes=pinned)
    model, frozen, around, _ = windowed(copier=copier, device=device)
    frozen.resize(2)
    found = trained(tiny_job(steps=2, base=model, around_layer=around))
    assert bit_equal(found, expected)
    assert copier._staging.kept_bytes <= pinned
    frozen.close()
    assert copier.seconds > 0


class Unpinned(Queueing):
    """A GPU whose driver pins no more host memory."""

    def host_copy(self, n_bytes):
        raise RuntimeError(f"CUDA error: out of memory ({n_bytes} bytes of the host)")


@pytest.mark.timeout(60)
def test_what_fails_on_the_copying_thread_is_told_to_who_waits_for_the_layer(windowed):
    device = Unpinned()
    _, frozen, _, _ = windowed(copier=Copier(device=device, pinned_bytes=PLENTY), device=device)
    for layer in (0, 1):
        with pytest.raises(RuntimeError, match="of the host"), frozen.forward(layer):
            pass
    frozen.close()


def test_what_is_kept_on_the_host_is_read_from_its_file_once(checkpoint, windowed, monkeypatch):
    reads = []
    read = OpenFiles.read_into
    monkeypatch.setattr(
        OpenFiles, "read_into", lambda self, *a: (reads.append(1), read(self, *a))[1]
    )
    device = Queueing()
    _, frozen, _, _ = windowed(copier=Copier(device=device, pinned_bytes=PLENTY), device=device)
    frozen.resize(1)
    for layer in range(LAYERS):
        with frozen.forward(layer):
            pass
    once = len(reads)
    for layer in range(LAYERS):
        with frozen.forward(layer):
            pass
    assert len(reads) == once
    assert frozen.moved.transfers >= 2 * LAYERS - 1


def test_a_layer_waits_on_the_device_for_its_copy_which_waits_for_the_last_user(
    checkpoint, windowed
):
    """What computes is held back behind the copy, and the copy began behind what was queued."""
    device, order = Queueing(), []

    class Told(_Slow):
        def after(self, mark):
            order.append("after")

        def start(self, to, source):
            order.append("copy")
            super().start(to, source)

        def hold_back(self, mark):
            order.append("held back")

    device.copies = lambda: Told(device)
    _, frozen, _, _ = windowed(copier=Copier(device=device, pinned_bytes=0), device=device)
    frozen.resize(1)
    with frozen.forward(0):
        pass
    assert order[0] == "after"
    assert order[1] == "copy"
    assert order[-1] == "held back"
    assert order.count("held back") == 1
