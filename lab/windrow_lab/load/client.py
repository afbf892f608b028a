"""The client that serving is measured under: open loop, outside of the pods, one process.

    python -m windrow_lab.load --endpoint http://127.0.0.1:8001 --seconds 60 --rate 1.0 --seed 7

Open loop: a request is sent when its time has come, whether the earlier ones are done or not, so a
slow server meets a growing batch, as it does in production. Prompts arrive as they do on a decode
instance: with a bootstrap address, and their KV computed elsewhere. `--rate 1.0` is the load of
one small device for each endpoint (see `DEVICE_PER_SECOND`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp

from windrow.errors import UserError
from windrow_lab.load import generator
from windrow_lab.load.trace import TraceRequest, busy_stretch, check_trace, paced, read_trace

# Requests a second that one small device (two cores, the tiny model) is loaded with at rate 1.0.
# The trace's own 5.53 a second came to a large cluster; lengths and burstiness stay the trace's.
DEVICE_PER_SECOND = 3.0
# SGLang's address of a prefill instance that does not exist: its fake transfer backend.
FAKE_BOOTSTRAP_HOST = "2.2.2.2"
MOST_IN_FLIGHT = 512
SEARCHED_S = 600.0


@dataclass(frozen=True, slots=True)
class LoadAnswer:
    """One request as its client saw it. Times in seconds of the process's monotonic clock."""

    at_s: float  # when it was due
    late_s: float  # how much later it was sent
    prompt_tokens: int
    completion_tokens: int
    ttft_s: float
    tpot_s: float  # mean, between the first and the last token; 0 with fewer than two
    error: str


def schedule(
    *,
    seconds: float,
    rate: float,
    seed: int,
    endpoints: int,
    trace: Path | None,
    busy: bool = False,
    like: generator.Like = "conv",
) -> list[TraceRequest]:
    """Return the requests of a run, for all endpoints together.

    Generated `like` a trace, or from a file of one. `busy`: not from the begin, but what
    `busy_stretch` finds in `SEARCHED_S`.

    Raises UserError for a rate or length that is not above zero, and as `read_trace` and
    `check_trace` do.
    """
    for name, value in (("--rate", rate), ("--seconds", seconds)):
        if not value > 0 or value == float("inf"):
            raise UserError(f"{value:g} is not above zero", field=name, remedy="Try 1.0 and 60.")
    per_second = rate * DEVICE_PER_SECOND * endpoints
    long_s = max(SEARCHED_S, seconds) if busy else seconds
    if trace is None:
        requests = generator.generate(per_second=per_second, seconds=long_s, seed=seed, like=like)
    else:
        recorded = read_trace(trace)
        check_trace(recorded, str(trace))
        requests = paced(recorded, per_second=per_second, seconds=long_s)
    if not busy:
        return requests
    return busy_stretch(requests, per_second=per_second, seconds=seconds)


def share_of(requests: Sequence[TraceRequest], endpoint: int, endpoints: int) -> list[TraceRequest]:
    """Return what one of several endpoints gets: every n-th, as a round-robin router deals."""
    return list(itertools.islice(requests, endpoint, None, endpoints))


def body_of(request: TraceRequest, room: int, draw: random.Random) -> bytes:
    """Return the JSON of one completion request with a prompt of printable bytes as token ids."""
    prompt = draw.choices(range(32, 127), k=max(1, request.prompt_tokens))
    return json.dumps(
        {
            "model": "default",
            "prompt": prompt,
            "max_tokens": max(1, request.output_tokens),
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "bootstrap_host": FAKE_BOOTSTRAP_HOST,
            "bootstrap_room": room,
        },
        separators=(",", ":"),
    ).encode()


