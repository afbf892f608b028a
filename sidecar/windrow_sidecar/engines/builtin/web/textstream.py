"""Tokens to text, piece by piece: no half characters, nothing of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_HALF_CHARACTER = "\ufffd"
# Bytes of a character in UTF-8, and so the most tokens of a byte-level vocabulary.
_LONGEST_CHARACTER = 4


class TextStream:
    """The text of one completion.

    Args:
        decode: tokens to text, special tokens skipped.
        stops: the text ends before the first of these.
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode, self._stops = decode, stops
        self._tokens: list[int] = []  # a few that are told already, then those that are not
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
