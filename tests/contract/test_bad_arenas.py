"""Check what is foreign, broken or too large is refused by name, and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
import threading
from collections.abc import Callable

import pytest

from windrow_sidecar import _core
from windrow_sidecar._core import Arena, Geometry, Inspection
from windrow_sidecar.qos import view

# As csrc/include/windrow/socket.h has them.
REQUEST = struct.Struct("<QIIQ64s")
REPLY = struct.Struct("<QII7qQQ256s")
MAGIC = 0x31776F72646E6977
SIZES = (2, 2, 32, 4, 8192, 16, 0)  # the last is the layout
ODD, MORE = (2, 2, 32, 4, 5120, 16, 0), (2, 2, 32, 4, 8192, 17, 0)
INSPECT = 3


class Impostor:
    """Answers on an arena's socket with what it is told to; descriptors only the first time."""

    def __init__(self, path: str, reply: bytes, fds: list[int]) -> None:
        self._reply, self._fds = reply, fds
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path)
        self._listener.listen()
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def _answer(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            with connection:
                fds = self._fds
                while connection.recv(REQUEST.size):
                    socket.send_fds(connection, [self._reply], fds)
                    fds = []

    def close(self) -> None:
        self._thread.join(timeout=60)
        self._listener.close()
        for fd in self._fds:
            os.close(fd)


def reply(**change) -> bytes:
    said = {"magic": MAGIC, "version": _core.LAYOUT_VERSION, "sizes": SIZES, "descriptors": 2}
    said |= change
    return REPLY.pack(
        said["magic"], said["version"], 0, *said["sizes"], said["descriptors"], 0, b""
    )


def memory(size: int, content: bytes = b"") -> int:
    fd = os.memfd_create("test")
    os.truncate(fd, size)
    os.pwrite(fd, content, 0)
    return fd


def control(**change) -> int:
    """A control region whose head may be wrong, over an empty page and table."""
    said = {"magic": MAGIC, "version": _core.LAYOUT_VERSION, "sizes": SIZES, "table": b""} | change
    head = struct.pack("<QII7q16s", said["magic"], said["version"], 0, *said["sizes"], b"host")
    _, first, length, _ = _core.LAYOUT[-1]
    table = first + length
    fd = memory(4096, head)
    os.pwrite(fd, said["table"], table)
    return fd


def blocks() -> int:
    return memory(16 * 4 * 8192)


LENT_TO_NOBODY = bytes(128) + struct.pack("<Q", 2)


@pytest.mark.parametrize(
    ("answer", "fds", "message"),
    [
        (reply(magic=1), [control, blocks], "is not Windrow"),
        (reply(version=99), [control, blocks], "same release on both sides"),
        (reply(sizes=ODD), [lambda: control(sizes=ODD), blocks], "multiple of 4096"),
        (reply(sizes=MORE), [lambda: control(sizes=MORE), blocks], "cannot be mapped: imported"),
        (reply(), [lambda: control(magic=1), blocks], "region is not Windrow's"),
        (reply(), [lambda: control(version=99), blocks], "control region has layout 99"),
        (reply(), [lambda: control(sizes=(2, 2, 32, 4, 4096, 16, 0)), blocks], "another geometry"),
        (reply(), [lambda: control(table=LENT_TO_NOBODY), blocks], "chunk table is broken"),
        (reply(), [lambda: memory(100), blocks], "imported memory has 100 bytes"),
        (reply(), [control], "1 of 2 descriptors"),
        (reply(descriptors=0), [], "0 of 0 descriptors"),
        (b"hello", [], "hung up"),
        (reply()[:100], [], "half an answer"),
    ],
)
def test_a_foreign_or_broken_arena_is_not_attached(run_dir, answer, fds, message):
    before = len(os.listdir("/proc/self/fd"))
    impostor = Impostor(str(run_dir / "a.sock"), answer, [make() for make in fds])
    with pytest.raises(_core.AttachError, match=message):
        Arena.attach(str(run_dir / "a.sock"), timeout_s=5)
    impostor.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_foreign_control_region_is_not_looked_at(run_dir):
    answer = reply(descriptors=1)
    impostor = Impostor(str(run_dir / "a.sock"), answer, [memory(4096, b"not ours")])
    with pytest.raises(_core.AttachError, match="not Windrow's"):
        Inspection.open(str(run_dir / "a.sock"))
    impostor.close()


def test_an_arena_larger_than_the_device_is_refused_before_anything_is_made(arena):
    sizes = {"layers": 2, "kv_heads": 2, "head_dim": 32, "dtype_bytes": 4, "block_bytes": 2**26}
    with pytest.raises(
        _core.GeometryError, match=r"more than the device's \d+; at most \d+ chunks"
    ):
        Arena.create(Geometry(**sizes, chunks=2**20), reserved_chunks=0)


CHILD_LIMITED = """
import resource, sys
from pathlib import Path
from windrow_sidecar._core import Arena, Error, Geometry
kind, most = getattr(resource, sys.argv[1]), int(sys.argv[2])
arena = Geometry(layers=1, kv_heads=1, head_dim=32, dtype_bytes=4, block_bytes=1 << 20, chunks=32)
if sys.argv[1] == "RLIMIT_AS":  # beyond what the process has already
    most += int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
hard = int(sys.argv[3]) if len(sys.argv) > 3 else resource.getrlimit(kind)[1]
resource.setrlimit(kind, (most, hard))
try:
    Arena.create(arena, reserved_chunks=0)
except Error as error:
    print(error)
else:
    print("made with", *resource.getrlimit(kind))
"""


@pytest.mark.parametrize(
    ("limit", "most", "message"),
    [
        ("RLIMIT_FSIZE", 65536, "raise RLIMIT_FSIZE"),
        ("RLIMIT_AS", 16 << 20, "raise RLIMIT_AS"),
    ],
)
def test_a_limit_of_the_process_is_named_with_what_to_do(child, limit, most, message):
    output, errors = child(CHILD_LIMITED, limit, most).communicate(timeout=60)
    assert message in output, errors


def test_a_soft_limit_of_descriptors_is_raised_and_only_a_hard_one_refuses(child):
    """A shell's soft limit is 1024, and an arena of one memory for each block wants thousands."""
    raised = child(CHILD_LIMITED, "RLIMIT_NOFILE", 6, 64)
    refused = child(CHILD_LIMITED, "RLIMIT_NOFILE", 6, 6)
    output, errors = raised.communicate(timeout=60)
    assert output == "made with 64 64\n", errors
    output, errors = refused.communicate(timeout=60)
    assert "the hard limit RLIMIT_NOFILE is 6" in output, errors
    assert re.search(r"raise it to at least \d+ \(ulimit -Hn", output), output


def raw_control(path: str) -> bytes:
    """The bytes of a served arena's control region, as any process of the user may read them."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.connect(path)
        peer.send(REQUEST.pack(MAGIC, _core.LAYOUT_VERSION, INSPECT, 0, b""))
        _, fds, _, _ = socket.recv_fds(peer, REPLY.size, 4)
    try:
        return os.pread(fds[0], 4096, 0)
    finally:
        os.close(fds[0])


def first_of(part: str) -> int:
    return next(first for name, first, _, _ in _core.LAYOUT if name == part)


def record_at(raw: bytes, part: str, words: int) -> tuple[int, ...]:
    """Sequence, a line for waiting, two copies: the even or the odd one is whole."""
    first = first_of(part)
    (sequence,) = struct.unpack_from("<Q", raw, first)
    return struct.unpack_from(f"<{words}q", raw, first + 128 + sequence % 2 * words * 8)


def flat(record: tuple) -> tuple[int, ...]:
    return tuple(w for field in record for w in (field if isinstance(field, tuple) else (field,)))


def test_the_bytes_of_the_page_are_the_records_of_view_py_at_the_written_places(served):
    owner, path = served
    page = owner.page
    for n in (100, 200):  # into either copy
        page.publish_view(view.View(*range(n, n + 10)))
        page.publish_grant(view.Grant(*range(n, n + 12)))
        estimates = tuple(range(view.LEVELS_MAX))
        page.publish_offer(view.Offer(*range(n, n + 6), estimates, *range(n + 7, n + 15)))
        raw = raw_control(path)
        publications: list[tuple[str, type, Callable[[], tuple]]] = [
            ("view", view.View, page.read_view),
            ("grant", view.Grant, page.read_grant),
            ("offer", view.Offer, page.read_offer),
        ]
        for part, record, read in publications:
            words = flat(read())
            # All but the heartbeat: what is read has the newest one.
            assert record_at(raw, part, len(words))[:-1] == words[:-1]
            assert words[0] == n
            assert len(read()) == len(record._fields)
        (epoch,) = struct.unpack_from("<q", raw, first_of("pause epoch"))
        assert epoch == page.pause_epoch


def test_every_writer_has_cache_lines_of_its_own():
    assert all(first % 64 == 0 and length % 64 == 0 for _, first, length, _ in _core.LAYOUT)
    ends = [first + length for _, first, length, _ in _core.LAYOUT]
    assert [first for _, first, _, _ in _core.LAYOUT] == [0, *ends[:-1]]
