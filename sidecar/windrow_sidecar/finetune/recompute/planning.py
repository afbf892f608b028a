"""Choose which tensors of a layer to keep within a budget of bytes, by minimum cuts.

Each value that backward needs is kept, or computed again from what is. With bytes priced at 1 and
work at `price` the cheapest choice is a minimum cut (a value that is needed but not computed again
costs its bytes; an operation that runs again costs its work and needs its inputs), so it is exact
for every price, and prices from high to low walk along the lower hull of bytes against work.
What a budget leaves between two corners of the hull is filled by work saved per byte.
Autograd itself does what FlexLLM calls pruning: for frozen weights no input is saved.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf

from windrow_sidecar.finetune.recompute.layer_graph import LayerGraph, Op, OpKind

# Floating-point operations in the time of moving one byte: about 30 on a core, 200 on an H200.
RIDGE = 60
# Prices of a byte's worth of work (work of 1: the time of moving 1/RIDGE bytes) that are tried.
_CHEAPEST, _DEAREST = 1e-12, 1e3
# Of a hull; each step finds a new one.
_MOST_CORNERS = 64


class BudgetTooSmall(ValueError):
    """No plan keeps so few bytes; `least_bytes` are the fewest."""

    def __init__(self, budget_bytes: int, least_bytes: int) -> None:
        super().__init__(f"{least_bytes} bytes must be kept at least, {budget_bytes} are allowed")
        self.least_bytes = least_bytes


@dataclass(frozen=True, slots=True)
class KeepPlan:
    """Values to keep and operations to run again (as indexes), with bytes and work."""

    kept: frozenset[int]
    replayed: frozenset[int]
    kept_bytes: int
    extra_flops: int


def work_of(op: Op) -> float:
    """Return an operation's time in floating-point operations: by compute or by memory traffic."""
    return float(max(op.flops, RIDGE * op.moved_bytes))


def plan_within(graph: LayerGraph, budget_bytes: int, *, gemm_again: bool = False) -> KeepPlan:
    """Return the plan with the least work that keeps at most `budget_bytes`.

    Args:
        graph: of the layer.
        budget_bytes: for what is kept between forward and backward; what is there anyway (weights,
            input, arguments) does not count.
        gemm_again: whether matrix products may run a second time.

    Raises:
        BudgetTooSmall: tells the least that could be kept.
    """
    over = plan_at(graph, _DEAREST, gemm_again=gemm_again)
    if over.kept_bytes <= budget_bytes:
        return over
    plan = smallest(graph, gemm_again=gemm_again)
    if plan.kept_bytes > budget_bytes:
        raise BudgetTooSmall(budget_bytes, plan.kept_bytes)
    # Corners of the hull on both sides of the budget. At the price at which both cost the same, a
    # corner between them is cheaper than either; where there is none, they are neighbours.
    for _ in range(_MOST_CORNERS):
        more_work = _work(graph, plan) - _work(graph, over)
        if more_work <= 0:
            break
        price = (over.kept_bytes - plan.kept_bytes) / more_work
        found = plan_at(graph, price, gemm_again=gemm_again)
        if not plan.kept_bytes < found.kept_bytes < over.kept_bytes:
            break
        if found.kept_bytes <= budget_bytes:
            plan = found
        else:
            over = found
    return _filled(graph, plan, budget_bytes)


def smallest(graph: LayerGraph, *, gemm_again: bool = False) -> KeepPlan:
    """Return the plan that keeps the fewest bytes."""
    return plan_at(graph, _CHEAPEST, gemm_again=gemm_again)


def largest(graph: LayerGraph) -> KeepPlan:
    """Return the plan that computes nothing again, as autograd does by default."""
    return plan_at(graph, _DEAREST, gemm_again=False)


def plan_at(graph: LayerGraph, price: float, *, gemm_again: bool) -> KeepPlan:
    """Return the plan with the least sum of bytes kept and `price` times work done again."""
    network = Network()
    needed = [network.node() for _ in graph.values]
    again = [network.node() for _ in graph.ops]
    for need in set(graph.needs):
        network.edge(SOURCE, needed[need], inf)
    made = graph.producers()
    for i, value in enumerate(graph.values):
        if value.there:
            continue
        price_kept = float(value.n_bytes) if value.can_be_kept else inf
        network.edge(needed[i], again[made[i]] if i in made else SINK, price_kept)
    for i, op in enumerate(graph.ops):
        banned = op.kind is OpKind.NEVER or (op.kind is OpKind.GEMM and not gemm_again)
        free = op.kind is OpKind.VIEW
        network.edge(again[i], SINK, inf if banned else 0.0 if free else price * work_of(op))
        for wanted in op.inputs:
            if not graph.values[wanted].there:
                network.edge(again[i], needed[wanted], inf)
    side = network.source_side()
    kept = frozenset(
        i
        for i, value in enumerate(graph.values)
        if needed[i] in side and not value.there and (i not in made or again[made[i]] not in side)
    )
    return _plan(graph, kept)


