"""Draw what `windrow top` shows of a running cluster, as a picture for the docs.

    python tools/draw_top.py --looks 24 --out docs/images/top.svg

The picture is what the live display draws in a terminal of that width, after so many looks. Its
fonts are the reader's own: nothing is fetched.
"""

from __future__ import annotations

import argparse
import io
import re
import time
from collections import deque
from pathlib import Path

from rich.console import Console

from windrow.client import WindrowClient
from windrow_cli.top import Screen, remember
from windrow_lab.cluster.up import running_kubeconfig

_FONT = "font-family: ui-monospace, DejaVu Sans Mono, monospace;"


def main() -> None:
    """Look, and draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--looks", type=int, default=24, help="one a second")
    parser.add_argument("--width", type=int, default=120, help="columns of the terminal")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    talk = WindrowClient(running_kubeconfig())
    history: dict[str, deque[float]] = {}
    for _ in range(asked.looks):
        slots, jobs = talk.slots(namespace=None), talk.jobs(namespace=None)
        remember(history, slots)
        time.sleep(1.0)
    console = Console(record=True, width=asked.width, file=io.StringIO(), force_terminal=True)
    console.print(Screen(slots, jobs, history, "name"))
    text = console.export_svg(title="windrow top", clear=False)
    text = re.sub(r"@font-face \{.*?\}", "", text, flags=re.DOTALL)
    text = re.sub(r"font-family: Fira Code, monospace;", _FONT, text)
    asked.out.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n")


if __name__ == "__main__":
    main()
