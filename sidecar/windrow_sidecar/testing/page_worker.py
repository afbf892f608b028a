"""A worker reduced to its side of the page: obeys grants, offers work, gives chunks back.

`python -m windrow_sidecar.testing.page_worker ARENA_SOCKET EPOCH WANTED_CHUNKS`. It says `attached`
on its standard output. A tasklet is 2 ms of sleep, so that tests of the protocol need no core.
"""

from __future__ import annotations

import sys
import time

from windrow_sidecar._core import Arena
from windrow_sidecar.qos.view import Action, Grant, Offer, Phase

TASKLET_US = 2000
TOKENS = 128


def main(socket: str, epoch: int, wanted_chunks: int) -> None:
    """Work for ever."""
    arena = Arena.attach(socket)
    page = arena.page
    tasklet = 0
    print("attached", flush=True)
    while True:
        seen = page.grant_seq
        grant = Grant._make(page.read_grant())
        for chunk in arena.draining(epoch):
            arena.give_back(chunk, owner=epoch)
        held = arena.held(epoch)
        running = grant.action == Action.GO and bool(held)
        offer = Offer(
            job_epoch=epoch,
            tasklet_id=tasklet,
            phase=Phase.FORWARD,
            layer_begin=0,
            layer_end=1,
            tokens=TOKENS,
            estimates_us=(TASKLET_US,),
            memory_delta_bytes=0,
            resident_layers=0,
            starving=0,
            in_flight_us=TASKLET_US if running else 0,
            pause_epoch_seen=grant.pause_epoch,
            wanted_chunks=wanted_chunks,
            held_chunks=len(held),
            tokens_done=tasklet * TOKENS,
        )
        page.publish_offer(offer)
        if running:
            time.sleep(TASKLET_US / 1e6)
            tasklet += 1
        else:
            page.wait_grant(seen, timeout_s=0.05)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
