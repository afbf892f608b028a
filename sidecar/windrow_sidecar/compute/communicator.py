"""Collectives of the ranks that train together, and their places in an autograd graph.

Megatron's two operators (Shoeybi et al. 2019, section 3): what enters column-parallel layers is
passed on and its gradients are summed; what leaves a row-parallel layer is summed and its gradient
is passed on. All ranks call the same collectives in the same order; each call blocks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from windrow_sidecar.compute.rank_sockets import RankSockets


class Communicator:
    """Collectives of one group of ranks: gloo on a host, NCCL on GPUs.

    Attributes:
        rank: of this process, from 0.
        ranks: how many there are.
    """

    def __init__(self, rank: int, ranks: int, device: torch.device) -> None:
        """Take the default group of torch.distributed (see `joined`)."""
        self.rank, self.ranks, self.device = rank, ranks, device

    @classmethod
    def joined(
        cls,
        rendezvous: Path,
        rank: int,
        ranks: int,
        *,
        device: torch.device,
        late_after_s: float,
    ) -> Communicator:
        """Join the group whose ranks meet in a file; return once all have come.

        They are on one machine and talk over its loopback (and NVLink), so nothing of them can be
        reached from a network; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name another interface.
        On a host nobody but the ranks is connected to one (see `RankSockets`).

        Args:
            rendezvous: the file, in a folder that only this user may read. It need not exist, and
                may go once this has returned.
            rank: of this process.
            ranks: how many there are.
            device: on which tensors are.
            late_after_s: a collective that takes longer fails.

        Raises:
            RuntimeError: not all have come in that time, or another process is connected to one.
        """
        sockets = RankSockets()
        store = dist.FileStore(str(rendezvous), ranks)  # type: ignore[attr-defined]
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=late_after_s),
        )
        joined = cls(rank, ranks, device)
        joined.sum(torch.zeros(1, device=device))  # every rank has come out of the line above
        if device.type == "cpu":
            sockets.check(store, rank, ranks)
            sockets.refuse_further()
            joined.sum(torch.zeros(1))  # every rank has read what the others said in the file
        return joined

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` [...] over the ranks, in place; every rank gets the same bits."""
        dist.all_reduce(tensor)
        return tensor

    def largest(self, tensor: Tensor) -> Tensor:
        """Take the largest of the ranks' values for each of `tensor` [...], in place."""
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor

    def gathered(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors [...] of all ranks on rank 0, in their order; elsewhere none.

        All have one shape and dtype.
        """
        mine = tensor.contiguous()
        into = [torch.empty_like(mine) for _ in range(self.ranks)] if self.rank == 0 else None
        dist.gather(mine, into, dst=0)
        return into or []

    def from_first(self, tensor: Tensor) -> Tensor:
        """Overwrite `tensor` [...] with that of rank 0, which has its shape and dtype."""
        dist.broadcast(tensor, src=0)
        return tensor

    def into_layers(self, x: Tensor) -> Tensor:
        """Return `x` [...]; the ranks' gradients of it are summed in backward."""
        passed: Tensor = _SumGradients.apply(x, self)
        return passed

    def out_of_layers(self, partial: Tensor) -> Tensor:
        """Return the sum of the ranks' `partial` [...], which is overwritten by it."""
        summed: Tensor = _Sum.apply(partial, self)
        return summed


class _SumGradients(torch.autograd.Function):
    """Identity forward, sum over the ranks backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Communicator) -> Tensor:  # noqa: ANN401
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        # Others may read the gradient that comes in.
        return ctx.ranks.sum(gradient.clone(memory_format=torch.contiguous_format)), None


class _Sum(torch.autograd.Function):
    """Sum over the ranks forward, in place; identity backward."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, ranks: Communicator) -> Tensor:  # noqa: ANN401
        ctx.mark_dirty(partial)
        return ranks.sum(partial)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return gradient, None


def flat(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the values of all tensors [...] in one, [values], in new memory of that type."""
    return torch.cat([tensor.detach().reshape(-1).to(dtype) for tensor in tensors])


def unflat(values: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return [values] as tensors of the shapes [...] of `like`: views."""
    parts = torch.split(values, [tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]
