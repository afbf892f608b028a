"""Add Windrow's wheel to the Python of an SGLang image, and change nothing that SGLang pins.

    python3 tools/sglang/add_wheel.py windrow_harvest-*.whl --extras sidecar,s3

It uses the Python that runs it, its pip, and the standard library. It ends with 1 where a package
would change or go, where `pip check` complains of something that it did not complain of before, or
where the image's SGLang is not a tested version.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

_NAME = "windrow-harvest"
_VERSION_CHECK = """
import os
from importlib.metadata import version
from windrow.errors import UserError
from windrow.sglang import ENV_UNTESTED, check_version
try:
    check_version(version("sglang"), insisted=os.environ.get(ENV_UNTESTED) == "1")
except UserError as error:
    raise SystemExit(f"add_wheel: {error}")
"""


def main(arguments: list[str] | None = None) -> int:
    """Add the wheel; return 0 when it is there and everything else is as before."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--extras", default="sidecar,s3", help="[%(default)s]")
    args = parser.parse_args(arguments)
    if not args.wheel.is_file():
        return _fail(f"{args.wheel} is not a file. Build it: pip wheel --no-deps -w WHEELS SOURCE")
    if importlib.util.find_spec("pip") is None:
        return _fail(f"{sys.executable} has no pip. Name the Python that runs SGLang")
    before, complaints = _versions(), _complaints()
    if "sglang" not in before:
        return _fail(f"{sys.executable} has no SGLang. Name the Python that runs SGLang")
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as pins:
        pins.writelines(f"{name}=={version}\n" for name, version in before.items() if name != _NAME)
        pins.flush()
        wanted = f"{args.wheel.resolve()}[{args.extras}]"
        done = _pip("install", "--no-cache-dir", "--constraint", pins.name, wanted)
    if done.returncode:
        return _fail(
            "the wheel's dependencies do not fit what the image has; nothing was changed:\n"
            + done.stdout
            + done.stderr
        )
    after = _versions()
    changed = [
        f"{name} {version} -> {after.get(name, 'removed')}"
        for name, version in before.items()
        if name != _NAME and after.get(name) != version
    ]
    if changed:
        return _fail("packages of the image changed: " + ", ".join(changed))
    if broken := _complaints() - complaints:
        return _fail("pip check has new complaints:\n" + "\n".join(sorted(broken)))
    added = [f"{name} {after[name]}" for name in sorted(after.keys() - before.keys())]
    print("added: " + ", ".join(added))
    return subprocess.run([sys.executable, "-c", _VERSION_CHECK], check=False).returncode


def _versions() -> dict[str, str]:
    """Return the installed version of each distribution, by its normalized name."""
    code = (
        "import re; from importlib import metadata\n"
        "for d in metadata.distributions():\n"
        "    print(re.sub('[-_.]+', '-', d.name).lower(), d.version)"
    )
    # In a process of its own: this one has looked at its folders before pip wrote to them.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # The first of two wins, as it does when Python imports.
    pairs = [line.split(" ", 1) for line in reversed(done.stdout.splitlines())]
    return dict(sorted((name, version) for name, version in pairs))


def _complaints() -> set[str]:
    return set(_pip("check").stdout.splitlines()) - {"No broken requirements found."}


def _pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    # The image's Python is its distribution's where SGLang was installed into that.
    environment = {**os.environ, "PIP_BREAK_SYSTEM_PACKAGES": "1", "PIP_ROOT_USER_ACTION": "ignore"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def _fail(why: str) -> int:
    print(f"add_wheel: {why}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
