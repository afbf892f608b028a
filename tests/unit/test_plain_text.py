"""Words of jobs, rows and sidecars act on no terminal, and pass for no line of a log."""

from __future__ import annotations

import io
import logging

import pytest

from windrow.plain_text import RecordFormatter, printable
from windrow.proto import attach_pb2 as pb
from windrow.redaction import RedactingFormatter
from windrow.views import JobView, SlotView
from windrow_cli import output
from windrow_operator import claims

ACTS = (
    "\x1b[2J",  # clears the screen
    "\x1b]0;root@node\x07",  # sets the title
    "\x1b]52;c;cm0gLXJm\x07",  # writes the clipboard
    "\x9b31m",  # the same as ESC [, in one character
    "all is well\rFAILED",  # overwrites the line
    "\x08\x08\x08",
    "\u202eloof\u2066",  # turns the direction
    "\x00\x7f\u2028",
)
FORGED = "x\n2026-01-01 00:00:00,000 INFO    windrow_operator: job blue/own succeeded"


@pytest.mark.parametrize("words", ACTS)
def test_words_of_others_act_on_no_terminal(words, capsys):
    shown = printable(words)
    assert all(letter.isprintable() for letter in shown)
    output.print_line(f"the device is {words}")
    output.tell(RuntimeError(words))
    told = capsys.readouterr()
    assert all(letter.isprintable() for letter in (told.out + told.err).replace("\n", ""))
    assert "\ufffd" in told.out
    assert "\ufffd" in told.err


def test_words_in_many_letters_and_several_lines_stay():
    text = "caf\u00e9 \u4f60\u597d \U0001f600\n\tit's \u05d0\u05d1: 3 \u00d7 4"
    assert printable(text) == text


@pytest.mark.parametrize("made", [RecordFormatter, RedactingFormatter])
def test_a_record_passes_for_one_line_of_a_log(made):
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(made("%(asctime)s %(message)s"))
    logger = logging.getLogger("test-plain-text")
    logger.addHandler(handler)
    try:
        logger.warning("row: %s", FORGED + ACTS[0])
        try:
            int(FORGED)
        except ValueError:
            logger.exception("failed over %s", FORGED)
    finally:
        logger.removeHandler(handler)
    lines = out.getvalue().splitlines()
    begun = [line for line in lines if not line.startswith("  ")]
    assert len(begun) == 2
    assert any("succeeded" in line for line in lines)  # nothing is lost
    assert "\x1b" not in out.getvalue()


def test_a_cell_of_several_lines_is_one_row():
    shown = output.table(("NAME", "WHY"), [("a", FORGED), ("b", "ok")])
    assert len(shown.splitlines()) == 3


@pytest.mark.parametrize("words", ACTS)
def test_words_of_a_sidecar_reach_no_status_that_acts_on_a_terminal(words):
    slot = pb.SlotFacts(index=1, device=words, model=words, endpoint=words, refused=words)
    (facts,) = claims.slots_of(pb.SidecarHello(slots=[slot]))
    beat = pb.SlotHeartbeat(slot=1, engine_state=words, off=words)
    claims.bound(beat, 1.0)
    said = [v for message in (facts, beat) for _, v in message.ListFields() if isinstance(v, str)]
    said += [claims.text(words), claims.version(words)]
    assert len(said) >= 8
    assert all(word.isprintable() for word in said)


@pytest.mark.parametrize("words", ACTS)
def test_what_a_tenant_wrote_into_an_object_acts_on_no_terminal_of_another(words):
    """The operator checks specs; the API server takes any text, and `windrow top` shows it."""
    made = "2026-01-01T00:00:00Z"
    about = {"namespace": "red", "name": "x", "uid": "u", "creationTimestamp": made}
    condition = {"type": "Ready", "status": "True", "reason": "Serving", "message": words}
    slot = SlotView.of(
        {
            "metadata": about,
            "spec": {"podName": "p", "model": words},
            "status": {"conditions": [condition], "breaker": words},
        }
    )
    spec = {"model": {"name": words}, "output": {"destination": words}, "dataset": {}}
    job = JobView.of({"metadata": about, "spec": spec, "status": {"state": words}})
    said = [getattr(v, n) for v in (slot, job) for n in v.__slots__]
    assert all(word.isprintable() for word in said if isinstance(word, str))
