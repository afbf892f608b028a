"""Refuse a model whose configuration is larger than its files, before any of it is built.

What transformers builds follows `config.json` alone: layers without weights are made up, in memory
and one Python object after the other. So a few bytes of a tenant's folder could take all memory of
the machine, or hold a worker for an hour.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from windrow.errors import UserError
from windrow_sidecar.engines.streaming.tensor_files import stored_tensors
from windrow_sidecar.engines.weight_files import unusable
from windrow_sidecar.finetune.data.cpu_limit import ComputesTooLong, cpu_limit

# The deepest models have some hundred layers; each is built in milliseconds.
_MOST_LAYERS: Final = 4096
_MOST_CONFIG_BYTES: Final = 16 << 20
_BUILT_WITHIN_S: Final = 120.0
# Codes of two bits are the narrowest: four weights in a byte. A head that is tied is stored once.
_WEIGHTS_OF_BYTE: Final = 4
_TIED: Final = 2
_REMEDY: Final = "Use the config.json that the model's weights were written with."


def check_claimed_size(directory: Path) -> None:
    """Check that a configuration describes no more than the checkpoint's files hold.

    Raises:
        UserError: it does.
    """
    for name, count in _layers(_config_of(directory)):
        if count > _MOST_LAYERS:
            raise _refused(f"{name} is {count}, more layers than any model has")
    if not (stored := stored_tensors(directory, codes=True)):
        return  # its reader says which files it takes
    numbers = sum(math.prod(tensor.shape) for tensor in stored.values())
    n_bytes = sum(tensor.n_bytes for tensor in stored.values())
    claimed = _claimed(directory)
    if claimed > max(_TIED * numbers, _WEIGHTS_OF_BYTE * n_bytes):
        raise _refused(f"it describes {claimed:,} weights, and the model's files hold {numbers:,}")


def _config_of(directory: Path) -> Any:  # noqa: ANN401 - JSON
    try:
        with (directory / "config.json").open("rb") as file:
            return json.loads(file.read(_MOST_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return None  # its reader says why


def _layers(config: Any, above: str = "") -> Iterator[tuple[str, int]]:  # noqa: ANN401 - JSON
    """Yield the numbers of layers that a configuration names, those of its parts included."""
    for name, value in config.items() if isinstance(config, dict) else ():
        if isinstance(value, dict):
            yield from _layers(value, f"{above}{name}.")
        elif "layer" in name and isinstance(value, int) and not isinstance(value, bool):
            yield f"{above}{name}", value


def _claimed(directory: Path) -> int:
    """Return how many weights the configuration describes; 0: its builder says what is wrong."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with cpu_limit(_BUILT_WITHIN_S), torch.device("meta"):
            config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
            model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
            return sum(parameter.numel() for parameter in model.parameters())
    except ComputesTooLong:
        raise _refused(f"its model is not built within {_BUILT_WITHIN_S:.0f} s") from None
    except Exception:  # noqa: BLE001 - libraries raise anything; who loads it tells its user
        return 0


def _refused(problem: str) -> UserError:
    return unusable(f"config.json: {problem}", _REMEDY)
