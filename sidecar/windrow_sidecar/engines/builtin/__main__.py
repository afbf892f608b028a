"""`python -m windrow_sidecar.engines.builtin`: serve a Llama checkpoint on CPU cores."""

from __future__ import annotations

import logging
import os
import sys

from windrow import openmp
from windrow.errors import UserError
from windrow_sidecar.compute.mps_start import bring_up
from windrow_sidecar.engines.builtin.llama.config import read_config
from windrow_sidecar.engines.builtin.settings import EngineSettings
from windrow_sidecar.engines.builtin.web.frontprocess import FrontProcess


def main() -> int:
    """Return 0 after an orderly end, 2 for an error that the caller has to fix, 1 otherwise."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s engine %(levelname)s %(message)s")
    try:
        settings = EngineSettings.from_command_line(None, os.environ)
        os.environ.update({**openmp.DECODE, **os.environ})
        if settings.run_dir is not None and settings.device != "cpu":
            # Before torch is loaded: no process is a client of a daemon that comes later.
            os.environ.update(bring_up(settings.run_dir, os.environ))
        config = read_config(settings.model_path)
        front = FrontProcess(settings, eos_token_ids=config.eos_token_ids, cpus=_last_core())
        try:
            # Loads torch: after the environment is set, and while the front starts.
            from windrow_sidecar.engines.builtin.server import serve

            return serve(settings, config, front)
        finally:
            front.stop()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _last_core() -> list[int]:
    """Decode takes its cores from the other end."""
    return sorted(os.sched_getaffinity(0))[-1:]


if __name__ == "__main__":
    sys.exit(main())
