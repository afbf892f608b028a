"""Keep the process's pauses short and its memory small, with thousands of objects and streams.

Python's collector of cycles goes through every object now and then, and nothing else runs
meanwhile: with 1,000 sidecars 0.1 s, with 5,000 0.5 to 0.7 s, to be rid of a few hundred. So
automatic collection is off, and what has lived for a minute is set aside (`gc.freeze`), where it
passes it over. What is set aside still goes when nobody refers to it any more; only cycles stay, of
which ended streams leave some, and those that begin. So everything is collected again when many
streams have ended, a minute after many have come, and now and then.

glibc gives each of gRPC's threads a heap of its own, and what a stream allocates is spread over
them: a page of a heap stays as long as anything on it does. Of 5,000 streams that have ended two
heaps keep 370 MiB, and many 660. And once a large block was freed glibc takes the next ones from
the heaps, in between what stays; buffers of connections and listings are better mapped each.
"""

from __future__ import annotations

import ctypes
import gc

# Of the streams there were; then their cycles are worth a pause.
_ENDED = 0.1
_EVERYTHING_AFTER = 60  # calls
# Young objects are collected as ever, if more seldom; old ones when `collect` is called.
_THRESHOLDS = (5_000, 10, 1_000_000)
# Of mallopt(3): how many heaps all threads share, and the size, bytes, of a block mapped alone.
_M_ARENA_MAX, _HEAPS = -8, 2
_M_MMAP_THRESHOLD, _MAPPED = -3, 128 << 10
_YOUNG = 1  # and the generation before it: some ten thousand objects


class ProcessMemory:
    """Collects, sets aside, and hands back memory; receives the number of streams."""

    def __init__(self) -> None:
        self._streams, self._calls = 0, 0
        self._streams_seen, self._give_back = 0, 0  # when many had moved; so many times from then

    def take_over(self) -> None:
        """Let nobody else collect what is old: `collect` has to be called now and then.

        To be called before the server's threads are there: a heap that one has stays.
        """
        gc.set_threshold(*_THRESHOLDS)
        if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
            mallopt(_M_ARENA_MAX, _HEAPS)
            mallopt(_M_MMAP_THRESHOLD, _MAPPED)

    def collect(self, streams: int) -> bool:
        """Collect what is young, or now and then everything, and set aside what is left.

        To be called in the thread of the loop: nothing else runs meanwhile in any case.

        Returns:
            Whether there is memory to give back: everything was collected, or many streams have
            come or gone, at this call or the one before, since what they brought with them goes
            on for a while. At rest what is freed is what is needed next.
        """
        self._calls += 1
        ended = streams < (1 - _ENDED) * self._streams
        settled = self._give_back == 1  # what came with many streams and has gone is old by now
        everything = ended or settled or self._calls >= _EVERYTHING_AFTER
        if everything:
            gc.unfreeze()
            gc.collect()
            self._streams, self._calls = streams, 0
        else:
            gc.collect(_YOUNG)  # what is older may be the load of a minute with much news
        gc.freeze()
        self._streams = max(self._streams, streams)
        if abs(streams - self._streams_seen) > _ENDED * self._streams_seen:
            self._streams_seen, self._give_back = streams, 2
        self._give_back -= 1
        return everything or self._give_back >= 0

    @staticmethod
    def give_back() -> None:
        """Hand the system what listings and ended streams have freed; glibc keeps it otherwise.

        Takes a tenth of a second with 5,000 streams. Others can run meanwhile, as far as they need
        no memory of the heap that is looked at: to be called in a thread, and seldom.
        """
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
            trim(0)
