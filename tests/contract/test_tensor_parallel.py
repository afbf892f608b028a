"""A model cut over ranks learns what peft learns on one device, to rounding, in float64.

Ranks are forked processes that meet by gloo; one start of them serves several tests.
"""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from windrow.errors import UserError
from windrow_sidecar.compute.communicator import Communicator
from windrow_sidecar.engines.shard_cuts import BY_COLUMNS, ShardSizes
from windrow_sidecar.finetune.adapter.adapters import ADAPTER, add_adapter, trainable
from windrow_sidecar.finetune.engine.stages import StepDone
from windrow_sidecar.finetune.tensor_parallel.adapter import AdapterParts, RanksApart, check_adapter
from windrow_sidecar.finetune.tensor_parallel.cross_entropy import VocabularyCrossEntropy
from windrow_sidecar.finetune.tensor_parallel.placements import (
    CHOSEN,
    AdapterPlacement,
    Held,
    WeightCut,
)
from windrow_sidecar.finetune.tensor_parallel.shard import sharded, stand_in
from windrow_sidecar.qos.view import Phase
from windrow_sidecar.testing.architectures import random_model
from windrow_sidecar.testing.equality import (
    Cut,
    pefts_gradients,
    pefts_training,
    small_rows,
    small_spec,
    stream_of,
    training_of,
    tuned_model,
)
from windrow_sidecar.testing.ranks import on_ranks, shard_of
from windrow_sidecar.testing.rounding import apart, in_type_of

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class Case:
    architecture: str
    adapter: dict
    cut: Cut = field(default_factory=Cut)


LORA = {"rank": 4, "alpha": 8}
COLUMN_PARALLEL = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
# The models have 4 heads, 2 key-value heads and 96 words: over 4 ranks each key-value head is on
# two of them, and of 128 padded words the last rank has padding alone.
CASES = {
    "all linear layers": Case("Qwen3", {"lora": {**LORA, "dropout": 0.3}}, Cut(max_tokens=64)),
    "attention": Case("Llama", {"lora": {**LORA, "targetModules": "q_proj,k_proj,v_proj,o_proj"}}),
    "MLP, biases in the base": Case(
        "Qwen2", {"lora": {**LORA, "targetModules": "gate_proj,up_proj,down_proj"}}
    ),
    "(IA)3, rows in one line": Case("Llama", {"type": "ia3"}, Cut(packed=True)),
    "some keys, a sliding window": Case(
        "Mistral",
        {"lora": {**LORA, "targetModules": "k_proj,down_proj", "rankPattern": {"k_proj": 2}}},
    ),
}


@pytest.fixture(scope="module")
def references():
    """Return by case: the whole base, the whole adapter, and what peft makes of them."""
    found = {}
    for name, case in CASES.items():
        base = random_model(case.architecture).double()
        tuned = tuned_model(copy.deepcopy(base), small_spec(case.adapter))
        found[name] = (
            base,
            {n: p.detach().clone() for n, p in trainable(tuned).items()},
            pefts_gradients(tuned, small_rows()),
            pefts_training(tuned, small_rows()),
        )
    return found


def train(case, base, values, ranks):
    """Train five steps; return the first gradients, and what `our_training` returns."""
    sharding, tuned, parts = shard_of(base, case.adapter, values, ranks)
    steps, first = [], None
    with in_type_of(tuned):
        stream = stream_of(tuned, small_rows(), case.cut, sharded=(sharding, parts))
        while (tasklet := stream.peek()) is not None:
            if first is None and tasklet.phase is Phase.OPTIMIZER:
                first = parts.assemble(stream.tensors())
            if isinstance(done := stream.run(tasklet), StepDone):
                steps.append(done)
        found = parts.assemble(stream.tensors())
    sums = {n.removeprefix("sum/"): t for n, t in first.items() if n.startswith("sum/")}
    own = {name: p.detach() for name, p in trainable(tuned).items()}
    taken = parts.taken(found) if found else {}
    return {
        "first": sums,
        "held": training_of(found, steps),
        "whole matrices": {n: own[n] for n in own if parts.part(n).dim is None},
        "taken back": all(torch.equal(taken[f"parameter/{n}"], own[n]) for n in own if taken),
        "elements": sum(p.numel() for p in tuned.parameters()),
    }


