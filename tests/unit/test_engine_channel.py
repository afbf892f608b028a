from __future__ import annotations

import socket

import pytest

from windrow_sidecar.engines.builtin.web.channel import PeerGone, SocketChannel
from windrow_sidecar.engines.builtin.web.messages import Cancel, Finished, Output
from windrow_sidecar.engines.builtin.web.token_batcher import TokenBatcher


@pytest.fixture
def ends():
    left, right = socket.socketpair()
    with left, right:
        yield SocketChannel(left), SocketChannel(right)


def test_messages_arrive_whole_and_in_order(ends):
    ours, theirs = ends
    sent = [Cancel(i, "x" * i) for i in range(50)]
    for message in sent:
        ours.send(message)
    assert theirs.receive() == sent
    assert theirs.receive() == []


def test_a_peer_that_does_not_read_never_blocks_the_sender(ends):
    ours, theirs = ends
    sent = [Cancel(i, "x" * 10_000) for i in range(200)]
    for message in sent:
        ours.send(message)
    assert ours.unsent_bytes > 0
    got = []
    while len(got) < len(sent):
        got += theirs.receive()
        ours.flush()
    assert got == sent
    assert ours.unsent_bytes == 0


def test_the_end_of_the_peer_is_noticed_on_either_side(ends):
    ours, theirs = ends
    theirs.close()
    with pytest.raises(PeerGone):
        ours.receive()
    with pytest.raises(PeerGone):
        ours.send(Cancel(1, ""))


def test_first_tokens_and_ends_go_out_at_once_and_the_rest_at_the_interval(ends):
    ours, theirs = ends
    outbox = TokenBatcher(ours, interval=3)
    for token in range(6):
        outbox.token(1, token)
        outbox.end_step()
    assert [message.tokens for message in theirs.receive()] == [
        ((1, 0),),
        ((1, 1), (1, 2), (1, 3)),
    ]
    end = Finished(1, "length", 5, 9)
    outbox.token(1, 6)
    outbox.finished(end)
    outbox.end_step()
    assert theirs.receive() == [Output(((1, 4), (1, 5), (1, 6)), (end,))]
