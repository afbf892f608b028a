"""Run decode rows and finetune rows in one pass: both get what they get apart."""

from __future__ import annotations

import copy

import pytest
import torch
from support.held_decode import Decode
from transformers import AutoModelForCausalLM

from windrow_sidecar.engines.builtin.joined_profile import profile_joined
from windrow_sidecar.engines.builtin.llama.riding import Product
from windrow_sidecar.finetune.engine.orders import token_major
from windrow_sidecar.finetune.engine.sizing import Windows
from windrow_sidecar.finetune.in_engine.joined_products import RiderSeat, join_products
from windrow_sidecar.qos.hybrid_tokens import hybrid_tokens
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
from windrow_sidecar.testing.rounding import apart, in_type_of, no_farther

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.equality]

WHOLE = Cut(program="packed")
WINDOWS = Cut(Windows(7), token_major, program="packed")
DORA = {"lora": {"rank": 4, "alpha": 8, "useDora": True}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_random_llama(folder)
    return folder


@pytest.fixture
def decode_of(folder):
    made = []

    def make(dtype):
        made.append(Decode(folder, dtype))
        return made[-1]

    yield make
    for one in made:
        one.close()


def tuned_of(folder, dtype, adapter=None):
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(dtype)
    return tuned_model(base, small_spec(adapter))


def in_one_pass(tuned, cut, decode):
    """Run the first batch with a decode step in each forward; its gradients, and all logits."""
    logits, joined = [], 0
    with in_type_of(tuned):
        stream = stream_of(tuned, small_rows(), cut)
        seat = RiderSeat()
        assert join_products(stream.parts.stack, decode.shape_of, seat) == ""
        while (tasklet := stream.peek()).phase is not Phase.OPTIMIZER:
            rides = tasklet.phase is Phase.FORWARD
            if rides and tasklet.layer == 0:
                with torch.inference_mode():
                    seat.riding = decode.decoder.ride(decode.batch)
            stream.run(tasklet)
            if rides and tasklet.layer_end == stream.parts.stack.depth:
                with torch.inference_mode():
                    logits.append(decode.model.logits(seat.riding.finish()))
                joined += seat.riding.joined
                seat.riding = None
                for request in decode.batch:
                    request.kv.n_tokens -= 1
        gradients = summed_gradients(stream)
    return gradients, logits, joined


@pytest.mark.parametrize("adapter", [None, DORA], ids=["LoRA", "DoRA"])
@pytest.mark.parametrize("cut", [WHOLE, WINDOWS], ids=["whole", "windows"])
def test_in_float64_gradients_equal_pefts_and_logits_those_of_the_step(
    folder, decode_of, cut, adapter
):
    decode, tuned = decode_of(torch.float64), tuned_of(folder, torch.float64, adapter)
    theirs, alone = pefts_gradients(tuned, small_rows()), decode.apart()
    gradients, logits, joined = in_one_pass(tuned, cut, decode)
    assert apart(gradients, theirs).by_rounding
    assert joined == len(logits) * len(Product) * decode.config.layers, "every product was shared"
    for fused in logits:
        assert apart({"logits": fused}, {"logits": alone}).by_rounding
        assert torch.equal(fused.argmax(-1), alone.argmax(-1))


def test_in_fp32_decodes_rows_err_no_more_than_those_of_a_step_alone(folder, decode_of):
    decode, exact = decode_of(torch.float32), decode_of(torch.float64).apart()
    alone = decode.apart()
    _, logits, _ = in_one_pass(tuned_of(folder, torch.float32), WHOLE, decode)
    truth = {"logits": exact}
    errors = [apart({"logits": of.double()}, truth).of_norm for of in logits]
    assert no_farther(errors, [apart({"logits": alone.double()}, truth).of_norm], torch.float32)
    assert all(torch.equal(of.argmax(-1), exact.argmax(-1)) for of in logits)


def test_a_step_whose_riders_stop_in_the_middle_of_a_layer_ends_alone(folder, decode_of):
    decode, tuned = decode_of(torch.float64), tuned_of(folder, torch.float64)
    alone = decode.apart()
    with in_type_of(tuned):
        stream = stream_of(tuned, small_rows(), WHOLE)
        seat = RiderSeat()
        assert join_products(stream.parts.stack, decode.shape_of, seat) == ""
        for layer in range(2):
            if layer == 1:  # it runs alone through the first layer
                with torch.inference_mode():
                    seat.riding = riding = decode.decoder.ride(decode.batch)
            assert stream.peek().layer == layer
            stream.run(stream.peek())
    assert (riding.layer, riding.joined) == (2, len(Product))
    half = torch.zeros(5, decode.config.hidden, dtype=torch.float64)
    riding.join(2, Product.QKV, half)
    assert riding.done > 2 / 3
    with torch.inference_mode():
        fused = decode.model.logits(riding.finish())
    assert apart({"logits": fused}, {"logits": alone}).by_rounding


def test_a_step_that_was_given_up_is_computed_again(folder, decode_of):
    decode = decode_of(torch.float64)
    alone = decode.apart()
    with torch.inference_mode():
        riding = decode.decoder.ride(decode.batch)
        riding.join(1, Product.QKV, torch.zeros(1, decode.config.hidden, dtype=torch.float64))
        riding.give_up()
        assert not riding.reaches(2, Product.QKV)
        tokens = decode.decoder.again(decode.batch)
    assert tokens == alone.argmax(-1).tolist()


def test_a_profile_of_shared_products_has_no_more_tokens_for_less_time(folder, decode_of):
    decode = decode_of(torch.float32)
    cost = profile_joined(decode.model, max_batch=8)
    seen = [cost.us(batch, tokens) for batch in (1, 8) for tokens in (0, 16, 64, 256, 512)]
    assert seen[0] > 0
    assert seen[:5] == sorted(seen[:5])
    assert seen[5:] == sorted(seen[5:])
    assert 0 < hybrid_tokens(cost, 8, 2 * seen[-1]) <= 512


def test_layers_that_run_eagerly_take_no_rider(folder, decode_of):
    decode, tuned = decode_of(torch.float32), tuned_of(folder, torch.float32)
    stack = stream_of(copy.deepcopy(tuned), small_rows(), Cut()).parts.stack
    assert "eagerly" in join_products(stack, decode.shape_of, RiderSeat())
    stack = stream_of(tuned, small_rows(), WHOLE).parts.stack
    assert "decode serves" in join_products(stack, lambda *_: (1, 1), RiderSeat())