def cross_entropy(ranks):
    """Losses and gradients by the ranks' own words, and by torch on all of them."""
    draw = torch.Generator().manual_seed(7)
    logits = 30 * torch.randn(9, 96, generator=draw, dtype=torch.float64)
    labels = torch.randint(0, 96, (9,), generator=draw)
    weights = torch.rand(9, generator=draw, dtype=torch.float64)
    sizes = ShardSizes.of(random_model("Llama").config, ranks.ranks)
    begin, end = sizes.words_of(ranks.rank)
    padding = torch.full((9, sizes.words - (end - begin)), 1e6, dtype=torch.float64)
    mine = torch.cat([logits[:, begin:end], padding], dim=1).requires_grad_()
    whole = logits.clone().requires_grad_()
    ours = VocabularyCrossEntropy(ranks, (begin, end))(mine, labels, reduction="none")
    theirs = functional.cross_entropy(whole, labels, reduction="none")
    (ours * weights).sum().backward()
    (theirs * weights).sum().backward()
    return {
        "losses": apart({"": ours.detach()}, {"": theirs.detach()}).by_rounding,
        "of padding": float(mine.grad[:, end - begin :].abs().sum()),
        "gradient": (mine.grad[:, : end - begin], whole.grad[:, begin:end]),
    }


