"""Refuse patterns that take Python's backtracking engine too long on a model's names.

peft matches patterns in the worker, where a match cannot be interrupted and holds the interpreter's
lock. So they are matched once before, in a process that the kernel ends after two seconds of
computing: those of real jobs need some milliseconds for thousands of names.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence

CPU_SECONDS = 2
# A process that gets idle time only may wait long for its two seconds.
_WAIT_S = 600

_MATCH = f"""
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({CPU_SECONDS}, {CPU_SECONDS}))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
patterns, names = json.load(sys.stdin)
for field, pattern in patterns:
    print(field, flush=True)
    compiled = re.compile(pattern)
    for name in names:
        compiled.match(name)
print("done", flush=True)
"""


def slow_pattern(patterns: Sequence[tuple[str, str]], names: Iterable[str]) -> str | None:
    """Return the field of the first pattern that is too slow on a model's names; None: none is.

    Args:
        patterns: (field, expression as it is matched from a name's begin).
        names: of the model's modules.

    Raises:
        subprocess.TimeoutExpired: the process got no time to match.
    """
    if not patterns:
        return None
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _MATCH],
        input=json.dumps([patterns, list(names)]),
        capture_output=True,
        text=True,
        timeout=_WAIT_S,
        check=False,
    )
    begun = done.stdout.split()
    return None if begun[-1:] == ["done"] else (begun[-1] if begun else patterns[0][0])


def as_matched(
    target: str | None, ranks: Mapping[str, object], alphas: Mapping[str, object]
) -> list[tuple[str, str]]:
    """Return the patterns of a LoRA job as peft matches them, each with its field.

    Args:
        target: `targetPattern`.
        ranks: `rankPattern`.
        alphas: `alphaPattern`.
    """
    found = [] if target is None else [("targetPattern", rf"(?:{target})\Z")]
    for field, numbers in (("rankPattern", ranks), ("alphaPattern", alphas)):
        found += [(field, rf"(.*\.)?({key})$") for key in numbers]
    return found
