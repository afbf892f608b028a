"""Compute with layers that take turns in memory: everything is as where all of them stay."""

from __future__ import annotations

import threading

import pytest
import torch
from support.held_decode import Decode
from transformers import AutoConfig, AutoModelForCausalLM

from windrow.errors import UserError
from windrow_sidecar.engines.builtin.llama.config import read_config
from windrow_sidecar.engines.builtin.llama.riding import Product
from windrow_sidecar.engines.builtin.streamed import stream_weights
from windrow_sidecar.finetune.in_engine.joined_products import RiderSeat, join_products
from windrow_sidecar.finetune.model.loading import ExportedWeights
from windrow_sidecar.finetune.model.overlay import build_over
from windrow_sidecar.qos.view import Phase
from windrow_sidecar.testing.equality import (
    Cut,
    pefts_gradients,
    small_rows,
    small_spec,
    stream_of,
    summed_gradients,
    tuned_model,
)
from windrow_sidecar.testing.models import save_random_llama
from windrow_sidecar.testing.rounding import apart, in_type_of

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS = 6
DORA = {"lora": {"rank": 4, "alpha": 8, "useDora": True}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_random_llama(folder, num_hidden_layers=LAYERS)
    return folder


@pytest.fixture
def decode_of(folder):
    made = []

    def make(dtype, capacity=3):
        made.append(Decode(folder, dtype, capacity))
        return made[-1]

    yield make
    for one in made:
        one.close()


def within_budget(decode):
    pages, layers = decode.streamed.pages, decode.streamed.layers
    stays = len(pages.storage) - LAYERS * layers.slot_bytes
    return pages.resident_bytes <= stays + layers.capacity * layers.slot_bytes + 4096


def tuned_over(folder, decode, adapter=None):
    """Return a tuned model over the very weights that decode streams."""
    manifest = decode.streamed.layout.manifest("made")
    tensors = ExportedWeights(manifest, decode.streamed.pages.storage).tensors()
    base = build_over(tensors, AutoConfig.from_pretrained(folder), torch.float64)
    base.requires_grad_(requires_grad=False)
    return tuned_model(base, small_spec(adapter), decode.streamed.layers)


def resident_model(folder, adapter=None):
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(torch.float64)
    return tuned_model(base, small_spec(adapter))


@pytest.mark.parametrize(
    ("capacity", "dtype"), [(2, torch.float32), (3, torch.float64), (LAYERS, torch.float32)]
)
def test_a_step_has_the_very_logits_of_an_engine_that_holds_all_layers(decode_of, capacity, dtype):
    streamed = decode_of(dtype, capacity)
    wanted = decode_of(dtype, 0).apart()
    for _ in range(2):  # layers that have left come back
        assert torch.equal(streamed.apart(), wanted)
        assert within_budget(streamed)
    assert len(streamed.streamed.layers.resident) <= capacity


@pytest.mark.equality
@pytest.mark.parametrize(
    ("adapter", "max_tokens"),
    [(None, 4096), (DORA, 64)],
    ids=["LoRA, one micro-batch", "DoRA, several"],
)
def test_one_pass_has_pefts_gradients_and_the_logits_of_the_step(
    folder, decode_of, adapter, max_tokens
):
    decode = decode_of(torch.float64)
    theirs = pefts_gradients(resident_model(folder, adapter), small_rows())
    alone = decode_of(torch.float64, 0).apart()
    tuned, layers = tuned_over(folder, decode, adapter), decode.streamed.layers
    logits, orders = [], []
    with in_type_of(tuned):
        cut = Cut(
            program="packed",
            around_layer=layers,
            micro_batches=8,
            max_tokens=max_tokens,
        )
        stream = stream_of(tuned, small_rows(), cut)
        seat = RiderSeat()
        assert join_products(stream.parts.stack, decode.shape_of, seat) == ""
        while (tasklet := stream.peek()).phase is not Phase.OPTIMIZER:
            first = tasklet.phase is Phase.FORWARD and tasklet.layer == 0
            if first and seat.riding is None:
                with torch.inference_mode():
                    seat.riding = decode.decoder.ride(decode.batch)
            if tasklet.phase is Phase.LOSS and seat.riding is not None:
                assert seat.riding.joined == len(Product) * LAYERS
                with torch.inference_mode():
                    logits.append(decode.model.logits(seat.riding.finish()))
                seat.riding = None
                for request in decode.batch:
                    request.kv.n_tokens -= 1
            orders.append((tasklet.phase, tasklet.layer))
            stream.run(tasklet)
            assert within_budget(decode)
        gradients = summed_gradients(stream)
    assert apart(gradients, theirs).by_rounding
    assert logits
    for fused in logits:
        assert apart({"logits": fused}, {"logits": alone}).by_rounding
        assert torch.equal(fused.argmax(-1), alone.argmax(-1))
    assert next(layer for phase, layer in orders if phase is Phase.BACKWARD) == LAYERS - 1


def test_decode_goes_on_while_another_thread_waits_in_the_middle_of_a_layer(decode_of):
    decode = decode_of(torch.float64)
    wanted, layers = decode_of(torch.float64, 0).apart(), decode.streamed.layers
    entered, leave = threading.Event(), threading.Event()

    def waits():
        with layers.backward(2):
            entered.set()
            leave.wait(60)

    other = threading.Thread(target=waits)
    other.start()
    entered.wait(60)
    try:
        for _ in range(2):
            assert torch.equal(decode.apart(), wanted)
            assert 2 in layers.resident
            assert within_budget(decode)
    finally:
        leave.set()
        other.join()


def test_a_budget_for_too_few_layers_names_the_least_that_will_do(folder):
    config = read_config(folder)
    for beside_a_job, least in ((False, 2), (True, 3)):
        with pytest.raises(UserError, match=f"{least} are needed") as refused:
            stream_weights(
                folder,
                config,
                torch.float32,
                "made",
                budget_bytes=1 << 10,
                beside_a_job=beside_a_job,
            )
        assert refused.value.field == "--weights-budget"
        needed = int(refused.value.remedy.split()[-1].removesuffix("MiB.")) << 20
        made = stream_weights(
            folder,
            config,
            torch.float32,
            "made",
            budget_bytes=needed,
            beside_a_job=beside_a_job,
        )
        made.layers.close()


def test_a_file_that_has_become_shorter_ends_the_step_with_its_name(folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    decode = Decode(tmp_path, torch.float32, 2)
    try:
        weights = tmp_path / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
        with pytest.raises(OSError, match=r"model\.safetensors ends before byte"):
            decode.apart()
    finally:
        decode.close()
