"""Copy one adapter into a cache: `python -m windrow_sidecar.finetune.arrival`, order on stdin.

A process of its own: the agent loads no client of object storage, the guard of the network knows
this one job, and a client that hangs is killed with it. The order is a line of JSON with
credentials, so it is on no command line. The answer is a line of JSON: `{}`, or an error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from windrow.errors import WindrowError
from windrow.outputs import check_within, folder_below, make_trees
from windrow.protocol import error_line
from windrow_sidecar.finetune.arrival.cache import AdapterCache
from windrow_sidecar.finetune.arrival.sources import AdapterSource
from windrow_sidecar.finetune.data import network_guard
from windrow_sidecar.finetune.data.outside import agree_on_authorities
from windrow_sidecar.finetune.data.remote import Credentials
from windrow_sidecar.finetune.data.source_access import SourceAccess


def fetch(order: Mapping[str, Any]) -> None:
    """Carry out an order (see `windrow_sidecar.agent.adapter_store`).

    Raises:
        UserError, Transient, OSError: nothing of the adapter is in the cache.
    """
    source = None if order["forget"] else _source(order)
    make_trees(order["trees"], order["mounts"])
    trees = [Path(tree) for tree in order["trees"]]
    cache = Path(order["cache"])
    check_within(cache.parent, trees)
    tree = max((t for t in trees if cache.is_relative_to(t)), key=lambda t: len(t.parts))
    folder = folder_below(tree, cache.relative_to(tree).parts, make=True)
    try:
        held = Path(f"/proc/self/fd/{folder}")
        kept = AdapterCache(held, order["cacheBytes"])
        if source is None:
            kept.forget(order["digest"])
        else:
            kept.store(source, order["digest"], order["keep"])
    finally:
        os.close(folder)


def _source(order: Mapping[str, Any]) -> AdapterSource:
    access = SourceAccess.of(order["access"], order["trees"])
    if access.network is not None:
        network_guard.install().admit("adapter", access.network)
    secret = "of spec.output.secretRef" if order["secret"] else ""
    return AdapterSource(order["source"], Credentials(secret, order["secret"]), access)


def main() -> int:
    """Read the order, carry it out, answer; returns the exit code."""
    # Nothing but the answer is on standard output: what a client prints goes to the log.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    answer: dict[str, str] = {}
    agree_on_authorities()
    try:
        fetch(json.loads(sys.stdin.readline()))
    except (WindrowError, OSError) as error:
        answer = error_line(error)
    print(json.dumps(answer), file=out, flush=True)
    return 1 if answer else 0


if __name__ == "__main__":
    sys.exit(main())
