"""The answer to one completion request, as it grows."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from windrow_sidecar.engines.builtin.link import RequestUpdate
from windrow_sidecar.engines.builtin.web import api
from windrow_sidecar.engines.builtin.web.messages import Finished
from windrow_sidecar.engines.builtin.web.textstream import TextStream


class CompletionAnswer:
    """Collects pieces; gives the whole answer or one chunk at a time."""

    def __init__(
        self,
        name: str,
        model: str,
        n_prompt: int,
        body: api.CompletionBody,
        decode: Callable[[list[int]], str],
    ) -> None:
        self._created, self._model = int(time.time()), model
        self._name, self._n_prompt = name, n_prompt
        self._arrived_ns = self._first_token_ns = time.monotonic_ns()
        self._stream = TextStream(decode, body.stop_strings)
        self._text: list[str] = []
        self._n_completed = 0
        self._end: Finished | None = None
        # Text that is only told at the end and not searched for stops is decoded at the end.
        self._lazy: list[int] | None = [] if not (body.stream or body.stop_strings) else None
        self.wants_usage = bool(body.stream_options and body.stream_options.include_usage)

    @property
    def is_done(self) -> bool:
        """Whether nothing more belongs to it."""
        return self._end is not None

    def add(self, piece: RequestUpdate) -> str:
        """Take a piece in; returns the text that is certain now."""
        if piece.tokens and not self._n_completed:
            self._first_token_ns = time.monotonic_ns()
        self._n_completed += len(piece.tokens)
        self._end = piece.end
        if self._lazy is not None:
            self._lazy.extend(piece.tokens)
            text = self._stream.push(self._lazy) + self._stream.finish() if self._end else ""
        else:
            text = self._stream.push(piece.tokens)
            if self._stream.stopped:
                self._end = Finished(0, "stop", self._first_token_ns, time.monotonic_ns())
            elif self._end is not None:
                text += self._stream.finish()
        self._text.append(text)
        return text

    def whole(self) -> dict[str, Any]:
        """Return the completion."""
        return self._object("".join(self._text), usage=self._usage())

    def chunk(self, text: str) -> dict[str, Any]:
        """Return one chunk of a stream; the last one carries reason and timing."""
        return self._object(text)

    def usage_chunk(self) -> dict[str, Any]:
        """Return the chunk without choices that stream_options.include_usage asks for."""
        return self._object("", usage=self._usage()) | {"choices": []}

    def _object(self, text: str, usage: dict[str, int] | None = None) -> dict[str, Any]:
        end = self._end
        return api.completion(
            self._name,
            created=self._created,
            model=self._model,
            text=text,
            finish_reason=end.reason if end else None,
            usage=usage,
            timing=api.timing(self._arrived_ns, end.first_token_ns, end.end_ns, self._n_completed)
            if end
            else None,
        )

    def _usage(self) -> dict[str, int]:
        return api.usage(self._n_prompt, self._n_completed)
