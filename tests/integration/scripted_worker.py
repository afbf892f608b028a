"""A worker reduced to its side of the page: obeys grants, offers work, gives chunks back.

Run as a program: `scripted_worker.py ARENA_SOCKET EPOCH WANTED_CHUNKS`. Each tasklet takes 2 ms of
sleep, so that tests of the protocol do not fight over cores.
"""

from __future__ import annotations

import sys
import time

from windrow_sidecar._core import Arena
from windrow_sidecar.qos.view import Action, Decision

TASKLET_US = 2000


def main() -> None:
    socket, epoch, wanted = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    arena = Arena.attach(socket)
    page = arena.page
    tasklet = 0
    print("attached", flush=True)
    while True:
        seen = page.grant_seq
        grant = Decision(*page.read_grant())
        held = arena.held(epoch)
        for chunk in arena.draining(epoch):
            arena.give_back(chunk, owner=epoch)
        running = grant.action == Action.GO and bool(held)
        page.publish_offer(
            epoch,
            tasklet // 10,
            tasklet,
            1,
            0,
            1,
            128,
            1,
            (TASKLET_US,),
            0,
            0,
            0,
            TASKLET_US if running else 0,
            grant.pause_epoch,
            wanted,
            len(held),
            tasklet * 128,
        )
        if running:
            time.sleep(TASKLET_US / 1e6)
            tasklet += 1
        else:
            page.wait_grant(seen, timeout_s=0.05)


if __name__ == "__main__":
    main()
