"""Any sequence of calls leaves the allocator as a few lines of Python say it should be."""

from __future__ import annotations

import ctypes

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from windrow_sidecar._core import Arena, BudgetError, DeviceAllocator, Geometry

KIB = 1 << 10
BLOCK = 128 * KIB
CHUNKS, CHUNK = 6, 16 * BLOCK  # one block of the small pool fits into each
LEAF, TOP = 2 * KIB, 2048 * KIB


class AllocatorMachine(RuleBasedStateMachine):
    """Live tensors as {address: (bytes, mark)}, chunks by what was said of them."""

    tensors = Bundle("tensors")

    def __init__(self) -> None:
        super().__init__()
        geometry = Geometry(
            layers=8, kv_heads=1, head_dim=32, dtype_bytes=4, block_bytes=BLOCK, chunks=CHUNKS
        )
        self.arena = Arena.create(geometry, reserved_chunks=0)
        self.allocator = DeviceAllocator.over(self.arena)
        self.live: dict[int, tuple[int, int]] = {}
        self.lent: set[int] = set()
        self.draining: set[int] = set()
        self.marks = 0

    def overlaps(self, address: int, n_bytes: int) -> bool:
        return any(
            a < address + n_bytes and address < a + size for a, (size, _) in self.live.items()
        )

    @rule(
        target=tensors,
        n_bytes=st.one_of(st.integers(1, TOP - 1), st.integers(TOP, 4 * TOP)),
        stream=st.integers(0, 2),
    )
    def allocate(self, n_bytes: int, stream: int) -> int:
        try:
            address = self.allocator.allocate(n_bytes, stream=stream)
        except BudgetError:
            needed = max(TOP, -(-n_bytes // BLOCK) * BLOCK)
            held = self.allocator.stats()["reserved_bytes.all.current"]
            assert len(self.lent) * CHUNK - held < needed
            return 0
        assert not self.overlaps(address, n_bytes)
        rounded = max(LEAF, 1 << (n_bytes - 1).bit_length())
        assert address % min(rounded, TOP) == 0
        self.marks = self.marks % 255 + 1
        ctypes.memset(address, self.marks, n_bytes)
        self.live[address] = (n_bytes, self.marks)
        return address

    @rule(address=consumes(tensors), recorded=st.booleans())
    def free(self, address: int, recorded: bool) -> None:
        if address:
            n_bytes, mark = self.live.pop(address)
            assert ctypes.string_at(address, n_bytes) == bytes([mark]) * n_bytes
            if recorded:
                self.allocator.record_stream(address, 5)
            self.allocator.free(address)

    @rule(chunk=st.integers(0, CHUNKS - 1))
    def lend(self, chunk: int) -> None:
        if chunk not in self.lent | self.draining:
            self.allocator.lend(chunk)
            self.lent.add(chunk)

    @rule(left=st.integers(0, CHUNKS))
    def shrink(self, left: int) -> None:
        self.allocator.shrink_to(left)
        drained = sorted(self.lent)[: max(0, len(self.lent) - left)]
        self.lent -= set(drained)
        self.draining |= set(drained)

    @rule()
    def take_quiet(self) -> None:
        gone = set(self.allocator.take_quiet())
        assert gone <= self.draining
        self.draining -= gone
        if not self.live:
            assert not self.draining

    @invariant()
    def figures_are_those_of_the_model(self) -> None:
        self.allocator.check()
        stats = self.allocator.stats()
        assert stats["requested_bytes.all.current"] == sum(n for n, _ in self.live.values())
        assert stats["allocation.all.current"] == len(self.live)
        assert f"of {len(self.lent)} chunks" in self.allocator.describe_budget()

    def teardown(self) -> None:
        for address in self.live:
            self.allocator.free(address)
        self.allocator.shrink_to(0)
        assert set(self.allocator.take_quiet()) == self.lent | self.draining
        self.allocator.check()
        self.arena.close()


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=40, stateful_step_count=40)
