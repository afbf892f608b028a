"""Ranks of an SGLang engine: what rank 0 decides, carried by SGLang's own broadcast."""

from __future__ import annotations

import json
import pickle
from types import SimpleNamespace

import pytest

from windrow.errors import InvariantBroken, UserError
from windrow.rundir import RunDir
from windrow_sidecar._core import Arena, Geometry
from windrow_sidecar.compute.partition import NotMoved, UnknownLevel
from windrow_sidecar.engines.rank_chunks import RankChunks
from windrow_sidecar.engines.rank_pages import look_at_others
from windrow_sidecar.engines.sglang.plugin import Plugin
from windrow_sidecar.engines.sglang.rank_lending import ChunkMoves, LeadingRank, LendingRank
from windrow_sidecar.engines.sglang.ranks import (
    AskedPartition,
    RankOrder,
    RankReport,
    SchedulerRanks,
    check_reports,
    raise_failure,
    write_refusal,
)

CORES = 4


class Cores:
    """A share of four cores that keeps where it was moved to, and may refuse."""

    side, total_units = "decode", CORES

    def __init__(self) -> None:
        self.moves: list[int] = []
        self.refuses = False

    def levels(self) -> tuple[int, ...]:
        return tuple(range(1, CORES + 1))

    def activate(self, level: int) -> None:
        if self.refuses:
            raise NotMoved("decode", OSError("no such core"))
        self.moves.append(level)

    def release(self) -> None:
        self.moves.append(CORES)


class Group:
    """Plugins of the ranks of one engine, joined by what SGLang's broadcast does: it pickles."""

    def __init__(self, folder, ranks: int) -> None:
        self.cores = [Cores() for _ in range(ranks)]
        self.plugins = []
        for rank, cores in enumerate(self.cores):
            ours = Plugin(RunDir(folder).of_rank(rank), {})
            ours.ranks = SchedulerRanks(rank, ranks, RunDir(folder))
            ours.ranks.open(cores)
            self.plugins.append(ours)
        self.asked = AskedPartition(self.cores[0], self.plugins[0].ranks)
        self.entries = 0

    def iterate(self, *requests: str) -> list[list[str]]:
        """Receive requests as one iteration of every rank does; returns what each got."""
        sent: list[bytes] = []

        def from_rank_0(_receiver, recv_reqs, _local):
            sent.append(pickle.dumps(recv_reqs))
            self.entries += sum(isinstance(each, RankOrder) for each in recv_reqs)
            return recv_reqs

        def to_the_others(_receiver, recv_reqs, _local):
            assert recv_reqs is None
            return pickle.loads(sent[0])

        leader, *others = self.plugins
        found = [leader.broadcast(from_rank_0, None, [*requests])]
        return found + [each.broadcast(to_the_others, None, None) for each in others]


@pytest.fixture(params=[2, 4])
def group(request, tmp_path):
    return Group(tmp_path, request.param)


def test_every_rank_moves_in_the_iteration_after_rank_0_has_decided(group):
    assert group.iterate("a") == [["a"]] * len(group.plugins)
    assert group.entries == 0, "nothing is decided, so nothing is added to the broadcast"
    group.asked.activate(2)
    assert all(not cores.moves for cores in group.cores)
    assert group.iterate("b", "c") == [["b", "c"]] * len(group.plugins)
    assert all(cores.moves == [2] for cores in group.cores)
    assert group.iterate() == [[]] * len(group.plugins)
    assert group.entries == 1, "it is said once"
    with pytest.raises(UnknownLevel):
        group.asked.activate(CORES + 1)


def test_admission_is_held_back_on_all_ranks_in_the_same_iterations(group):
    leader = group.plugins[0]
    leader.harvest = SimpleNamespace(
        holds_admission=True,
        between_batches=lambda scheduler: None,
        moves=lambda scheduler: None,
        leave=lambda: None,
    )
    admitted: list[int] = []

    def admit() -> list[int]:
        admitted.clear()
        for rank, ours in enumerate(group.plugins):
            ours.process_decode_queue(lambda _, rank=rank: admitted.append(rank), None)
        return admitted

    everyone = [*range(len(group.plugins))]
    assert admit() == everyone, "what rank 0 decides counts once it has told it"
    group.iterate()
    assert admit() == []
    leader.harvest.holds_admission = False  # its time is over: the others have no clock for it
    assert admit() == []
    group.iterate()
    assert admit() == everyone
    leader.harvest.holds_admission = True
    group.iterate()
    leader._failed("a test")
    assert admit() == []
    group.iterate()
    assert admit() == everyone
    assert all(ours.off == "a test" for ours in group.plugins)


def test_a_rank_that_cannot_move_says_so_and_harvesting_ends_on_all(group):
    group.cores[1].refuses = True
    group.asked.activate(2)
    group.iterate("a")
    assert group.plugins[1].off
    assert not group.plugins[0].off
    reason = json.loads(RunDir(group.plugins[0].run_dir.root).of_rank(1).refusal().read_text())
    assert "no such core" in reason["reason"]
    with pytest.raises(InvariantBroken, match=r"rank 1: .*no such core"):
        raise_failure(group.plugins[0].ranks)
    group.plugins[0]._failed("rank 1 cannot move")
    group.asked.release()
    assert group.iterate("b") == [["b"]] * len(group.plugins)
    assert all(ours.off for ours in group.plugins)
    assert group.cores[0].moves == [2, CORES]


