"""Dropout of embeddings that drops the same units however a step is cut into tasklets.

A model that drops units of its embeddings uses torch's random numbers, where a resumed or repeated
step would draw others. Here a unit's fate is the token's (see `windows.dropout`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from windrow.errors import UserError
from windrow_sidecar.finetune.model.around import NOTHING
from windrow_sidecar.finetune.model.structure import in_mode, unsupported
from windrow_sidecar.finetune.model.token_dropout import DropoutKeys, masked
from windrow_sidecar.finetune.tasklets import TokenWindow


def by_token(keys: DropoutKeys | None) -> AbstractContextManager[Any]:
    """Draw the masks of embedding dropouts by token inside; None: as torch draws them."""
    return NOTHING if keys is None else _ByToken(keys)


def drops_embeddings(model: nn.Module, embed: Callable[[], Tensor]) -> bool:
    """Return whether the model applies dropout ahead of its first layer.

    Args:
        model: asked in training mode; afterwards as it was.
        embed: lets it embed one row, all layers listening: [1, tokens, hidden].

    Raises:
        UserError: what it does at random there cannot be made to go by tokens.
    """
    keys = DropoutKeys()
    made: list[Tensor] = []
    with in_mode(model, training=True), torch.random.fork_rng(devices=[]):
        for seed in (1, 2):
            torch.manual_seed(seed)
            try:
                with _Trial(keys) as trial:
                    made.append(embed())
            except UserError as error:
                raise unsupported(
                    model,
                    "it leaves out layers at random while it trains",
                    "Set layerdrop to 0 in its config.json.",
                ) from error
    if not torch.equal(*made):
        raise unsupported(
            model,
            "it changes what its first layer reads at random while it trains, not by a dropout",
            "Turn that off in its config.json.",
        )
    return bool(trial.drops)


class _ByToken(TorchFunctionMode):
    """Replacement of torch's dropout functions; the n-th call draws as module -n."""

    def __init__(self, keys: DropoutKeys) -> None:
        super().__init__()
        self._keys, self.drops = keys, 0

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        if func is not functional.dropout:
            return func(*args, **kwargs)
        return self._drop(*args, **kwargs)

    def _drop(
        self,
        input: Tensor,  # noqa: A002 - torch's own name
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Tensor:
        """Take the arguments of `torch.nn.functional.dropout`."""
        del inplace
        if not training or p == 0:
            return input
        self.drops += 1
        return self._masked(input, p)

    def _masked(self, x: Tensor, p: float) -> Tensor:
        return masked(x, self._keys.tokens(x.device), -self.drops, p)


class _Trial(_ByToken):
    """The same on a probe; it raises where masks cannot be drawn by token.

    Layers that are left out at random are left out for certain.
    """

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        made = super().__torch_function__(func, types, args, kwargs)
        return torch.zeros_like(made) if func is torch.rand else made

    def _masked(self, x: Tensor, p: float) -> Tensor:
        if x.dim() != 3:
            raise ValueError(f"a dropout ahead of its layers takes {tuple(x.shape)}")
        self._keys.at(0, 0, range(x.shape[0]), TokenWindow(0, x.shape[1]))
        return super()._masked(x, p)
