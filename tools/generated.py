"""Write the committed files that are made from the code, or say which of them are stale."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def write_or_check(
    about: str,
    wanted: Callable[[], Mapping[Path, str]],
    *,
    checked: Callable[[], Mapping[Path, str]] | None = None,
) -> None:
    """Run as a generator's command line, and end: with 1 where `--check` finds a stale file.

    Args:
        about: what `--help` says.
        wanted: the content that each file below the repository should have.
        checked: those that `--check` compares, where they are not all of `wanted`.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--check", action="store_true", help="only say which files are stale")
    check = parser.parse_args().check
    stale = [
        (path, text)
        for path, text in (checked or wanted if check else wanted)().items()
        if not path.exists() or path.read_text() != text
    ]
    for path, text in stale:
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        print(f"{'stale' if check else 'wrote'}: {path.relative_to(ROOT)}")
    sys.exit(1 if check and stale else 0)
