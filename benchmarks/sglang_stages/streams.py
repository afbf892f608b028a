"""Play a steady load of streamed requests against SGLang, and time their tokens.

Plain sockets and no JSON in the way: at 32 streams a client that parses each line would be what is
measured. All requests count as those whose KV a prefill instance has sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

_TOKENS = b'"completion_tokens":'


@dataclass
class Heard:
    """Times of tokens, in seconds of CLOCK_MONOTONIC.

    Attributes:
        gaps: when a token came, and how many milliseconds after the one before.
        ids: tokens of the last short answer.
        errors: what requests failed with.
        done: requests that have ended.
    """

    gaps: list[tuple[float, float]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    done: int = 0

    def between(self, begin_s: float, end_s: float) -> list[float]:
        """Return the gaps of tokens that came in that time, milliseconds."""
        return [gap for at, gap in self.gaps if begin_s <= at < end_s]


async def ask(port: int, heard: Heard, *, context: int, generate: int, **more: Any) -> None:
    """Stream one greedy answer of so many tokens to a prompt of so many random ones.

    `more`: of the request's body. Raises RuntimeError with the server's words where it refuses.
    """
    draw = random.Random(more.pop("seed", None))
    body = {
        "input_ids": [draw.randrange(5, 200) for _ in range(context)],
        "sampling_params": {"max_new_tokens": generate, "temperature": 0, "ignore_eos": True},
        "stream": True,
        "bootstrap_host": "2.2.2.2",
        "bootstrap_room": draw.getrandbits(62),
        **more,
    }
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    try:
        text = json.dumps(body).encode()
        head = "POST /generate HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
        writer.write(head.encode() + text)
        await writer.drain()
        status = await reader.readline()
        if b" 200 " not in status:
            rest = await reader.read(2000)
            raise RuntimeError(f"{status!r} {rest[-400:]!r}")
        await _listen(reader, heard, short=generate <= 64)
    finally:
        writer.close()
    heard.done += 1


async def _listen(reader: asyncio.StreamReader, heard: Heard, *, short: bool) -> None:
    seen, last_s = 0, 0.0
    async for line in reader:
        at = line.rfind(_TOKENS)
        if at < 0:
            if b'"error"' in line:
                raise RuntimeError(line[:300].decode(errors="replace"))
            continue
        now_s = time.monotonic()
        tokens = int(line[at + len(_TOKENS) : at + len(_TOKENS) + 12].split(b",")[0].split(b"}")[0])
        if short:  # each line has all of them so far
            heard.ids = json.loads(line.partition(b"data:")[2]).get("output_ids", heard.ids)
        if seen and tokens > seen:
            heard.gaps.append((now_s, 1000 * (now_s - last_s) / (tokens - seen)))
        seen, last_s = tokens, now_s


class SteadyLoad:
    """Keep so many requests in flight all the time; a context manager."""

    def __init__(self, port: int, *, requests: int, context: int, generate: int) -> None:
        self._port, self._requests = port, requests
        self._context, self._generate = context, generate
        self.heard = Heard()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> SteadyLoad:
        self._tasks = [asyncio.create_task(self._go_on(n)) for n in range(self._requests)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _go_on(self, number: int) -> None:
        # The first answers are of different lengths, so that requests do not all end at once.
        generate = max(16, self._generate * (number + 1) // self._requests)
        while True:
            try:
                await ask(self._port, self.heard, context=self._context, generate=generate)
            except (RuntimeError, OSError) as error:
                self.heard.errors.append(str(error)[:300])
                await asyncio.sleep(0.5)
            generate = self._generate


async def play(
    port: int, *, requests: int, context: int, generate: int, lead_s: float, seconds: float
) -> tuple[list[float], Heard]:
    """Return the gaps (ms) of the tokens that came in `seconds`, after a lead, and all that was."""
    load = SteadyLoad(port, requests=requests, context=context, generate=generate)
    async with load:
        await asyncio.sleep(lead_s)
        begin_s = time.monotonic()
        await asyncio.sleep(seconds)
        return load.heard.between(begin_s, time.monotonic()), load.heard


async def is_up(port: int) -> bool:
    """Return whether a server answers there."""
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        status = await reader.readline()
        writer.close()
        return b" 200 " in status
    return False
