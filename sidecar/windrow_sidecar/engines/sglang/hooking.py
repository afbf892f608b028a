"""Put hooks around methods of SGLang's classes.

SGLang's own registry looks through every loaded module for each hook, since somebody may hold a
function by another name: 0.05 s of the start each. All of these are methods, which are looked up on
their class at each call, so they are wrapped there; the registry carries the one hook by which the
plugin comes in (`plugin.register`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
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
    """Hook the methods of these dotted names; all of them, or none.

    Hooks get what SGLang's registry gives them: `around` the method and its arguments; `before` the
    arguments, and may return others as (args, kwargs); `after` the result and the arguments, and
    may return another result. None leaves things as they are.

    Raises:
        InvariantBroken: one of them is not a plain method of a class.
    """
    wrapped = []
    for hooks, wrap in ((around, _around), (before, _before), (after, _after)):
        for path, hook in hooks.items():
            owner, name = _method(path)
            wrapped.append((owner, name, wrap(getattr(owner, name), hook)))
    for owner, name, method in wrapped:
        setattr(owner, name, method)


def _method(path: str) -> tuple[type, str]:
    parent, _, name = path.rpartition(".")
    owner = resolve_name(parent)
    if not inspect.isclass(owner) or not inspect.isfunction(inspect.getattr_static(owner, name)):
        raise InvariantBroken(f"{path} is not a plain method of a class of SGLang")
    return owner, name


def _around(method: Hook, hook: Hook) -> Hook:
    @functools.wraps(method)
    def hooked(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return hook(method, *args, **kwargs)

    return hooked


def _before(method: Hook, hook: Hook) -> Hook:
    @functools.wraps(method)
    def hooked(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        others = hook(*args, **kwargs)
        if others is not None:
            args, kwargs = others
        return method(*args, **kwargs)

    return hooked


def _after(method: Hook, hook: Hook) -> Hook:
    @functools.wraps(method)
    def hooked(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        result = method(*args, **kwargs)
        other = hook(result, *args, **kwargs)
        return result if other is None else other

    return hooked
