"""The HTTP side of the built-in engine: a process of its own, out of decode's interpreter.

Started by the engine with a listening socket and one end of a channel; ends when the engine does.
It imports no torch: it is there in half a second and small.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web
from tokenizers import Tokenizer

from windrow.errors import UserError
from windrow_sidecar.engines.builtin.link import EngineLink, RequestUpdate
from windrow_sidecar.engines.builtin.web import api
from windrow_sidecar.engines.builtin.web.answer import CompletionAnswer
from windrow_sidecar.engines.builtin.web.channel import SocketChannel

_log = logging.getLogger(__name__)

# Behind decode, which shares the device's cores with it.
NICENESS = 5
_MAX_BODY_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """Settings that the engine passes to the front on its command line, as JSON."""

    channel_fd: int
    listen_fd: int
    model_path: str
    served_name: str
    eos_token_ids: list[int]
    disaggregated: bool
    cpus: list[int]  # where it runs: away from decode's first cores

    def to_json(self) -> str:
        """Return the settings for the command line."""
        return json.dumps({name: getattr(self, name) for name in self.__slots__})


class Front:
    """The routes."""

    def __init__(self, settings: FrontSettings, tokenizer: Tokenizer, link: EngineLink) -> None:
        self._settings, self._tokenizer, self._link = settings, tokenizer, link
        self._vocab = tokenizer.get_vocab_size()

    def application(self) -> web.Application:
        """Return the routes as an application."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[_errors])
        app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/health_generate", self.health_generate),
                web.get("/v1/models", self.models),
                web.post("/v1/completions", self.completions),
            ]
        )
        return app

    async def health(self, _request: web.Request) -> web.Response:
        """200 once requests are welcome, 503 before."""
        return web.Response(status=200 if self._link.max_context else 503)

    async def health_generate(self, _request: web.Request) -> web.Response:
        """200 when a token comes out within ten seconds."""
        self._check_ready()
        body = api.parse_body({"prompt": [0], "max_tokens": 1, "temperature": 0.0})
        async with asyncio.timeout(10), self._generation("health", [0], body) as pieces:
            async for _ in pieces:
                pass
        return web.Response()

    async def models(self, _request: web.Request) -> web.Response:
        """The one model that is served."""
        card = {
            "id": self._settings.served_name,
            "object": "model",
            "owned_by": "windrow",
            "root": self._settings.model_path,
            "max_model_len": self._link.max_context or None,
        }
        return web.json_response({"object": "list", "data": [card]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """OpenAI's completions, whole or streamed."""
        self._check_ready()
        try:
            raw = await request.json()
        except ValueError as error:
            raise UserError(
                f"the body is not JSON ({error})", remedy="Send a JSON object."
            ) from error
        body = api.parse_body(raw)
        api.check_source(body, disaggregated=self._settings.disaggregated)
        prompt = self._tokens(body.prompt)
        api.check_length(len(prompt), body.max_tokens, self._link.max_context)
        name = f"cmpl-{secrets.token_hex(12)}"
        answer = CompletionAnswer(name, self._settings.served_name, len(prompt), body, self._decode)
        async with self._generation(name, prompt, body) as pieces:
            if body.stream:
                return await _stream(request, answer, pieces)
            async for piece in pieces:
                answer.add(piece)
                if answer.is_done:
                    break
            return web.json_response(answer.whole())

    @asynccontextmanager
    async def _generation(
        self, name: str, prompt: list[int], body: api.CompletionBody
    ) -> AsyncIterator[AsyncIterator[RequestUpdate]]:
        """Run a request in the engine; leaving early (a client that hangs up) cancels it there."""
        ends = set(body.stop_token_ids or [])
        if not body.ignore_eos:
            ends |= set(self._settings.eos_token_ids)
        request_id, inbox = self._link.submit(
            name=name,
            prompt=tuple(prompt),
            max_tokens=body.max_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            seed=secrets.randbits(62) if body.seed is None else body.seed,
            stop_token_ids=frozenset(ends),
            kv_arrives=body.kv_arrives,
            deferral_us=round(1000 * (body.deferral_ms or 0)),
            arrived_ns=time.monotonic_ns(),
        )
        try:
            yield _pieces(inbox)
        except BaseException:  # the client hung up, or we failed
            self._link.forget(request_id, error="cancelled")
            raise
        self._link.forget(request_id, error="")  # a stop string: it has had its fill

    def _tokens(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            encoded: list[int] = self._tokenizer.encode(prompt).ids
            return encoded
        if max(prompt) >= self._vocab:
            raise UserError(
                f"token {max(prompt)} is not in the vocabulary of {self._vocab}",
                field="prompt",
                remedy="Encode the prompt with this model's tokenizer.",
            )
        return prompt

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def _check_ready(self) -> None:
        if not self._link.max_context:
            raise web.HTTPServiceUnavailable(text="the engine is starting")


async def _pieces(inbox: asyncio.Queue[RequestUpdate]) -> AsyncIterator[RequestUpdate]:
    while True:
        piece = await inbox.get()
        yield piece
        if piece.end is not None:
            return


async def _stream(
    request: web.Request, answer: CompletionAnswer, pieces: AsyncIterator[RequestUpdate]
) -> web.StreamResponse:
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    )
    await response.prepare(request)
    async for piece in pieces:
        text = answer.add(piece)
        if text or answer.is_done:
            await response.write(_event(answer.chunk(text)))
        if answer.is_done:
            break
    if answer.wants_usage:
        await response.write(_event(answer.usage_chunk()))
    await response.write(b"data: [DONE]\n\n")
    return response


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Give every failure the shape of OpenAI's error object."""
    try:
        return await handler(request)
    except UserError as error:
        return web.json_response(
            api.error_object(str(error), kind="invalid_request_error", field=error.field),
            status=400,
        )
    except web.HTTPException as error:
        kind = "invalid_request_error" if error.status < 500 else "service_unavailable"
        return web.json_response(
            api.error_object(error.text or error.reason, kind=kind), status=error.status
        )
    except TimeoutError:
        return web.json_response(
            api.error_object("no token came out in time", kind="service_unavailable"), status=503
        )


async def serve(settings: FrontSettings) -> None:
    """Serve until the engine is gone or a signal asks to end."""
    over = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    link = EngineLink(SocketChannel(socket.socket(fileno=settings.channel_fd)), over)
    tokenizer = load_tokenizer(Path(settings.model_path))
    # Cancelling the handler is how a client that hangs up is noticed.
    runner = web.AppRunner(
        Front(settings, tokenizer, link).application(),
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=0.5,
    )
    await runner.setup()
    await web.SockSite(runner, socket.socket(fileno=settings.listen_fd)).start()
    link.start()
    await over.wait()
    await runner.cleanup()


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """Return the checkpoint's tokenizer. Raises UserError where there is no tokenizer.json."""
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise UserError(
            f"{str(model_dir)!r} holds no tokenizer.json",
            field="--model-path",
            remedy="Save a fast tokenizer beside the model: AutoTokenizer(...).save_pretrained().",
            reason="ModelNotFound",
        )
    return Tokenizer.from_file(str(path))


def main() -> None:
    """Entry point of the front process."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s front %(levelname)s %(message)s")
    settings = FrontSettings(**json.loads(sys.argv[1]))
    os.nice(NICENESS)
    os.sched_setaffinity(0, settings.cpus)
    asyncio.run(serve(settings))


if __name__ == "__main__":
    main()