def _plan(graph: LayerGraph, kept: frozenset[int]) -> KeepPlan:
    replayed = graph.replayed(kept)
    asked = set(graph.needs).union(*(graph.ops[op].inputs for op in replayed))
    kept &= asked
    return KeepPlan(
        kept=kept,
        replayed=replayed,
        kept_bytes=sum(graph.values[value].n_bytes for value in kept),
        extra_flops=sum(graph.ops[op].flops for op in replayed),
    )


def _filled(graph: LayerGraph, plan: KeepPlan, budget_bytes: int) -> KeepPlan:
    """Keep more values while the budget lasts, those first that save the most work for a byte."""
    while True:
        room = budget_bytes - plan.kept_bytes
        best, best_rate = None, 0.0
        for op in plan.replayed:
            if graph.ops[op].kind is OpKind.VIEW:
                continue
            for value in graph.ops[op].outputs:
                at = graph.values[value]
                if not at.can_be_kept or at.n_bytes > room:
                    continue
                other = _plan(graph, plan.kept | {value})
                grown = max(1, other.kept_bytes - plan.kept_bytes)
                rate = (_work(graph, plan) - _work(graph, other)) / grown
                if rate > best_rate and other.kept_bytes <= budget_bytes:
                    best, best_rate = other, rate
        if best is None:
            return plan
        plan = best


def _work(graph: LayerGraph, plan: KeepPlan) -> float:
    return sum(
        work_of(graph.ops[op]) for op in plan.replayed if graph.ops[op].kind is not OpKind.VIEW
    )


SOURCE, SINK = 0, 1


class Network:
    """A flow network whose nodes are numbers; 0 is the source, 1 the sink."""

    def __init__(self) -> None:
        self._edges: list[list[int]] = [[], []]  # of a node; edge e and its reverse are e, e ^ 1
        self._to: list[int] = []
        self._room: list[float] = []

    def node(self) -> int:
        """Add a node."""
        self._edges.append([])
        return len(self._edges) - 1

    def edge(self, start: int, end: int, capacity: float) -> None:
        """Add an edge: `capacity` is paid where `start` is on the source's side, `end` is not."""
        for node, other, room in ((start, end, capacity), (end, start, 0.0)):
            self._edges[node].append(len(self._to))
            self._to.append(other)
            self._room.append(room)

    def source_side(self) -> set[int]:
        """Return the source's side of the cheapest cut, the smallest where several are.

        Raises:
            ValueError: every cut is infinitely dear.
        """
        while True:
            level = self._levels()
            if SINK not in level:
                return set(level)
            begun = [0] * len(self._edges)
            while self._push(level, begun):
                pass

    def _levels(self) -> dict[int, int]:
        level, reached = {SOURCE: 0}, deque([SOURCE])
        while reached:
            node = reached.popleft()
            for edge in self._edges[node]:
                if self._room[edge] > 0 and self._to[edge] not in level:
                    level[self._to[edge]] = level[node] + 1
                    reached.append(self._to[edge])
        return level

    def _push(self, level: dict[int, int], begun: list[int]) -> bool:
        """Send flow along one path that climbs the levels; False: there is none left."""
        path: list[int] = []
        node = SOURCE
        while node != SINK:
            edge = self._next_edge(node, level, begun)
            if edge is not None:
                path.append(edge)
                node = self._to[edge]
            elif path:
                begun[self._to[path.pop() ^ 1]] += 1
                node = self._to[path[-1]] if path else SOURCE
            else:
                return False
        width = min(self._room[edge] for edge in path)
        if width == inf:
            raise ValueError("every cut is infinitely dear")
        for edge in path:
            self._room[edge] -= width
            self._room[edge ^ 1] += width
        return True

    def _next_edge(self, node: int, level: dict[int, int], begun: list[int]) -> int | None:
        edges = self._edges[node]
        while begun[node] < len(edges):
            edge = edges[begun[node]]
            if self._room[edge] > 0 and level.get(self._to[edge]) == level[node] + 1:
                return edge
            begun[node] += 1
        return None
