"""Has rows read by processes of their own, in good cases and in bad ones.

Prints a line of JSON for each scene. `python reading_elsewhere.py FOLDER`. A program, since what is
forked must be forked before there are threads.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from transformers import AutoTokenizer

from windrow.crd import DatasetSpec
from windrow.errors import UserError, WindrowError
from windrow_sidecar.finetune.colocated import loading as loading_module
from windrow_sidecar.finetune.colocated.loading import Loading
from windrow_sidecar.finetune.colocated.standby import JobOrder
from windrow_sidecar.finetune.data import rendering
from windrow_sidecar.finetune.data.readers import Readers, RowsWanted
from windrow_sidecar.finetune.data.reading import ModelLimits, read_dataset
from windrow_sidecar.finetune.data.split import DataSplit
from windrow_sidecar.finetune.data.tokens import RowTokenizer
from windrow_sidecar.finetune.job.assembly import JobSpec, read_job
from windrow_sidecar.finetune.job.failures import failure
from windrow_sidecar.finetune.job.ledger import JobState
from windrow_sidecar.finetune.training.health import StallWatch

ROOT = Path(__file__).resolve().parents[2]
MODEL = str(ROOT / "models" / "windrow-tiny")
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
ROWS = str(ROOT / "examples" / "support-tone" / "train.jsonl")


def wanted(source: object, **dataset: Any) -> RowsWanted:
    spec = DatasetSpec.model_validate({"source": str(source), **dataset})
    return RowsWanted(spec, MODEL, ModelLimits(1 << 20, 4096), 256, learn_all=False, seed=3)


def here(order: RowsWanted) -> DataSplit:
    tokenizer = RowTokenizer(
        AutoTokenizer.from_pretrained(MODEL),
        max_length=order.max_length,
        learn_all=order.learn_all,
    )
    return read_dataset(order.dataset, tokenizer, order.limits, seed=order.seed)


def rows_of(split: DataSplit) -> list[Any]:
    parts = (split.train, split.held_out)
    return [
        [(row.ids, row.labels, row.where) for part in parts for row in part],
        [list(part.lengths) for part in parts],
        split.skipped,
        split.digest,
    ]


def error_of(read: Callable[[], object]) -> dict[str, str]:
    try:
        read()
    except (WindrowError, RuntimeError) as error:
        about = {"type": type(error).__name__, "says": str(error)}
        more = {"field": error.field, "reason": error.reason} if type(error) is UserError else {}
        return about | more
    return {}


class Granting:
    """A pace that can be changed."""

    def __init__(self) -> None:
        self.now = True

    def granted(self) -> bool:
        return self.now

    def wait(self, timeout_s: float) -> None:
        time.sleep(min(0.01, timeout_s))


ALWAYS = Granting()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def scenes(folder: Path, readers: Readers) -> dict[str, Callable[[], object]]:
    fifo, wrong = folder / "never.jsonl", folder / "wrong.jsonl"
    os.mkfifo(fifo)
    many = folder / "many.jsonl"
    many.write_text(Path(ROWS).read_text() * 500)
    wrong.write_text('{"text": "a"}\n{"words": "b"}\n')

    def elsewhere(order: RowsWanted) -> DataSplit:
        return readers.begin(order).wait(lambda: None, ALWAYS)

    def reading() -> list[psutil.Process]:
        return psutil.Process(readers.pid).children()

    def job(name: str) -> Callable[[], JobSpec]:
        spec = {
            "model": {"name": MODEL},
            "dataset": {"source": str(fifo)},
            "adapter": {"lora": {"rank": 4}},
            "training": {"maxSteps": 1},
            "output": {"destination": str(folder / name)},
        }
        (folder / f"{name}.json").write_text(json.dumps({"uid": name, "spec": spec}))
        return lambda: replace(read_job(folder / f"{name}.json"), epoch=1)

    def same() -> object:
        order = wanted(ROWS, evalFraction=0.1)
        return rows_of(elsewhere(order)) == rows_of(here(order))

    def ended() -> object:
        rows = readers.begin(wanted(fifo))
        until(reading)
        rows.end()
        return error_of(lambda: rows.wait(lambda: None, ALWAYS))

    def stalled() -> object:
        job_state = JobState(stall=StallWatch(after_s=0.2))
        loading = Loading(
            job("stalled"),
            JobOrder("stalled", 1),
            job_state,
            readers,
            lambda _: wanted(fifo),
            ALWAYS,
        )
        job_state.stall.watch(lambda found: loading.give_up(failure(found, "")))
        until(lambda: loading.verdict)
        until(lambda: not reading())
        assert loading.verdict is not None
        return [loading.verdict[0].reason, loading.verdict[0].detail]

    def folder_hangs() -> object:
        root = folder / "locked" / ".windrow" / "locked"
        root.mkdir(parents=True)
        with (root / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            file, order = job("locked"), JobOrder("locked", 1)
            loading = Loading(file, order, JobState(), readers, lambda _: wanted(ROWS), ALWAYS)
            verdict = failure(RuntimeError("a test"), "")
            given_up = loading.give_up(verdict), loading.is_over, loading.give_up(verdict)
        return [*given_up, loading.verdict == verdict, reading()]

    def forgotten() -> object:
        """A job that is deleted while its rows do not come, or while its folder hangs."""
        said, loading_module.FORGET_WITHIN_S = [], 1.0
        for name, hangs in (("gone", False), ("hanging", True)):
            file, order = job(name), JobOrder(name, 1)
            root = folder / name / ".windrow" / name
            (root / "checkpoints" / "step-00000005").mkdir(parents=True)
            with (root / "lock").open("a") as lock:
                if hangs:
                    fcntl.flock(lock, fcntl.LOCK_EX)
                loading = Loading(file, order, JobState(), readers, lambda _: wanted(fifo), ALWAYS)
                if not hangs:
                    until(reading)
                until(lambda loading=loading: loading.forget() or loading.verdict)
                assert loading.verdict is not None
                event, ending = loading.verdict
                there = (root / "checkpoints").exists()
                until(lambda: not reading())
                said.append([event.kind, event.detail, ending.name, there])
        return said

    def c_code() -> object:
        """Templates and rows whose computing is one call that no exception ends."""
        said, row = [], folder / "row.jsonl"
        row.write_text(Path(ROWS).read_text().partition("\n")[0])
        for name, template in (("power", "{{ 7 ** (10 ** 8) }}"), ("loop", LOOP)):
            model = folder / name
            shutil.copytree(MODEL, model)
            (model / "chat_template.jinja").write_text(template)
            said.append(error_of(lambda m=model: elsewhere(replace(wanted(row), tokenizer=str(m)))))
        # The next ones are read.
        said.append(error_of(lambda: elsewhere(wanted(ROWS))))
        return said

    def held() -> object:
        pace, job_state = Granting(), JobState(stall=StallWatch(after_s=60.0))
        file, order = job("held"), JobOrder("held", 1)
        loading = Loading(file, order, job_state, readers, lambda _: wanted(many), pace)
        until(reading)
        (process,) = reading()
        pace.now = False
        until(lambda: process.status() == psutil.STATUS_STOPPED)
        spent, renewed = process.cpu_times().user, job_state.stall._begun
        until(lambda: job_state.stall._begun != renewed)  # decode's wait is none of its own
        stood_still = process.cpu_times().user == spent
        pace.now = True
        until(lambda: process.status() != psutil.STATUS_STOPPED)
        pace.now = False
        until(lambda: process.status() == psutil.STATUS_STOPPED)
        given_up = loading.give_up(failure(RuntimeError("a test"), ""))
        until(lambda: not reading())
        return [stood_still, given_up]

    def too_late() -> object:
        lock = threading.Event()
        thread = threading.Thread(target=lock.wait)
        thread.start()
        said = error_of(Readers)
        lock.set()
        thread.join()
        return said

    def closed() -> object:
        readers.begin(wanted(fifo))
        until(reading)
        (process,) = reading()
        readers.close()
        until(lambda: not process.is_running())
        return error_of(lambda: readers.begin(wanted(ROWS)))

    return {
        "same": same,
        "wrong": lambda: [
            error_of(lambda read=read: read(wanted(wrong, format="text")))
            for read in (elsewhere, here)
        ],
        "c code": c_code,
        "ended": ended,
        "stalled": stalled,
        "forgotten": forgotten,
        "folder hangs": folder_hangs,
        "held": held,
        "too late": too_late,
        "closed": closed,
    }


def main() -> None:
    # The first row is rendered once libraries are loaded, which counts as well.
    rendering._RENDER_CPU_S = 3.0
    readers = Readers()
    for name, scene in scenes(Path(sys.argv[1]), readers).items():
        print(json.dumps([name, scene()]), flush=True)


if __name__ == "__main__":
    main()
