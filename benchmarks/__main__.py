"""Run the benchmarks that this machine can run and print goal against measured (`make bench`).

Example: python -m benchmarks --into /tmp/results --quick
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Nothing to run in them.
LIBRARIES = {"__main__", "harness", "host_arms", "partition", "shapes", "torch_shim"}
BY_HAND = {"harvest", "coverage", "proof"}  # takes hours; asks for checkouts, for an output


def main() -> int:
    """Run each benchmark as a process of its own; return how many failed."""
    names = sorted(p.stem for p in HERE.glob("*.py") if p.stem not in LIBRARIES | BY_HAND)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, help="folder for the JSON files")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("names", nargs="*", help=f"which (default: all of {', '.join(names)})")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(names))
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(names)}")
    failed = 0
    for name in options.names or names:
        command = [sys.executable, "-m", f"benchmarks.{name}"]
        if options.into:
            command += ["--json", str(options.into / f"{name}.json")]
        if options.quick:
            command.append("--quick")
        failed += subprocess.run(command, cwd=HERE.parent, check=False).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
