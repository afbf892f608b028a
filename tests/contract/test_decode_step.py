"""One suite for every decode step: the same tokens as transformers, whoever comes and goes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from support.decode_bench import DecodeBench

from windrow_sidecar.engines.builtin.llama.layer_ops import TorchOps
from windrow_sidecar.engines.builtin.llama.model import LlamaModel
from windrow_sidecar.engines.builtin.step.decoder import Decoder
from windrow_sidecar.engines.builtin.step.gathered import GatheredDecode
from windrow_sidecar.engines.builtin.step.paged_attention import TorchPagedAttention
from windrow_sidecar.engines.builtin.step.static_step import StaticDecode
from windrow_sidecar.testing.models import save_random_llama
from windrow_sidecar.testing.rounding import LogitDistances

pytestmark = pytest.mark.usefixtures("one_thread")

MAX_RUNNING = 6  # buckets 1, 2, 4, 8: some steps of a ragged batch are padded


def gathered(model: LlamaModel) -> Decoder:
    return GatheredDecode(model)


def static_torch(model: LlamaModel) -> Decoder:
    attention = TorchPagedAttention(model.config, model.cache, fixed=False)
    ops = TorchOps(model.config, model.cache, model.rotary)
    return StaticDecode(model, attention, ops, max_running=MAX_RUNNING)


def static_torch_as_captured(model: LlamaModel) -> Decoder:
    attention = TorchPagedAttention(model.config, model.cache, fixed=True)
    ops = TorchOps(model.config, model.cache, model.rotary)
    return StaticDecode(model, attention, ops, max_running=MAX_RUNNING)


def static_triton(model: LlamaModel) -> Decoder:
    from windrow_sidecar.engines.builtin.llama.triton_ops import TritonOps
    from windrow_sidecar.engines.builtin.step.triton_attention import TritonPagedAttention

    attention = TritonPagedAttention(model.config, model.cache, units=3)
    ops = TritonOps(model.config, model.cache, model.rotary)
    return StaticDecode(model, attention, ops, max_running=MAX_RUNNING)


HOST, TOKENS = ("host", "per-layer"), ("host", "token-major")
GPU, GPU_TOKENS = ("cuda", "per-layer"), ("cuda", "token-major")
# Where chunks lie says nothing of what is computed: the slow ones need not meet each place.
CASES = [
    *((gathered, place) for place in (HOST, TOKENS, GPU, GPU_TOKENS)),
    *((static_torch, place) for place in (HOST, TOKENS, GPU, GPU_TOKENS)),
    (static_torch_as_captured, TOKENS),
    # Triton's interpreter takes seconds for each.
    *(
        pytest.param((static_triton, place), marks=pytest.mark.extended)
        for place in (HOST, GPU_TOKENS)
    ),
]


@pytest.fixture(params=CASES, ids=lambda case: "-".join((case[0].__name__, *case[1])))
def bench(request, tmp_path) -> Iterator[Callable[..., DecodeBench]]:
    decoder, (driver, layout) = request.param
    if decoder is static_triton:
        pytest.importorskip("triton")  # interpreted: see conftest.py
    if driver == "cuda":
        request.getfixturevalue("cuda_standin")
    made = []

    def make(**overrides: object) -> DecodeBench:
        reference = save_random_llama(tmp_path, **overrides)
        one = DecodeBench(tmp_path, driver=driver, layout=layout)
        one.reference = reference
        one.decoder = decoder(one.model)
        made.append(one)
        return one

    yield make
    for one in made:
        one.close()


class Run:
    """A request as the test sees it: a prompt, how much follows, and when it joins."""

    def __init__(self, joins: int, n_prompt: int, n_new: int) -> None:
        draw = random.Random(n_prompt)
        self.joins, self.n_new = joins, n_new
        self.prompt = [draw.randrange(256) for _ in range(n_prompt)]
        self.tokens: list[int] = []
        self.request = None

    def join(self, bench: DecodeBench) -> None:
        kv = bench.sequence(len(self.prompt) + self.n_new)
        if len(self.prompt) > 1:
            bench.model.prefill(self.prompt[:-1], kv)
        self.request = bench.request(self.prompt, kv)

    def take(self, token: int) -> None:
        self.tokens.append(token)
        self.request.tokens.append(token)


def generated(reference, run: Run) -> list[int]:
    """Return what transformers' own generate() says."""
    found = reference.generate(
        torch.tensor([run.prompt]),
        attention_mask=torch.ones(1, len(run.prompt), dtype=torch.int64),
        max_new_tokens=run.n_new,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return found[0, len(run.prompt) :].tolist()


@torch.inference_mode()
def test_requests_that_join_and_leave_get_the_tokens_that_transformers_generates(bench):
    one = bench(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    # A batch of 1, 2, 3, 4, 5 and down again; contexts within a page, at its end, and over blocks.
    runs = [Run(0, 130, 9), Run(1, 16, 4), Run(2, 1, 7), Run(3, 33, 3), Run(4, 63, 4)]
    running: list[Run] = []
    for step in range(13):
        for run in runs:
            if run.joins == step:
                run.join(one)
                running.append(run)
        if not running:
            break
        running.reverse()  # rows change hands even when nobody comes or goes
        tokens = one.decoder.step([run.request for run in running])
        for run, token in zip(running, tokens, strict=True):
            run.take(token)
        for run in [run for run in running if len(run.tokens) == run.n_new]:
            running.remove(run)
            one.give_back(run.request.kv)
    assert {len(run.tokens) for run in runs} == {9, 4, 7, 3}
    for run in runs:
        assert run.tokens == generated(one.reference, run)


@torch.inference_mode()
def test_logits_equal_those_of_transformers(bench):
    one = bench(tie_word_embeddings=False, num_key_value_heads=2, head_dim=24)
    prompts = [[7, 1, 200, 4, 90], [3] * 40]
    kvs = [one.sequence(60) for _ in prompts]
    for prompt, kv in zip(prompts, kvs, strict=True):
        one.model.prefill(prompt[:-1], kv)
    distances = LogitDistances(one.reference)
    for token in range(2):
        found = one.decode([prompt[-1] for prompt in prompts], kvs)
        for logits, prompt in zip(found, prompts, strict=True):
            distances.add(prompt, [logits])
            prompt.append(token)
    assert distances.equal


@torch.inference_mode()
def test_a_sampled_request_gets_the_same_tokens_beside_others_as_alone(bench):
    one = bench(num_hidden_layers=1)

    def sampled(beside: int) -> list[int]:
        prompt, kv = [5, 6, 7], one.sequence(20)
        one.model.prefill(prompt[:-1], kv)
        request = one.request(prompt, kv, temperature=1.3, top_p=0.9, seed=11)
        others = [one.request([9], one.sequence(20)) for _ in range(beside)]
        tokens = []
        for _ in range(4):
            batch = [*others, request]
            for member, token in zip(batch, one.decoder.step(batch), strict=True):
                member.tokens.append(token)
            tokens.append(request.tokens[-1])
        return tokens

    alone, beside = sampled(0), sampled(2)
    assert alone == beside
    assert len(set(alone)) > 1
