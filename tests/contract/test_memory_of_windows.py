"""Bytes counted of a step against those that live while it runs: in windows, and not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.examplejob import MODEL, example_job
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from benchmarks.activations import LiveBytes
from windrow.crd.adapter import AdapterSpec
from windrow_sidecar.finetune.engine.orders import ORDERS
from windrow_sidecar.finetune.engine.sizing import WholeRows, Windows
from windrow_sidecar.finetune.job.assembly import TaskletRuntime, TrainingSession, open_session
from windrow_sidecar.finetune.model.boundaries import TorchBoundaries
from windrow_sidecar.finetune.model.loading import BaseModel, load_base
from windrow_sidecar.finetune.tasklets import MicroLimits

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, HEADS = 128, 8
# Never less is counted than lives, and at most a fifth more: where rows may be cut they may also
# run whole, so both the whole row's graph and the caches of windows count.
MOST_OVER = 1.2


@pytest.fixture(scope="module")
def tokenizer():
    return load_base(MODEL).tokenizer


@pytest.fixture
def session(tmp_path: Path, tokenizer):
    """Opens a job over a small random model."""

    def opened(
        *,
        window: int,
        kv_heads: int = 2,
        order: str = "layer-major",
        micro_batches: int = 1,
        adapter: Mapping[str, Any] | None = None,
        experts: int = 0,
    ) -> TrainingSession:
        sizes: dict[str, Any] = {
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 344,
            "num_hidden_layers": 3,
            "num_attention_heads": HEADS,
            "num_key_value_heads": kv_heads,
            "max_position_embeddings": 256,
        }
        torch.manual_seed(0)
        if experts:
            config = MixtralConfig(**sizes, num_local_experts=experts)
            model = MixtralForCausalLM(config)
        else:
            config = LlamaConfig(**sizes)
            model = LlamaForCausalLM(config)
        base = BaseModel(model.eval().requires_grad_(False), config, tokenizer, shared=False)
        job = example_job(tmp_path, maxSequenceLength=WIDTH)
        adapter = adapter or {"lora": {"rank": 4, "alpha": 8}}
        spec = job.spec.model_copy(update={"adapter": AdapterSpec.model_validate(adapter)})
        sizing = Windows(window) if window else WholeRows()
        return open_session(
            replace(job, spec=spec),
            base,
            TaskletRuntime(
                TorchBoundaries(),
                lambda: MicroLimits(2 * WIDTH, micro_batches=micro_batches),
                sizing=lambda: sizing,
                windows=window > 0,
                order=ORDERS[order],
            ),
        )

    return opened


def most_held(session: TrainingSession) -> tuple[int, int]:
    """Run one group; returns (bytes counted for it, most that lived between two tasklets)."""
    stream = session.stream
    assert stream.peek() is not None
    counted = session.activation_budget.peak_bytes(stream.tokens_to_begin)
    most = 0
    with LiveBytes() as live:
        while (tasklet := stream.peek()) is not None:
            stream.run(tasklet)
            most = max(most, live.now)
            if stream.between_micro_batches:
                break
    return counted, most


@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize("window", [16, 50, WIDTH - 1])
def test_what_is_counted_of_windows_is_what_lives(session, window, kv_heads):
    counted, most = most_held(session(window=window, kv_heads=kv_heads))
    assert most <= counted <= MOST_OVER * most


@pytest.mark.parametrize("order", ["token-major", "interleaved"])
def test_of_several_micro_batches_on_their_way_all_are_counted(session, order):
    counted, most = most_held(session(window=40, order=order, micro_batches=2))
    assert most <= counted <= MOST_OVER * most


@pytest.mark.parametrize("window", [0, 40])
def test_what_an_adapters_dropout_makes_is_counted(session, window):
    dropping = {"lora": {"rank": 4, "alpha": 8, "dropout": 0.1}}
    counted, most = most_held(session(window=window, adapter=dropping))
    assert most <= counted <= MOST_OVER * most


def test_behind_a_prefix_whole_rows_have_their_caches_counted(session):
    prefix = {"type": "prefix", "prefix": {"virtualTokens": 8}}
    counted, most = most_held(session(window=0, adapter=prefix))
    assert most <= counted


def test_experts_that_cannot_be_told_on_paper_are_counted(session):
    counted, most = most_held(session(window=0, experts=4))
    # How many tokens an expert gets differs from row to row.
    assert 0.8 * most <= counted <= 1.25 * most


def test_keys_and_values_of_fewer_heads_count_less(session):
    parts = [session(window=40, kv_heads=n).activation_budget.parts(1000) for n in (HEADS, 2)]
    for part in ("key_values", "key_value_sums"):
        assert parts[0][part] == HEADS // 2 * parts[1][part] > 0
    # K and V of 2 heads of 16 in fp32, in 3 layers; sums are those of one.
    assert parts[1]["key_values"] == 1000 * 3 * 2 * 2 * 16 * 4
    assert parts[1]["key_value_sums"] == 1000 * 2 * 2 * 16 * 4
    assert session(window=0).activation_budget.parts(1000)["key_values"] == 0
