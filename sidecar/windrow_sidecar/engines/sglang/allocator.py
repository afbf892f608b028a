"""SGLang's paged KV allocator over chunks of an arena, of which some may be lent.

With nothing lent it is the stock allocator: all chunks are held from the start, so the same pages
are free in the same order, and an allocation costs one comparison more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from windrow_sidecar._core import Arena, Error
from windrow_sidecar.engines.chunks import ChunkHoldings, KvChunks
from windrow_sidecar.engines.sglang.free_pages import (
    is_idle,
    pages_by_chunk,
    pages_of_range,
    without_chunks,
)
from windrow_sidecar.engines.sglang.pool import buffers_of, pool_of_tokens

Fence = Callable[[], Callable[[int], bool]]
"""Makes a check: whether nothing can write any more, at that time (ns), to pages freed before."""


class _Parked(NamedTuple):
    """Empty chunks that wait until nothing writes to them: their set's number, and the check."""

    number: int
    is_quiet: Callable[[int], bool]
    chunks: list[int]


def allocator_class(arena: Arena, fence: Fence, chunks: KvChunks | None = None) -> type[Any]:
    """A subclass of SGLang's `PagedTokenToKVPoolAllocator` over `arena`; imports SGLang.

    Chunks that it sets free wait behind `fence` before a worker can have them.

    `chunks`: of the arena, as the ranks of the engine have agreed on them; None: the arena's own.
    """
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator

    class LendingPagedAllocator(PagedTokenToKVPoolAllocator):  # type: ignore[misc]
        """The stock allocator on the chunks that it holds; takes more when it runs short."""

        def __init__(
            self,
            size: int,
            page_size: int,
            dtype: torch.dtype,
            device: str,
            kvcache: Any,  # noqa: ANN401
            need_sort: bool,
        ) -> None:
            slots = arena.geometry.slots_per_chunk
            self.chunks = ChunkHoldings(
                chunks or arena, pages_per_chunk=slots // page_size, n_pages=size // page_size
            )
            self._parked: deque[_Parked] = deque()
            self._sets = self._quiet = 0  # numbers of the newest set, and of the last quiet one
            self._blanking: Any = None  # a stream of a GPU
            super().__init__(size, page_size, dtype, device, kvcache, need_sort)

        @property
        def lent_tokens(self) -> int:
            """Tokens in chunks that a worker holds."""
            return int(self.chunks.lent_pages * self.page_size)

        def available_size(self) -> int:
            """Tokens that could be had now; lent ones are not among them."""
            ours = self.chunks.returned_pages + self._parked_pages()
            return int(super().available_size()) + int(ours * self.page_size)

        def clear(self) -> None:
            """Free every page, but for those of lent chunks."""
            super().clear()
            self._parked.clear()
            held = [page for c in self.chunks.held() for page in self.chunks.pages_of(c)]
            if len(held) != self.num_pages:
                self.free_pages = torch.tensor(held, dtype=torch.int64, device=self.device)

        def alloc(self, need_size: int) -> torch.Tensor | None:
            """Allocate whole pages (see SGLang)."""
            self.hold(need_size // self.page_size)
            return super().alloc(need_size)  # type: ignore[no-any-return]

        def alloc_extend(
            self,
            prefix_lens: torch.Tensor,
            prefix_lens_cpu: torch.Tensor,
            seq_lens: torch.Tensor,
            seq_lens_cpu: torch.Tensor,
            last_loc: torch.Tensor,
            extend_num_tokens: int,
            num_new_pages: int | None = None,
        ) -> torch.Tensor | None:
            """Allocate for prompts (see SGLang)."""
            self.hold(extend_num_tokens // self.page_size + len(prefix_lens) + 1)
            return super().alloc_extend(  # type: ignore[no-any-return]
                prefix_lens,
                prefix_lens_cpu,
                seq_lens,
                seq_lens_cpu,
                last_loc,
                extend_num_tokens,
                num_new_pages,
            )

        def alloc_decode(
            self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
        ) -> torch.Tensor | None:
            """Allocate one token a request (see SGLang)."""
            self.hold(len(seq_lens))
            return super().alloc_decode(seq_lens, seq_lens_cpu, last_loc)  # type: ignore[no-any-return]

        def hold(self, n_pages: int) -> None:
            """Have so many free pages at hand, as far as the arena gives chunks."""
            if not self.lacks(n_pages):
                return
            while self._parked:
                for parked in self._parked.pop().chunks:
                    self._stage(self.chunks.pages_of(parked))
            try:
                while self.lacks(n_pages):
                    chunk = self.chunks.take()
                    if chunk is None:
                        return
                    if self.chunks.was_lent(chunk):
                        self._blank(chunk)
                    self._stage(self.chunks.pages_of(chunk))
            except Error:  # SGLang answers a short pool; it must not die of ours
                return

        def lacks(self, n_pages: int) -> bool:
            """Return whether fewer free pages are at hand."""
            return len(self.free_pages) + self.num_staged_pages < n_pages

        def settle(self, now_ns: int) -> None:
            """Give the arena what nothing writes to any more, and see what has come back."""
            self.give(self.quiet(now_ns))
            self.chunks.refresh()

        def quiet(self, now_ns: int) -> int:
            """Return the number of the last set of empty chunks to which nothing writes any more.

            It only grows, and no set before it is written to.
            """
            for parked in self._parked:
                if parked.number > self._quiet:
                    if not parked.is_quiet(now_ns):
                        break
                    self._quiet = parked.number
            return self._quiet

        def gives(self, number: int) -> bool:
            """Return whether `give` would give anything."""
            return bool(self._parked) and self._parked[0].number <= number

        def give(self, number: int) -> None:
            """Give the arena the sets of empty chunks up to that number."""
            while self.gives(number):
                for chunk in self._parked.popleft().chunks:
                    self.chunks.give(chunk)

        def is_idle(self) -> bool:
            """Return whether looking at free pages would wait for no work of decode's."""
            return is_idle(torch.device(self.device))

        def set_free(self, n_chunks: int, *, keep_pages: int) -> int:
            """Take up to so many empty chunks out of use, leaving `keep_pages` free pages.

            Returns how many it took.
            """
            n_chunks -= sum(len(parked.chunks) for parked in self._parked)
            free = self.get_all_free_pages()
            if n_chunks <= 0 or len(free) - keep_pages < self.chunks.pages_per_chunk:
                return 0
            n, n_all = self.chunks.pages_per_chunk, arena.geometry.chunks
            counts = pages_by_chunk(free, n, n_all)
            chosen = self.chunks.emptiest(counts, at_most=n_chunks, keep_pages=keep_pages)
            if not chosen:
                return 0
            leaving = sum(counts[chunk] for chunk in chosen)
            self.free_pages = without_chunks(
                free, chosen, pages_per_chunk=n, chunks=n_all, leaving=leaving
            )
            self.staged_pages.clear()
            self.num_staged_pages = 0
            self._sets += 1
            self._parked.append(_Parked(self._sets, fence(), chosen))
            return len(chosen)

        def _parked_pages(self) -> int:
            return sum(len(self.chunks.pages_of(c)) for p in self._parked for c in p.chunks)

        def _blank(self, chunk: int) -> None:
            """Zero what a worker has left: a kernel may multiply slots that it masks, by 0.

            Before the pages are handed out: a transfer may write into them then, on no stream of
            torch's, and what it has written must not be zeroed. The stream is the allocator's own,
            so that only this is waited for; the worker's writes ended before it gave the chunk
            back.
            """
            slots = arena.geometry.slots_per_chunk
            buffers = buffers_of(pool_of_tokens(self._kvcache))
            rows = slice(chunk * slots, (chunk + 1) * slots)
            if not buffers[0].is_cuda:
                for buffer in buffers:
                    buffer[rows].zero_()
                return
            if self._blanking is None:
                self._blanking = torch.cuda.Stream(buffers[0].device, priority=-1)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(self._blanking):
                for buffer in buffers:
                    buffer[rows].zero_()
            self._blanking.synchronize()

        def _stage(self, pages: range) -> None:
            self.staged_pages.append(pages_of_range(pages, torch.device(self.device)))
            self.num_staged_pages += len(pages)

    return LendingPagedAllocator
