"""`python -m windrow_sidecar.agent`: the sidecar container's program."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys

from windrow.errors import UserError
from windrow.plain_text import RecordFormatter
from windrow_sidecar.agent.flags import parse_settings
from windrow_sidecar.agent.settings import AgentSettings
from windrow_sidecar.agent.sidecar import Sidecar


async def _serve(settings: AgentSettings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    sidecar = Sidecar(settings)
    loop.add_signal_handler(signal.SIGUSR1, lambda: sidecar.switch(off=True))
    loop.add_signal_handler(signal.SIGUSR2, lambda: sidecar.switch(off=False))
    await sidecar.run(stop)


def main() -> int:
    """Serve until SIGTERM. Exit code 2: the settings cannot be used."""
    handler = logging.StreamHandler()
    handler.setFormatter(RecordFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    try:
        asyncio.run(_serve(parse_settings(sys.argv[1:], os.environ)))
    except UserError as error:
        print(f"windrow agent: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
