from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windrow_sidecar.engines.builtin.web.answer import TextStream


def decode(tokens: list[int]) -> str:
    return bytes(tokens).decode(errors="replace")


def told(text: str, *, pieces: int, stops: tuple[str, ...] = ()) -> list[str]:
    stream, tokens = TextStream(decode, stops), list(text.encode())
    answer = [
        stream.push(tokens[begin : begin + pieces]) for begin in range(0, len(tokens), pieces)
    ]
    return [*answer, stream.finish()]


@given(text=st.text(max_size=40), pieces=st.integers(1, 7))
def test_the_pieces_of_any_text_add_up_to_it(text, pieces):
    assert "".join(told(text, pieces=pieces)) == text


@given(text=st.text(alphabet="abc", max_size=40), pieces=st.integers(1, 5))
def test_the_text_ends_before_the_first_stop_however_it_is_cut(text, pieces):
    stops = ("bca", "cc")
    ends = [text.find(stop) for stop in stops if stop in text]
    wanted = text[: min(ends)] if ends else text
    assert "".join(told(text, pieces=pieces, stops=stops)) == wanted


def test_half_a_character_is_held_back():
    stream = TextStream(decode)
    assert [stream.push([byte]) for byte in "é!".encode()] == ["", "é", "!"]


def test_bytes_that_are_no_character_come_out_as_replacements_at_last():
    stream = TextStream(decode)
    text = "".join(stream.push([0xFF]) for _ in range(4)) + stream.finish()
    assert text == "\ufffd" * 4


@pytest.mark.parametrize("stop", ["<end>", "<"])
def test_nothing_of_a_stop_string_is_told_before_it_is_whole(stop):
    stream = TextStream(decode, [stop])
    text = "".join(stream.push([byte]) for byte in b"ab<end>cd")
    assert text == "ab"
    assert stream.stopped
    assert stream.finish() == ""
