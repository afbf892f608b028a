"""The distribution that these packages are installed from. No package index has it yet."""

from __future__ import annotations

from importlib.metadata import version
from typing import Final

# Its name; `windrow` belongs to another project there.
DISTRIBUTION: Final = "windrow-harvest"


def installed_version() -> str:
    """Return the version that is installed."""
    return version(DISTRIBUTION)


def install_extra(extra: str) -> str:
    """Return the command that adds an extra to an installation, for the remedy of an error."""
    return f'pip install "$(ls windrow_harvest-*.whl)[{extra}]" (docs/operations/install.md)'


def install_client(scheme: str) -> str:
    """Return how a client for URLs of a scheme is installed, for the remedy of an error."""
    if scheme == "s3":
        return install_extra("s3")
    return "install the package that the error names"