def test_a_rank_follows_before_its_slot_is_known_and_leaves_no_refusal_of_rank_0(tmp_path):
    ours = Plugin(RunDir(tmp_path), {})
    ours.ranks = SchedulerRanks(1, 2, RunDir(tmp_path))
    ours._switch_off("not started", UserError("a test"))
    assert ours.off
    assert not list(tmp_path.iterdir())


def test_ranks_that_cannot_be_harvested_together_are_refused_alike():
    good = RankReport(0, (0, 1), "")
    check_reports([good, good])
    with pytest.raises(UserError, match="rank 1: the KV pool"):
        check_reports([good, good._replace(off="the KV pool is another one")])
    with pytest.raises(UserError, match="bound to different cores"):
        check_reports([good, good._replace(cores=(2, 3))])


def test_a_refusal_is_left_and_taken_away_again(tmp_path):
    mine = RunDir(tmp_path).of_rank(3)
    write_refusal(mine, "a reason")
    ranks = SchedulerRanks(0, 4, RunDir(tmp_path))
    assert ranks.failure() == "rank 3: a reason"
    write_refusal(mine, "")
    write_refusal(mine, "")
    assert ranks.failure() == ""


class _NoPages:
    """An allocator that holds no page and gives none: chunks move beside it."""

    chunks = SimpleNamespace(refresh=lambda: None)

    def quiet(self, now_ns: int) -> int:
        return 0

    def give(self, number: int) -> None:
        pass

    def gives(self, number: int) -> bool:
        return False

    def lacks(self, n_pages: int) -> bool:
        return False

    def hold(self, n_pages: int) -> None:
        pass


class _Harvest:
    """Rank 0's side: what it wants moved, until its hook has given up."""

    holds_admission = False

    def __init__(self, leading: LeadingRank, ranks: SchedulerRanks) -> None:
        self.leading, self.ranks, self.harvests = leading, ranks, True

    def moves(self, scheduler) -> ChunkMoves | None:
        if self.harvests:
            raise_failure(self.ranks)
        return self.leading.moves(0, harvests=self.harvests, keep_pages=0, set_free=0)

    def give_up(self, error: Exception) -> None:
        self.harvests = False


@pytest.fixture
def lending(group):
    """Have the ranks of a group lend 8 chunks; returns their arenas."""
    geometry = Geometry(
        layers=1, kv_heads=1, head_dim=16, dtype_bytes=4, block_bytes=4096, chunks=8
    )
    arenas = [Arena.create(geometry, reserved_chunks=0) for _ in group.plugins]
    run_dir = group.plugins[0].run_dir
    for rank, (ours, arena) in enumerate(zip(group.plugins, arenas, strict=True)):
        arena.serve(str(run_dir.of_rank(rank).arena_socket()))
        ours.ranks.lending = LendingRank(RankChunks(arena), _NoPages(), arena.page)
    first = group.plugins[0].ranks
    leading = LeadingRank(first.lending, look_at_others(run_dir, len(arenas)))
    group.plugins[0].harvest = _Harvest(leading, first)
    yield arenas
    for arena in arenas:
        arena.close()


def agree(group, arenas) -> set[int]:
    """Return what is lent, of which the accounts of all ranks say the same."""
    accounts = [ours.ranks.lending.chunks for ours in group.plugins]
    assert all(own.home == accounts[0].home for own in accounts)
    assert all(own.lending.taken == accounts[0].lending.taken for own in accounts)
    assert all(own.states() == accounts[0].states() for own in accounts)
    return set(accounts[0].lending.taken)


def test_chunks_are_lent_and_come_back_in_the_same_iteration_on_all_ranks(group, lending):
    harvest = group.plugins[0].harvest
    workers = [
        Arena.attach(str(RunDir(group.plugins[0].run_dir.root).of_rank(n).arena_socket()))
        for n in range(len(lending))
    ]
    assert harvest.leading.group.lend(2, owner=1) == [6, 7]
    assert group.iterate("a") == [["a"]] * len(lending)
    assert agree(group, lending) == {6, 7}
    assert all(worker.held(1) == [6, 7] for worker in workers)
    harvest.leading.group.revoke(1)
    group.iterate()
    assert all(worker.draining(1) == [6] for worker in workers)
    for worker in workers[:-1]:
        worker.give_back(6, owner=1)
    group.iterate()
    assert agree(group, lending) == {6, 7}, "a rank's worker has it still"
    workers[-1].give_back(6, owner=1)
    group.iterate()
    assert agree(group, lending) == {7}
    entries = group.entries
    group.iterate()
    assert group.entries == entries, "nothing moves, so nothing is added to the broadcast"
    for worker in workers:
        worker.close()


def test_a_rank_that_cannot_lend_ends_harvesting_on_all_and_all_chunks_come_back(group, lending):
    lending[1].take_kv_chunk(7)  # its table is not what the ranks agreed on
    leader = group.plugins[0]
    leader.harvest.leading.group.lend(2, owner=1)
    assert group.iterate("a") == [["a"]] * len(lending)
    assert agree(group, lending) == {6, 7}
    assert "chunk 7 cannot be lent" in group.plugins[1].off
    lending[1].return_kv(7)
    for _ in range(4):  # asked back, drained, handed back: without a worker at once
        assert group.iterate("b") == [["b"]] * len(lending)
    assert all("chunk 7 cannot be lent" in ours.off for ours in group.plugins)
    assert agree(group, lending) == set()
    assert all(arena.counts()[2] == 0 for arena in lending)
