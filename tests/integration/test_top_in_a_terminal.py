"""`windrow top` in a real terminal: what is drawn, its keys, its size, and how it leaves."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from waiting import DEADLINE_SECONDS, wait_until

CONTROL = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|[()][A-Z0-9]|[=>78])|\r")
HOME = "\x1b[H"  # each frame begins in the corner


class Terminal:
    """A pseudo-terminal with a program in it."""

    def __init__(self, command, columns, rows):
        self.master, self.side = pty.openpty()
        self.resize(columns, rows)
        self.before = termios.tcgetattr(self.side)
        # A colour terminal of no particular kind, whatever runs the tests.
        hidden = ("NO_COLOR", "COLUMNS", "LINES", "CI")
        environment = {k: v for k, v in os.environ.items() if k not in hidden}
        self.process = subprocess.Popen(
            command,
            stdin=self.side,
            stdout=self.side,
            stderr=self.side,
            env=environment | {"TERM": "xterm-256color"},
            start_new_session=True,
        )
        self._seen = ""

    def resize(self, columns, rows):
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys):
        os.write(self.master, keys.encode())

    def frames(self):
        """Return the frames so far, without colours."""
        while select.select([self.master], [], [], 0.05)[0]:
            self._seen += os.read(self.master, 65536).decode(errors="ignore")
        return [CONTROL.sub("", frame) for frame in self._seen.split(HOME)]

    def await_frame(self, *words):
        """Return the first new frame that has all these words; older ones are forgotten."""

        def found():
            whole = self.frames()
            return next((f for f in whole if all(word in f for word in words)), None)

        frame = wait_until(found, f"a frame with {words}; seen: {self.frames()[-1]}")
        self._seen = ""
        return frame

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(DEADLINE_SECONDS)
        os.close(self.master)
        os.close(self.side)


@pytest.fixture
def top(cluster, control_plane):
    """The display over three slots, one of which is over its objective."""
    cluster.policy()
    for name, p99 in (("decode-a", 0.02), ("decode-b", 0.05), ("decode-c", 0.03)):
        sidecar = cluster.attach(cluster.pod(name))
        sidecar.beat(steps=1000, tpot_p99_seconds=p99, batch=4, decode_units=2)
    program = Path(sys.executable).with_name("windrow")
    command = [program, "top", "--namespace", cluster.namespace]
    command += ["--kubeconfig", str(control_plane.kubeconfig), "--watch", "1"]
    terminal = Terminal(command, 120, 40)
    yield terminal
    terminal.close()


def order(frame):
    return re.findall(r"^decode-[abc]", frame, re.MULTILINE)


def test_keys_change_the_order_and_a_small_terminal_shows_what_fits(top):
    frame = top.await_frame("3 slots", "20.0ms", "50.0ms", "30.0ms", "sorted by name")
    assert order(frame) == ["decode-a", "decode-b", "decode-c"]
    assert "40.0ms" in frame  # the objective
    assert "OVER" in frame

    top.press("s")
    assert order(top.await_frame("sorted by tpot"))[0] == "decode-b"
    top.press("ssssss")  # faster than it draws: once around, none is lost
    top.await_frame("sorted by tpot")

    top.resize(80, 10)
    frame = top.await_frame("… 1 more slot,", "q: quit")
    assert "OVER" not in frame
    assert all(len(line) <= 80 for line in frame.splitlines())

    top.press("q")
    wait_until(lambda: top.process.poll() is not None or not top.frames(), "it ends")
    assert top.process.wait(DEADLINE_SECONDS) == 0
    assert termios.tcgetattr(top.side) == top.before, "the terminal is as it was"


def test_it_leaves_the_terminal_as_it_was_when_it_is_interrupted(top):
    top.await_frame("3 slots")
    top.process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + DEADLINE_SECONDS
    while top.process.poll() is None and time.monotonic() < deadline:
        top.frames()  # who draws must be read
    assert top.process.poll() in (0, 130)
    assert termios.tcgetattr(top.side) == top.before
