"""Any sequence of calls leaves the chunk table as a few lines of Python say it should be."""

from __future__ import annotations

import tempfile
from collections.abc import Callable

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from windrow_sidecar._core import Arena, Geometry, OwnershipError

CHUNKS = 10
FREE, KV, LENT, RESERVED, DRAINING = range(5)
ids = st.integers(0, CHUNKS - 1)
amounts = st.integers(0, CHUNKS)
owners = st.integers(1, 3)


class TableMachine(RuleBasedStateMachine):
    """The table and its model side by side: what each chunk is, whose, and how often it moved."""

    @initialize(reserve=st.integers(0, 4))
    def create(self, reserve: int) -> None:
        geometry = Geometry(
            layers=1, kv_heads=1, head_dim=32, dtype_bytes=4, block_bytes=4096, chunks=CHUNKS
        )
        self.folder = tempfile.TemporaryDirectory(prefix="wr-")
        self.arena = Arena.create(geometry, reserved_chunks=reserve)
        self.arena.serve(f"{self.folder.name}/a.sock")
        self.peer = Arena.attach(f"{self.folder.name}/a.sock")
        self.model = [(FREE, 0)] * CHUNKS
        self.moves = [0] * CHUNKS
        self.reserve = reserve
        self.balance()

    def having(self, *states: int, owner: int | None = None) -> list[int]:
        return [
            i for i, (state, by) in enumerate(self.model) if state in states and owner in (None, by)
        ]

    def become(self, chunk: int, state: int, owner: int = 0) -> None:
        self.model[chunk] = (state, owner)
        self.moves[chunk] += 1

    def balance(self) -> None:
        while len(self.having(RESERVED)) < self.reserve and self.having(FREE):
            self.become(self.having(FREE)[-1], RESERVED)
        while len(self.having(RESERVED)) > self.reserve:
            self.become(self.having(RESERVED)[-1], FREE)

    def put_back(self, chunk: int) -> None:
        short = len(self.having(RESERVED)) < self.reserve
        self.become(chunk, RESERVED if short else FREE)

    @staticmethod
    def refused(call: Callable[[], None]) -> bool:
        try:
            call()
        except OwnershipError:
            return True
        return False

    @rule()
    def take_kv(self) -> None:
        candidates = self.having(FREE) or self.having(RESERVED)
        expected = candidates[0] if candidates else -1
        assert self.arena.take_kv() == expected
        if candidates:
            self.become(expected, KV)

    @rule(chunk=ids)
    def return_kv(self, chunk: int) -> None:
        legal = self.model[chunk][0] == KV
        assert self.refused(lambda: self.arena.return_kv(chunk)) != legal
        if legal:
            self.put_back(chunk)

    @rule(n=amounts)
    def set_reserve(self, n: int) -> None:
        self.reserve = n
        self.balance()
        assert self.arena.set_reserve(n) == len(self.having(RESERVED))

    @rule(n=amounts, owner=owners)
    def lend(self, n: int, owner: int) -> None:
        self.balance()
        expected = self.having(FREE)[::-1][:n]
        assert self.arena.lend(n, owner=owner) == expected
        for chunk in expected:
            self.become(chunk, LENT, owner)

    @rule(n=amounts)
    def revoke(self, n: int) -> None:
        expected = self.having(LENT)[:n]
        assert self.arena.revoke(n) == expected
        for chunk in expected:
            self.become(chunk, DRAINING, self.model[chunk][1])

    @rule(chunk=ids, owner=owners)
    def give_back(self, chunk: int, owner: int) -> None:
        legal = self.model[chunk] in ((LENT, owner), (DRAINING, owner))
        assert self.refused(lambda: self.peer.give_back(chunk, owner=owner)) != legal
        if legal:
            self.put_back(chunk)

    @rule(chunk=ids, owner=owners)
    def the_peer_makes_none_of_the_owners_moves(self, chunk: int, owner: int) -> None:
        peer = self.peer
        assert self.refused(lambda: peer.take_kv())
        assert self.refused(lambda: peer.return_kv(chunk))
        assert self.refused(lambda: peer.lend(1, owner=owner))
        assert self.refused(lambda: peer.revoke(1))
        assert self.refused(lambda: peer.reclaim(owner))

    @rule()
    def another_peer_takes_over(self) -> None:
        self.peer.close()
        self.peer = Arena.attach(f"{self.folder.name}/a.sock")

    @rule(owner=owners)
    def reclaim(self, owner: int) -> None:
        lost = self.having(LENT, DRAINING, owner=owner)
        assert self.arena.reclaim(owner) == len(lost)
        for chunk in lost:
            self.put_back(chunk)

    @invariant()
    def table_equals_model(self) -> None:
        self.arena.check()
        assert list(self.arena.states()) == [state for state, _ in self.model]
        assert [self.arena.chunk(i).owner for i in range(CHUNKS)] == [by for _, by in self.model]
        assert [self.arena.chunk(i).epoch for i in range(CHUNKS)] == self.moves
        assert self.arena.counts() == tuple(len(self.having(state)) for state in range(5))
        for owner in (1, 2, 3):
            assert self.peer.held(owner) == self.having(LENT, owner=owner)
            assert self.peer.draining(owner) == self.having(DRAINING, owner=owner)

    def teardown(self) -> None:
        if hasattr(self, "arena"):
            self.peer.close()
            self.arena.close()
            self.folder.cleanup()


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=60, stateful_step_count=40)
