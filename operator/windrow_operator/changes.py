"""What has changed since somebody last looked, so that nobody has to look at everything."""

from __future__ import annotations

import itertools
from collections.abc import Iterable


class Changes:
    """Keys of what has changed, once for each reader, in the order of their first change.

    Args:
        readers: who takes them, each at a time of its own.
    """

    def __init__(self, *readers: str) -> None:
        self._changed: dict[str, dict[str, None]] = {reader: {} for reader in readers}

    def mark(self, key: str) -> None:
        """Note that what `key` names has changed."""
        for keys in self._changed.values():
            keys[key] = None

    def mark_all(self, keys: Iterable[str]) -> None:
        """Note that each of `keys` has changed."""
        new = dict.fromkeys(keys)
        for changed in self._changed.values():
            changed.update(new)

    def waits(self, reader: str) -> bool:
        """Return whether something has changed since `reader` last asked."""
        return bool(self._changed[reader])

    def take(self, reader: str, at_most: int | None = None) -> list[str]:
        """Return what has changed since `reader` last asked, or so much of it."""
        changed = self._changed[reader]
        taken = list(itertools.islice(changed, at_most))
        for key in taken:
            del changed[key]
        return taken
