"""AdamW over flat memory takes torch's own steps, in a few calls, and resumes what lay apart."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from windrow.crd import OptimizerSpec
from windrow_sidecar.finetune.training.optimizer import AdapterOptimizer, Schedule
from windrow_sidecar.testing.rounding import apart, in_float64

pytestmark = pytest.mark.usefixtures("one_thread")

# None is a multiple of 64, and one is empty: a rank that has no words.
SHAPES = ((3, 5), (7,), (2, 33), (0, 4), (1,))
SPEC = OptimizerSpec(weight_decay=0.1, max_gradient_norm=0.05)
RATE = 1e-2


def parameters(shapes=SHAPES):
    draw = torch.Generator().manual_seed(5)
    return {
        f"p{n}": nn.Parameter(torch.randn(shape, generator=draw, dtype=torch.float64))
        for n, shape in enumerate(shapes)
    }


def gradients(step, given):
    draw = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=draw, dtype=p.dtype) for p in given.values()]


def ours_of(given):
    return AdapterOptimizer(given, Schedule("constant", RATE, 100, 0.0), SPEC)


def torchs_of(given):
    betas = (SPEC.beta1, SPEC.beta2)
    return torch.optim.AdamW(given.values(), lr=RATE, betas=betas, weight_decay=SPEC.weight_decay)


def our_step(made, given, step, parts=2):
    """Take a step whose gradient comes in parts."""
    for _ in range(parts):
        for parameter, gradient in zip(given.values(), gradients(step, given), strict=True):
            parameter.grad = gradient / parts
        made.commit()
    made.step(step)


def torchs_step(made, given, step):
    for parameter, gradient in zip(given.values(), gradients(step, given), strict=True):
        parameter.grad = gradient
    nn.utils.clip_grad_norm_(given.values(), SPEC.max_gradient_norm)
    made.step()


def values(given):
    return {name: parameter.detach() for name, parameter in given.items() if parameter.numel()}


def test_steps_are_those_of_torch_and_parameters_stay_the_same_objects():
    with in_float64():
        ours, theirs = parameters(), parameters()
        known = {name: id(parameter) for name, parameter in ours.items()}
        made, reference = ours_of(ours), torchs_of(theirs)
        assert {name: id(parameter) for name, parameter in made.parameters.items()} == known
        for step in range(4):
            version = ours["p0"]._version
            our_step(made, ours, step)
            torchs_step(reference, theirs, step)
            assert ours["p0"]._version > version
    assert apart(values(ours), values(theirs)).by_rounding


def test_a_checkpoint_of_parameters_that_lay_apart_is_resumed():
    with in_float64():
        ours, theirs = parameters(), parameters()
        reference = torchs_of(theirs)
        for step in range(2):
            torchs_step(reference, theirs, step)
        held = {f"parameter/{name}": p.detach().clone() for name, p in theirs.items()}
        for name, parameter in theirs.items():
            for key, value in reference.state[parameter].items():
                held[f"state/{key}/{name}"] = value.clone()
            held[f"sum/{name}"] = gradients(2, theirs)[list(theirs).index(name)]
        made = ours_of(ours)
        made.load(held)
        again = made.tensors()
        assert again.keys() == held.keys()
        assert all(torch.equal(again[name], tensor) for name, tensor in held.items())
        made.step(2)  # over the sum that was in the checkpoint
        torchs_step(reference, theirs, 2)
        our_step(made, ours, 3)
        torchs_step(reference, theirs, 3)
    assert apart(values(ours), values(theirs)).by_rounding


def test_a_checkpoint_whose_parameters_have_taken_different_steps_is_refused():
    with in_float64():
        ours = parameters()
        made = ours_of(ours)
        our_step(made, ours, 0)
        held = {name: tensor.clone() for name, tensor in made.tensors().items()}
        held["state/step/p1"] += 1
        with pytest.raises(RuntimeError, match="differs between parameters"):
            made.load(held)


def test_what_moves_keeps_values_moments_and_sums():
    def elsewhere(tensor):
        return tensor.clone()

    with in_float64():
        ours, theirs = parameters(), parameters()
        made, reference = ours_of(ours), ours_of(theirs)
        our_step(made, ours, 0)
        our_step(reference, theirs, 0)
        for parameter, gradient in zip(ours.values(), gradients(1, ours), strict=True):
            parameter.grad = gradient
        made.commit()
        made.move(elsewhere)
        made.step(1)
        our_step(reference, theirs, 1, parts=1)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


class Calls(TorchDispatchMode):
    """Counts the calls that compute, which a GPU is given."""

    def __init__(self):
        super().__init__()
        self.of = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if str(function).startswith("aten.") and not function.is_view:
            self.of.append(str(function))
        return function(*args, **(kwargs or {}))


def test_a_step_takes_as_many_calls_whatever_the_number_of_parameters():
    counts = []
    for number in (1, 448):  # of a Llama 3 8B with all linear layers adapted
        given = {
            n: nn.Parameter(p.detach().float()) for n, p in parameters(((4,),) * number).items()
        }
        made = ours_of(given)
        our_step(made, given, 0)
        for parameter, gradient in zip(given.values(), gradients(1, given), strict=True):
            parameter.grad = gradient
        made.commit()
        with Calls() as calls:
            made.step(1)
        counts.append(len(calls.of))
    # Norm, its root, clipping, the count of steps and AdamW; the host reads the norm.
    assert counts[0] == counts[1] <= 10, calls.of
