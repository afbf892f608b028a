"""SGLang as the engine of local decode pods: which installation, and how it decodes on cores."""

from __future__ import annotations

import os
from pathlib import Path

from windrow import openmp
from windrow.errors import UserError

ENV_ENVIRONMENT = "SGLANG_VENV"
_CHECKOUT = Path(__file__).resolve().parents[3]
_NAME = ".venv-sglang"
COMMAND = ["windrow", "run", "--", "python", "-m", "sglang.launch_server"]
# As many KV tokens and requests as the built-in engine has by default.
KV_TOKENS, REQUESTS = 32768, 64
ON_CORES = [
    "--device=cpu",
    "--dtype=float32",
    "--attention-backend=torch_native",
    "--sampling-backend=pytorch",
    "--disable-cuda-graph",
    "--disaggregation-decode-retraction-backup=cpu_tensor",
    f"--max-total-tokens={KV_TOKENS}",
    f"--max-running-requests={REQUESTS}",
    "--page-size=16",
    "--num-reserved-decode-tokens=128",
    "--sleep-on-idle",
    "--skip-server-warmup",
    "--log-level=info",
]


def find_environment() -> Path:
    """Return the virtual environment that `make sglang` has made, or that SGLANG_VENV names.

    Raises UserError where there is none.
    """
    given = os.environ.get(ENV_ENVIRONMENT)
    for folder in [Path(given)] if given else [_CHECKOUT / _NAME, Path.cwd() / _NAME]:
        if (folder / "bin" / "python").exists() and (folder / "bin" / "windrow").exists():
            return folder.absolute()
    raise UserError(
        f"{given or _NAME} holds no SGLang with Windrow",
        field="--engine sglang",
        remedy=f"Run `make sglang`, or name its environment in {ENV_ENVIRONMENT}.",
    )


def variables(environment: Path) -> dict[str, str]:
    """Return what a container needs to find that installation and to decode on cores."""
    path = os.environ.get("PATH", os.defpath)
    return {
        "PATH": f"{environment / 'bin'}{os.pathsep}{path}",
        "SGLANG_USE_CPU_ENGINE": "1",
        # As the built-in engine has it: the worker is on the same cores.
        **openmp.DECODE,
        # A probe asks whether the server is there; it shall not decode a token each second.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    }
