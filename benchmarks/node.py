"""Windrow on a real Kubernetes node: from `helm install` to the first step, and an idle sidecar.

- install: from the start of `helm install` to the first optimizer step of a job that was applied
  right after it, decode's image and the operator's on the node already;
- idle sidecar: one decode pod in a namespace without Windrow, one whose policy observes, so that a
  sidecar is attached and gives a worker nothing. Requests of one stream go to both in turn, in
  random order; a pair's figure is the second pod's time a token over the first one's.

Needs root and the operator's image (`make images`).
Example: make node ARGS=".venv/bin/python -m benchmarks.node --json /tmp/node.json"
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from benchmarks.harness import ROOT, Result, arguments, environment, middle, write
from benchmarks.sglang import interval
from windrow_lab.realnode import pods as realpods
from windrow_lab.realnode.node import NodeInfo

ARCHIVE = ROOT / "build" / "images" / "operator.tar"
TOKENS = 128
WITHIN_S = 180.0


def main() -> int:
    """Measure; print and write the figures. 2: there is no node or no image."""
    parser = arguments(__doc__)
    options = parser.parse_args()
    node = NodeInfo.of_environment()
    if node is None or not ARCHIVE.exists():
        what = "no image of the operator (make images)" if node else "no node (make node)"
        print(f"node: skipped, there is {what}")
        return 0
    env = environment()
    with tempfile.TemporaryDirectory() as folder:
        bench = NodeBenchmark(node, Path(folder))
        bench.load_images()
        results = [bench.install()]
        results += bench.idle_sidecar(pairs=5 if options.quick else 60)
    write("node", results, env, options.json)
    return 0


class NodeBenchmark:
    """The node, and what is created on it."""

    def __init__(self, node: NodeInfo, folder: Path) -> None:
        """Work with `node`; adapters go below `folder`."""
        self._node = node
        self._folder = folder

    def load_images(self) -> None:
        """Put the operator's image and one that runs this machine's programs on the node."""
        realpods.import_decode_image(self._node, self._folder)
        realpods.import_image(self._node, ARCHIVE)

    def install(self) -> Result:
        """Return the seconds from `helm install` to a job's first step."""
        began = time.monotonic()
        run = ["helm", "install", "windrow", str(ROOT / "deploy" / "helm" / "windrow")]
        run += ["--namespace", "windrow-system", "--create-namespace", "--wait"]
        run += ["--set", f"image.pullPolicy=Never,sidecar.command={realpods.SIDECAR_COMMAND}"]
        subprocess.run(run, check=True, capture_output=True)
        self._serve("serving", mode="harvest")
        job = realpods.finetune_job("serving", "first", str(self._folder / "first"), 5000)
        self._apply(job)
        until(
            lambda: (
                (self._get("finetunejob", "first", "serving").get("status") or {})
                .get("progress", {})
                .get("step", 0)
                >= 1
            ),
            "the job has made a step",
        )
        seconds = time.monotonic() - began
        self._node.kubectl("delete", "finetunejob", "first", "--namespace=serving")
        self._node.kubectl("delete", "namespace", "serving")
        return Result("helm install to first step", round(seconds, 1), "s", "lower", goal=90.0)

    def idle_sidecar(self, pairs: int) -> list[Result]:
        """Return what an attached idle sidecar adds to decode's time a token, in percent."""
        self._serve("without", mode="")
        self._serve("attached", mode="observe")
        until(
            lambda: any(
                "running" in (found.get("state") or {})
                for found in self._get("pod", "decode", "attached")["status"].get(
                    "ephemeralContainerStatuses", ()
                )
            ),
            "the sidecar is attached",
        )
        urls = {}
        for name in ("without", "attached"):
            address = self._get("pod", "decode", name)["status"]["podIP"]
            urls[name] = f"http://{address}:{realpods.PORT}/v1/completions"
        for url in list(urls.values()) * 3:  # the profile is taken, caches are warm
            milliseconds_a_token(url)
        draw, extra, alone = random.Random(3), [], []
        for number in range(pairs):
            order = list(urls)
            draw.shuffle(order)
            found = {name: milliseconds_a_token(urls[name]) for name in order}
            extra.append(100 * (found["attached"] / found["without"] - 1))
            alone.append(found["without"])
            print(f"pair {number + 1} of {pairs}: {extra[-1]:+.1f}%", flush=True)
        low, high = interval(extra)
        what = "an idle attached sidecar's extra time a token"
        base, spread = middle(alone)
        return [
            Result("time a token without Windrow", round(base, 3), "ms", "lower", spread=spread),
            Result(what, round(statistics.median(extra), 2), "%", "lower", goal=1.0),
            Result(f"{what}, 95% interval from", round(low, 2), "%", "lower"),
            Result(f"{what}, 95% interval to", round(high, 2), "%", "lower"),
        ]

    def _serve(self, namespace: str, mode: str) -> None:
        """Have decode serve there, under a policy of that mode; "": under none."""
        self._apply(realpods.namespace(namespace))
        pod = realpods.decode_pod(namespace)
        if mode:
            self._apply(realpods.policy(namespace, self._folder, mode=mode))
            until(lambda: "windrow-run" in self._tried(pod), "decode pods are prepared")
        self._apply(pod)
        until(
            lambda: any(
                found["type"] == "Ready" and found["status"] == "True"
                for found in self._get("pod", "decode", namespace)["status"].get("conditions", ())
            ),
            "decode serves",
        )

    def _apply(self, body: object) -> None:
        self._node.kubectl("apply", "-f", "-", body=body)

    def _tried(self, pod: object) -> str:
        """Return the pod as it would be created."""
        return self._node.kubectl("create", "--dry-run=server", "-o", "json", "-f", "-", body=pod)

    def _get(self, kind: str, name: str, namespace: str) -> dict[str, Any]:
        text = self._node.kubectl("get", kind, name, f"--namespace={namespace}", "-o", "json")
        found: dict[str, Any] = json.loads(text)
        return found


def milliseconds_a_token(url: str) -> float:
    """Return the time of one request over its tokens."""
    body = {"model": "m", "prompt": "A coffee machine", "max_tokens": TOKENS, "ignore_eos": True}
    began = time.perf_counter()
    answer = httpx.post(url, json=body, timeout=60, trust_env=False).raise_for_status().json()
    took = time.perf_counter() - began
    return 1e3 * took / float(answer["usage"]["completion_tokens"])


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for `condition`; raises TimeoutError, which says `what` lacked."""
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {WITHIN_S:g} s: {what}")
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
