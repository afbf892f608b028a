"""Build the answer to one completion request from its tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from windrow_sidecar.engines.builtin.link import RequestUpdate
from windrow_sidecar.engines.builtin.web import api
from windrow_sidecar.engines.builtin.web.messages import Finished

_HALF_CHARACTER = "\ufffd"
# Bytes of a character in UTF-8, and so the most tokens of a byte-level vocabulary.
_LONGEST_CHARACTER = 4


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
        # Text that is only sent at the end and not searched for stops is decoded at the end.
        self._lazy: list[int] | None = [] if not (body.stream or body.stop_strings) else None
        self.wants_usage = bool(body.stream_options and body.stream_options.include_usage)

    @property
    def is_done(self) -> bool:
        """True where nothing more belongs to it."""
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


class TextStream:
    """The text of one completion.

    Args:
        decode: tokens to text, special tokens skipped.
        stops: the text ends before the first of these.
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode, self._stops = decode, stops
        self._tokens: list[int] = []  # a few that are sent already, then those that are not
        self._told = 0
        self._held = ""  # text that may be the beginning of a stop string
        self.stopped = False

    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens; return the text that is certain now. After a stop it is empty."""
        if self.stopped:
            return ""
        self._tokens.extend(tokens)
        return self._release(self._new_text(at_end=False), at_end=False)

    def finish(self) -> str:
        """Return what was held back. Nothing is pushed afterwards."""
        return "" if self.stopped else self._release(self._new_text(at_end=True), at_end=True)

    def _new_text(self, *, at_end: bool) -> str:
        """Decode what is new in the light of the tokens before it (spaces depend on them)."""
        whole = len(self._tokens) if at_end else self._whole_characters()
        if whole <= self._told:
            return ""
        before = self._decode(self._tokens[: self._told])
        text = self._decode(self._tokens[:whole])
        self._tokens = self._tokens[self._told :]
        self._told = whole - self._told
        return text[len(before) :]

    def _whole_characters(self) -> int:
        """Return how many tokens end with a whole character, or with one that never will be."""
        n = len(self._tokens)
        for missing in range(min(_LONGEST_CHARACTER, n - self._told)):
            if not self._decode(self._tokens[: n - missing]).endswith(_HALF_CHARACTER):
                return n - missing
        # What so many tokens have not completed is genuine; the last ones may still begin one.
        return n - (_LONGEST_CHARACTER - 1)

    def _release(self, new: str, *, at_end: bool) -> str:
        text = self._held + new
        ends = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)]
        keep = 0 if at_end else self._possible_stop(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _possible_stop(self, text: str) -> int:
        """Return how many characters at the end may begin a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for n in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-n:]) for stop in self._stops):
                return n
        return 0
