"""Cross-entropy of logits and its gradient, between the two products of a head.

On a GPU one kernel of Triton's writes the gradient where the logits were, so they are in memory
once. Elsewhere torch's operators run.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from windrow_sidecar.compute.kernel_launch import Kernel, kernel_of

# Each slice reads the head's weights twice: 512 rows of logits in bf16 are as much work for a
# Hopper GPU as reading them is, and 131 MB at 128,256 words.
LEAST_ROWS_OF_GPU = 512
# Logits of a slice, where so many rows of few words are more than that.
GPU_SLICE_ELEMENTS = 1 << 26
# Words of a program at a time; a block is the sum of eight warps' registers.
_BLOCK, _WARPS = 4096, 8


class CrossEntropyOfLogits:
    """Cross-entropy of logits that nobody needs afterwards, and its gradient, in their memory.

    Args:
        words: of the vocabulary.
        dtype: of the logits.
    """

    def __init__(self, words: int, dtype: torch.dtype) -> None:
        self._words, self._dtype = words, dtype
        self._kernels: dict[bool, Kernel] | None = None

    @property
    def fused(self) -> bool:
        """True where the kernel runs."""
        return self._kernels is not None

    def use_kernel(self) -> None:
        """Let a kernel of Triton's compute it.

        Raises:
            ImportError: Triton is not installed.
        """
        import triton
        import triton.language as tl

        from windrow_sidecar.finetune.model import loss_kernels

        sizes = {
            "WORDS": self._words,
            "BLOCK": min(_BLOCK, max(16, triton.next_power_of_2(self._words))),
            "WIDE": tl.float64 if wide_type(self._dtype) == torch.float64 else tl.float32,
        }
        self._kernels = {
            learns: kernel_of(loss_kernels.cross_entropy, _WARPS, LEARNS=learns, **sizes)
            for learns in (True, False)
        }

    def fuse(self, logits: Tensor) -> str:
        """Use the kernel where it runs and computes what torch's operators compute.

        Args:
            logits: to compare on, [tokens, words].

        Returns:
            why it is not used; "": it is.
        """
        if logits.device.type != "cuda":
            return "the head is not on a GPU"
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed"
        try:
            why = self._differs(logits)
        except Exception as error:  # noqa: BLE001 - of a compiler, a driver, a library of some version
            why = f"it does not run ({type(error).__name__}: {error})"
        if why:
            self._kernels = None
        return why

    def _differs(self, logits: Tensor) -> str:
        labels = torch.arange(len(logits), device=logits.device)
        labels[-1] = -1
        expected = self._taken(logits, labels)
        self.use_kernel()
        tolerance = torch.finfo(logits.dtype).eps ** 0.5
        for ours, theirs in zip(self._taken(logits, labels), expected, strict=True):
            largest = max(float(theirs.abs().max()), 1e-30)
            if not torch.allclose(ours, theirs, rtol=0.0, atol=tolerance * largest):
                return "it gives another result than torch's operators"
        return ""

    def _taken(self, logits: Tensor, labels: Tensor) -> list[Tensor]:
        """Return losses and gradient, and the losses of what does not learn."""
        losses, gradient = self.take(logits.clone(), labels, 0.5)
        return [losses, gradient, self.take(logits.clone(), labels, None)[0]]

    def take(self, logits: Tensor, labels: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
        """Return (the loss of each token, [tokens], the gradient of their scaled sum).

        The latter is that at the logits, [tokens, words], in their type, and in their memory where
        the kernel runs.

        Args:
            logits: [tokens, words]. What is in them afterwards is not said.
            labels: int64 [tokens], on the same device; below 0: the token has no loss.
            scale: by which the sum of the losses counts; None: there is no gradient.
        """
        logits = logits.detach()
        losses = logits.new_empty(len(logits), dtype=wide_type(logits.dtype))
        if self._kernels is None:
            return losses, by_torch(logits, labels, losses, scale)
        kernel, programs = self._kernels[scale is not None], (len(logits), 1, 1)
        kernel(programs, (logits, labels, losses), (), (scale or 0.0,))
        return losses, logits


def by_torch(logits: Tensor, labels: Tensor, losses: Tensor, scale: float | None) -> Tensor:
    """Write the losses; return the gradient of their scaled sum at the logits, in their type.

    Args:
        logits: [tokens, words].
        labels: int64 [tokens]; below 0: no loss, and a gradient of zero.
        losses: [tokens] in a wide type, written.
        scale: of the gradient; None: the result is not used.
    """
    powers = torch.log_softmax(logits, 1, dtype=losses.dtype)
    counts, at = labels >= 0, labels.clamp_min(0)[:, None]
    losses.copy_(torch.where(counts, -powers.gather(1, at)[:, 0], 0.0))
    if scale is None:
        return powers
    shares = counts.to(losses.dtype)[:, None] * scale
    powers.exp_().mul_(shares).scatter_add_(1, at, -shares)
    return powers.to(logits.dtype)


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type of sums over values of a type."""
    return torch.promote_types(dtype, torch.float32)


def rows_of_slice(words: int, elements: int, device: torch.device, *, fused: bool) -> int:
    """Return how many tokens' logits are in memory at a time.

    Args:
        words: of the vocabulary.
        elements: of a slice where logits are not made in place on a GPU.
        device: where they are.
        fused: whether the kernel runs.
    """
    if fused and device.type == "cuda":
        most = GPU_SLICE_ELEMENTS // words
        # Slices of labels begin at multiples of 16 bytes.
        return max(LEAST_ROWS_OF_GPU, most - most % 16)
    return max(1, elements // words)
