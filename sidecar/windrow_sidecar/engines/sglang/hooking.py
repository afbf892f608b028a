"""Install hooks through SGLang's own registry, and check that they are in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any

from windrow.errors import InvariantBroken

Hook = Callable[..., Any]


def put(
    *,
    around: Mapping[str, Hook],
    before: Mapping[str, Hook],
    after: Mapping[str, Hook],
) -> None:
    """Hook the functions of these dotted names.

    Raises:
        InvariantBroken: SGLang's registry has left one of them as it was.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    kinds: Sequence[tuple[Mapping[str, Hook], Any]] = (
        (around, HookType.AROUND),
        (before, HookType.BEFORE),
        (after, HookType.AFTER),
    )
    stock = {path: resolve_name(path) for hooks, _ in kinds for path in hooks}
    for hooks, kind in kinds:
        for path, hook in hooks.items():
            HookRegistry.register(path, hook, kind)
    HookRegistry.apply_hooks()
    missing = [path for path, found in stock.items() if resolve_name(path) is found]
    if missing:
        raise InvariantBroken(f"SGLang did not take the hooks on {', '.join(missing)}")