class Client:
    """Sends a schedule to endpoints in turn and keeps what came back."""

    def __init__(self, session: aiohttp.ClientSession, endpoints: Sequence[str], seed: int) -> None:
        self._session, self._endpoints = session, endpoints
        self._draw = random.Random(seed)
        self._began = 0.0
        self.answers: list[LoadAnswer] = []

    async def play(self, requests: Sequence[TraceRequest], begin_s: float = 0.0) -> None:
        """Send every request at its time, from `begin_s` of the clock on; 0: from now on.

        Returns when the last answer is in.
        """
        self._began = begin_s or time.monotonic()
        in_flight: set[asyncio.Task[None]] = set()
        for i, request in enumerate(requests):
            # Built before it is due: encoding a long prompt must not make it late.
            body = body_of(request, i, self._draw)
            await asyncio.sleep(max(0.0, self._began + request.at_s - time.monotonic()))
            if len(in_flight) >= MOST_IN_FLIGHT:
                self._keep(request, time.monotonic(), error="not sent: too many in flight")
                continue
            endpoint = self._endpoints[i % len(self._endpoints)]
            task = asyncio.create_task(self._send(endpoint, request, body))
            in_flight.add(task)
            task.add_done_callback(in_flight.discard)
        await asyncio.gather(*in_flight)

    async def _send(self, endpoint: str, request: TraceRequest, body: bytes) -> None:
        sent = time.monotonic()
        first = last = sent
        usage: dict[str, int] = {}
        try:
            async with self._session.post(f"{endpoint}/v1/completions", data=body) as response:
                if response.status != 200:
                    text = (await response.text())[:200]
                    self._keep(request, sent, error=f"HTTP {response.status}: {text}")
                    return
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    last = time.monotonic()
                    first = last if first == sent else first
                    if b'"usage"' in line:
                        usage = json.loads(line[6:]).get("usage") or usage
        except (aiohttp.ClientError, TimeoutError) as e:
            self._keep(request, sent, error=f"{type(e).__name__}: {e}")
            return
        tokens = usage.get("completion_tokens", request.output_tokens)
        self._keep(request, sent, tokens=tokens, first=first, last=last)

    def _keep(
        self,
        request: TraceRequest,
        sent: float,
        *,
        tokens: int = 0,
        first: float = 0.0,
        last: float = 0.0,
        error: str = "",
    ) -> None:
        self.answers.append(
            LoadAnswer(
                at_s=request.at_s,
                late_s=max(0.0, sent - self._began - request.at_s),
                prompt_tokens=request.prompt_tokens,
                completion_tokens=tokens,
                ttft_s=max(0.0, first - sent),
                tpot_s=(last - first) / (tokens - 1) if tokens > 1 else 0.0,
                error=error,
            )
        )


async def run(
    endpoints: Sequence[str],
    requests: Sequence[TraceRequest],
    seed: int,
    *,
    begin_s: float = 0.0,
    cut_s: float | None = None,
) -> list[LoadAnswer]:
    """Play a schedule and return the answers, in order of their ends.

    `cut_s` after its begin what is not answered yet is hung up on, so that the engine is idle again
    at once; None: the last answer is waited for.
    """
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=120)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        timeout=timeout,
        connector=connector,
        headers={"Content-Type": "application/json"},
    ) as session:
        client = Client(session, endpoints, seed)
        until_s = None if cut_s is None else (begin_s or time.monotonic()) + cut_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until_s):  # the loop's clock is the monotonic one
                await client.play(requests, begin_s)
        return client.answers


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m windrow_lab.load",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--endpoint", action="append", required=True, help="repeat for several")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long requests arrive")
    parser.add_argument("--rate", type=float, default=1.0, help="1.0: one small device's load")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--trace", type=Path, help="a trace to play instead of the generator")
    parser.add_argument(
        "--like", choices=list(generator.NAMES), default="conv", help="the generator's model"
    )
    parser.add_argument(
        "--busy", action="store_true", help="of the trace, the first stretch with its mean rate"
    )
    parser.add_argument(
        "--begin-at", type=int, default=0, metavar="NS", help="of CLOCK_MONOTONIC; default: now"
    )
    parser.add_argument("--cut", type=float, help="hang up so many seconds after the begin")
    parser.add_argument("--json", type=Path, help="write every answer there")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as a process; 0: all answered, 1: some failed, 2: bad arguments."""
    options = parse(arguments)
    try:
        requests = schedule(
            seconds=options.seconds,
            rate=options.rate,
            seed=options.seed,
            endpoints=len(options.endpoint),
            trace=options.trace,
            busy=options.busy,
            like=options.like,
        )
    except UserError as e:
        sys.stderr.write(f"{e}\n")
        return 2
    answers = asyncio.run(
        run(
            options.endpoint,
            requests,
            options.seed,
            begin_s=options.begin_at / 1e9,
            cut_s=options.cut,
        )
    )
    failed = [a.error for a in answers if a.error]
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(a) for a in answers]) + "\n")
    sys.stdout.write(f"{len(answers) - len(failed)} of {len(answers)} requests answered\n")
    for error in sorted(set(failed))[:5]:
        sys.stderr.write(f"{error}\n")
    return 1 if failed else 0
