"""Check what the plugin does not know switches harvesting off with one line, and SGLang serves."""

from __future__ import annotations

PROMPT = [*b"The for statement is used"]
REQUESTS = [{"n": n, "at": 3 + n, "tokens": 20, "prompt": PROMPT} for n in range(3)]


def lines(log: str) -> list[str]:
    """Return what the plugin has said at the level of an error."""
    return [line for line in log.splitlines() if "windrow: harvesting is off" in line]


def test_a_server_that_cannot_lend_says_why_once_and_answers(play, run_dir):
    played = play({"server": {"page_size": 1}, "requests": REQUESTS}, run_dir)
    assert len(played["ends"]) == len(REQUESTS)
    assert len(lines(played["log"])) == 1
    said = "--page-size: pages of 1 token cannot be lent in chunks. Use --page-size 16"
    assert said in lines(played["log"])[0]
    assert "Traceback" not in played["log"]
    assert not (run_dir / "arena-0.sock").exists()


def test_a_run_directory_that_is_not_there_is_named(play, run_dir):
    played = play({"requests": REQUESTS}, run_dir / "missing")
    assert len(played["ends"]) == len(REQUESTS)
    assert len(lines(played["log"])) == 1
    assert "Mount the directory" in lines(played["log"])[0]


def test_new_weights_end_harvesting_and_not_the_server(play, run_dir):
    # The shared weights are sealed: written in place, they would end the process.
    requests = [*REQUESTS, {**REQUESTS[0], "n": 9, "at": 120}]
    same = play({"requests": requests, "update_weights_at": 60}, run_dir)
    assert same["updates"] == [[True, same["updates"][0][1]]]
    assert len(same["ends"]) == 4
    assert same["tokens"]["r9"] == same["tokens"]["r0"]
    assert len(lines(same["log"])) == 1
    assert "weights are replaced" in lines(same["log"])[0]
    assert not (run_dir / "weights-0.json").exists()
