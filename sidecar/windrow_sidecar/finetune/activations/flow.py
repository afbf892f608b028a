"""Which side of a cheapest cut each node of a network lies on (Dinic's maximum flow)."""

from __future__ import annotations

from collections import deque
from math import inf

SOURCE, SINK = 0, 1


class Network:
    """Nodes are numbers, made by `node`; 0 is the source, 1 the sink."""

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
