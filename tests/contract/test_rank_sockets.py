"""Ranks talk to ranks alone: who else is in the pod's network is connected to none of them."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest
import torch

from windrow_sidecar.compute.rank_sockets import (
    RankSockets,
    StrangerConnected,
    drop_connections,
    strangers,
)
from windrow_sidecar.testing.ranks import on_ranks

A, B, C = (("127.0.0.1", port) for port in (1, 2, 3))


def connects(port: int) -> bool:
    """Return whether loopback lets somebody connect to a port."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=0.3).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("mine", "others", "found"),
    [
        ([(A, B)], [(B, A)], []),
        ([(A, B)], [], [B]),
        ([(A, B), (A, C)], [(B, A)], [C]),
        ([(A, B)], [(A, B)], [B]),  # of the same end, not of the other one
    ],
)
def test_a_connection_that_no_other_rank_has_leads_to_a_stranger(mine, others, found):
    assert strangers(mine, others) == found


def test_nobody_connects_to_a_rank_once_all_have_joined():
    def work(ranks):
        listening = [
            s.laddr.port
            for s in psutil.Process().net_connections("tcp")
            if s.status == psutil.CONN_LISTEN
        ]
        taken = [port for port in listening if connects(port)]
        total = ranks.sum(torch.ones(1, dtype=torch.float64))
        return len(listening), taken, float(total)

    made = on_ranks(2, work)
    assert [total for _, _, total in made] == [2.0, 2.0]
    assert [taken for _, taken, _ in made] == [[], []]
    assert all(count for count, _, _ in made)  # gloo goes on listening: that is why


def test_a_stranger_on_a_connection_ends_the_group():
    sockets = RankSockets()
    with socket.create_server(("127.0.0.1", 0)) as server:
        stranger = socket.create_connection(server.getsockname())
        taken, _ = server.accept()

        said = {"windrow-connections-1": "[]"}
        store = SimpleNamespace(set=said.__setitem__, get=lambda key: said[key].encode())
        with stranger, taken, pytest.raises(StrangerConnected, match="another process"):
            sockets.check(store, 0, 2)


def test_connections_that_were_taken_before_go_on():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert connects(port)
        server.accept()[0].close()
        before = socket.create_connection(("127.0.0.1", port))
        taken, _ = server.accept()
        drop_connections(server.fileno())
        assert not connects(port)
        with before, taken:
            before.sendall(b"x")
            assert taken.recv(1) == b"x"
