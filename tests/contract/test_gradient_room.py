"""The place of a layer's gradients is written again only when nobody reads what is there."""

from __future__ import annotations

import torch
from torch import nn

from windrow_sidecar.finetune.adapter.gradient_room import GradientRoom


def test_gradients_are_parts_of_one_memory_in_their_order():
    learns = [nn.Parameter(torch.zeros(shape)) for shape in ((2, 3), (4,), (1, 5))]
    room = GradientRoom(learns)
    room.flat.copy_(torch.arange(15.0))
    room.hand_over()
    assert [tuple(p.grad.shape) for p in learns] == [(2, 3), (4,), (1, 5)]
    assert torch.equal(torch.cat([p.grad.flatten() for p in learns]), room.flat)


def test_a_gradient_that_somebody_holds_keeps_the_place_occupied():
    learns = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    room = GradientRoom(learns)
    for _ in range(2):  # again and again
        assert room.is_free
        room.hand_over()
        held, part = learns[1].grad, learns[0].grad[1:]
        for parameter in learns:
            parameter.grad = None
        assert not room.is_free
        del held
        assert not room.is_free, "a view of a gradient is a reader too"
        del part
        assert room.is_free