def listening():
    """Return the addresses at which this process listens, as the kernel writes them."""
    fds = [os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in fds:
                found.append(fields[1].partition(":")[0])
    return found


@pytest.fixture(scope="module", params=[2, 4])
def ranked(request, references):
    """(number of ranks, of each rank what it made of each case)."""

    def work(ranks):
        made = {name: train(case, *references[name][:2], ranks) for name, case in CASES.items()}
        fresh = shard_of(references["attention"][0], CASES["attention"].adapter, None, ranks)
        _, tuned, parts = fresh
        entry = next(n for n in trainable(tuned) if parts.part(n).dim is None)
        apart_by = {f"parameter/{entry}": trainable(tuned)[entry].detach() + ranks.rank}
        try:
            parts.assemble(apart_by)
            said = ""
        except RanksApart as error:
            said = str(error)
        return made | {
            "came apart": said,
            "listens": listening(),
            "cross-entropy": cross_entropy(ranks),
            "fresh": {n: p.detach() for n, p in trainable(fresh[2].whole).items()},
        }

    return request.param, on_ranks(request.param, work)


def of_case(ranked, name):
    """Return what each rank made of a case."""
    return [each[name] for each in ranked[1]]


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_a_cut_model_equal_those_of_peft_on_one_device(ranked, references, name):
    assert apart(of_case(ranked, name)[0]["first"], references[name][2]).by_rounding


@pytest.mark.parametrize("name", CASES)
def test_weights_moments_losses_and_norms_of_five_steps_equal_those_of_peft(
    ranked, references, name
):
    ours, theirs = of_case(ranked, name)[0]["held"], references[name][3]
    assert ours.keys() == theirs.keys()
    for kind in theirs:
        assert apart(ours[kind], theirs[kind]).by_rounding, kind


@pytest.mark.parametrize("name", CASES)
def test_matrices_that_are_whole_on_each_rank_stay_the_same_bits(ranked, name):
    first, *others = (made["whole matrices"] for made in of_case(ranked, name))
    for other in others:
        assert first.keys() == other.keys()
        assert all(torch.equal(first[n], other[n]) for n in first)


def test_matrices_of_two_ranks_that_have_come_apart_are_not_saved(ranked):
    first, *others = (made["came apart"] for made in ranked[1])
    assert first.startswith("ranks 0 and 1 have different values of parameter/")
    assert not any(others)


def test_ranks_listen_on_the_loopback_alone(ranked):
    addresses = [address for made in ranked[1] for address in made["listens"]]
    assert addresses
    assert set(addresses) == {"0100007F"}


def test_a_rank_takes_its_own_values_back_from_a_whole_checkpoint(ranked):
    assert all(made["taken back"] for made in of_case(ranked, "all linear layers"))


def test_a_rank_holds_its_share_of_the_base_and_no_more(ranked, references):
    ranks, made = ranked
    base = references["MLP, biases in the base"][0]
    whole = sum(p.numel() for p in base.parameters())
    sizes = ShardSizes.of(base.config, ranks)
    hidden, layers = base.config.hidden_size, base.config.num_hidden_layers
    # Beyond an Nth: norms and the adapter, the words' padding, and heads that are on two ranks.
    padding = 2 * (sizes.words - base.config.vocab_size // ranks) * hidden
    copied = (sizes.copies - 1) * 2 * sizes.head_units * (hidden + 1) * layers // sizes.copies
    adapters = layers * 4 * (2 * hidden + 2 * 48 + 48 + hidden)
    norms = (2 * layers + 1) * hidden
    for each in made:
        assert each["MLP, biases in the base"]["elements"] <= (
            whole / ranks + padding + copied + adapters + norms
        )


def test_an_adapter_begins_with_the_weights_that_it_has_on_one_device(ranked, references):
    case = CASES["attention"]
    alone = random_model(case.architecture).double()
    begun = trainable(add_adapter(alone, small_spec(case.adapter)))
    for made in ranked[1]:
        assert made["fresh"].keys() == begun.keys()
        assert all(torch.equal(made["fresh"][n], begun[n].double()) for n in begun)
    assert f"lora_A.{ADAPTER}" in next(iter(begun))


def test_cross_entropy_by_parts_of_the_vocabulary_is_that_of_all_of_it(ranked):
    for made in (each["cross-entropy"] for each in ranked[1]):
        ours, theirs = made["gradient"]
        assert made["losses"]
        assert made["of padding"] == 0.0
        # Of softmax: at most 96 terms of at most 1, each rounded a few times.
        assert torch.allclose(ours, theirs, rtol=0.0, atol=96 * 8 * 2.0**-53)


REFUSED = {
    "useDora": {"lora": {"useDora": True}},
    "modulesToSave": {"lora": {"modulesToSave": "norm"}},
    "bias": {"lora": {"bias": "all"}},
    "type": {"type": "prefix"},
}


@pytest.mark.parametrize(("option", "adapter"), REFUSED.items(), ids=REFUSED)
def test_what_is_not_trained_over_ranks_is_refused_by_its_field(option, adapter):
    with pytest.raises(UserError, match="is not trained over several ranks yet") as refused:
        check_adapter(small_spec(adapter))
    assert refused.value.field.endswith(option)


MODELS = {
    "experts": ("Qwen3Moe", {}, 2, "models of type 'qwen3_moe'"),
    "heads": ("Llama", {}, 3, "4 attention heads"),
    "inner units": ("Llama", {"intermediate_size": 49}, 2, "49 inner units"),
    "key-value heads": (
        "Llama",
        {"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 48},
        4,
        "6 key-value heads",
    ),
    "dropout": ("Llama", {"attention_dropout": 0.1}, 2, "drops units of its attention"),
}


@pytest.mark.parametrize(("kind", "options", "ranks", "why"), MODELS.values(), ids=MODELS)
def test_a_model_that_cannot_be_cut_evenly_is_refused(kind, options, ranks, why):
    with pytest.raises(UserError, match=why) as refused:
        ShardSizes.of(random_model(kind, **options).config, ranks)
    assert refused.value.remedy


@pytest.mark.parametrize("ranks", [2, 4])
def test_matrices_are_placed_where_the_enumeration_of_all_placements_says(ranks):
    """Compare what is built with the cheapest by `placements` (see `test_adapter_placements`)."""
    model = random_model("Llama")
    config, alone = model.config, Communicator(0, ranks, torch.device("cpu"))
    spec = small_spec({"lora": {"rank": 4, "alpha": 8}})
    tensors = {name: (lambda p=p: p) for name, p in model.named_parameters()}
    tuned = tuned_model(sharded(tensors, config, alone, torch.float32), spec)
    parts = AdapterParts(
        ShardSizes.of(config, ranks),
        alone,
        tuned,
        tuned_model(stand_in(config, torch.float32), spec),
    )
    held = {"lora_A": {None: Held.WHOLE, 0: Held.RANK, 1: Held.IN}}
    held["lora_B"] = {None: Held.WHOLE, 0: Held.OUT, 1: Held.RANK}
    found = {}
    for name in trainable(tuned):
        *_, module, matrix, _, _ = name.split(".")
        found.setdefault(module, {})[matrix] = held[matrix][parts.part(name).dim]
    assert found.keys() == {*BY_COLUMNS, *COLUMN_PARALLEL}
    for module, at in found.items():
        cut = WeightCut.ROW if module in BY_COLUMNS else WeightCut.COLUMN
        assert AdapterPlacement(at["lora_A"], at["lora_B"]) == CHOSEN[cut], module
