"""Keep collections of Python's heap short, and away from imports."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Import without collections: nearly all that modules make stays.

    Collections take a fifth of the CPU time of importing torch, transformers and peft. Where the
    collector was on, it is on again afterwards, and leaves alone what is there by then.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.freeze()
            gc.enable()


def settle_heap() -> None:
    """Collect once, then take what is left as there to stay, until the process ends.

    Libraries and models make a million objects. A full collection that walks them takes 100 to
    220 ms, and comes where it will: in the middle of a tasklet that decode waits for. To be called
    where a job has been loaded or has ended.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    # What is frozen as the interpreter ends is never freed, and Triton's module writes a page about
    # leaks of it to stderr.
    atexit.unregister(gc.unfreeze)
    atexit.register(gc.unfreeze)
