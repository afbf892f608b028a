"""Write the gRPC stubs of proto/windrow/v1 to api/windrow/proto (`make proto`)."""

from __future__ import annotations

import argparse
import re
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
STUBS = ROOT / "api" / "windrow" / "proto"


def generate(into: Path) -> list[Path]:
    """Write the stubs of every file of the wire to `into`; return what was written."""
    sources = sorted((PROTO / "windrow" / "v1").glob("*.proto"))
    with tempfile.TemporaryDirectory() as scratch:
        status = protoc.main(
            [
                "protoc",
                f"-I{PROTO}",
                f"-I{resources.files('grpc_tools') / '_proto'}",
                f"--python_out={scratch}",
                f"--pyi_out={scratch}",
                f"--grpc_python_out={scratch}",
                *map(str, sources),
            ]
        )
        if status != 0:
            raise SystemExit(f"protoc failed with status {status}")
        written = []
        for stub in sorted(Path(scratch, "windrow", "v1").iterdir()):
            # protoc imports by proto package (`windrow.v1`), which is not where the stubs live.
            text = re.sub(
                r"^from windrow\.v1 import", "from . import", stub.read_text(), flags=re.MULTILINE
            )
            target = into / stub.name
            target.write_text(text)
            written.append(target)
    return written


def main() -> None:
    """Generate the stubs in place."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, default=STUBS, help="folder that receives the stubs")
    for path in generate(parser.parse_args().into):
        print(path)


if __name__ == "__main__":
    main()
