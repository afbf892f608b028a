"""What Windrow costs on a real node: the start of decode pods, the first token, decode's steps.

As root. The node is brought up around it and ends with it; the operator's image is that of
`make build/images/operator.tar`. Pods with and without Windrow take turns, in an order that
alternates from round to round.

Example: python -m benchmarks.node --only starts --json /tmp/node-starts.json
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes import client, config

from benchmarks.harness import ROOT, Baseline, Result, arguments, environment, middle, write
from windrow.local.load import Client
from windrow.local.realnode import NODE_ADDRESS, NodeInfo
from windrow.local.trace import TraceRequest

# The very pods that the tests compare.
sys.path[:0] = [str(ROOT / "tests" / name) for name in ("node", "integration")]
import operator_process  # noqa: E402
import pod_cases  # noqa: E402
import served_pod  # noqa: E402
from waiting import wait_until  # noqa: E402

PARTS = ("starts", "first", "steps")
START_GOAL_S, FIRST_GOAL_S, STEPS_GOAL = 2.0, 90.0, 1.01
# Four requests at a time: each takes about a second, and two come in each.
LOAD_SECONDS, LOAD_PER_SECOND, OUTPUT_TOKENS = 20.0, 2.0, 128
WITHIN_S = 150.0
LOOK_S = 0.01


def main() -> int:
    """Run what was asked for on a node; write the figures."""
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=PARTS, action="append", help="default: all of it")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    node = NodeInfo.of_environment()
    if node is None:
        around = [sys.executable, "-m", "windrow.local.realnode", "--"]
        inside = [sys.executable, "-m", "benchmarks.node", *sys.argv[1:]]
        return subprocess.run([*around, *inside], cwd=ROOT, check=False).returncode
    rounds = 1 if options.quick else options.rounds
    env = environment()
    results: list[Result] = []
    with (
        config.new_client_from_config(node.kubeconfig) as kube,
        tempfile.TemporaryDirectory() as name,
    ):
        folder = Path(name)
        image = served_pod.import_decode_image(node, folder)
        for part in options.only or PARTS:
            results += _PARTS[part](node, kube, image, folder, rounds)
    write("node", results, env, options.json)
    return 0


# --- how long a decode pod takes to be ready ------------------------------------------------------


def starts(node: NodeInfo, kube: Any, image: str, folder: Path, rounds: int) -> list[Result]:
    """Compare the kinds of decode pods of the tests, each with the same pod without Windrow."""
    operator_process.install_crds(kube)
    found: list[Result] = []
    # The image's own program in the agent's place: here it only has to start.
    small = ("--sidecar-command", "/pause", "--sidecar-cpu", "50m", "--sidecar-memory", "64Mi")
    with _operator(node, kube, folder / "a", *small):
        for name, case in pod_cases.CASES.items():
            found.append(_start_of(kube, image, name, case, rounds))
    with _operator(node, kube, folder / "b", "--sidecar-image", pod_cases.MISSING_IMAGE):
        for name, case in pod_cases.WITHOUT_IMAGE.items():
            found.append(_start_of(kube, image, name, case, rounds))
    return found


def _start_of(kube: Any, image: str, name: str, case: Any, rounds: int) -> Result:
    bare = pod_cases.Case(policy=None, level=case.level, quota=case.quota, limits=case.limits)
    plain, ours = pod_cases.make_namespace(kube, bare), pod_cases.make_namespace(kube, case)
    away = {"windrow.dev/inject": "disabled"}
    pods = {
        plain: pod_cases.decode_pod(case, image, away),
        ours: pod_cases.decode_pod(case, image),
    }
    took: dict[str, list[float]] = {plain: [], ours: []}
    with contextlib.ExitStack() as stack:
        if case.webhook:
            server = stack.enter_context(pod_cases.impostor(kube, case.webhook, ours))
            _await_asked(kube, server, ours, pods[ours], case)
        elif case.policy is not None:
            pod_cases.await_registered(kube, ours)
        for number in range(rounds):
            order = (plain, ours) if number % 2 else (ours, plain)
            for namespace in order:
                took[namespace].append(_seconds_until_ready(kube, namespace, pods[namespace]))
    core = client.CoreV1Api(kube)
    for namespace in (plain, ours):
        core.delete_namespace(namespace)
    later = [a - b for a, b in zip(took[ours], took[plain], strict=True)]
    value, spread = middle(later)
    beside = Baseline("without Windrow", statistics.median(took[plain]))
    return Result(f"ready later: {name}", value, "s", "lower", START_GOAL_S, spread, beside)


def _await_asked(kube: Any, server: Any, namespace: str, pod: Any, case: Any) -> None:
    """Wait until the API server asks what stands in the webhook's place."""
    core = client.CoreV1Api(kube)

    def asked() -> bool:
        core.create_namespaced_pod(namespace, pod, dry_run="All")
        return bool(server.asked.is_set()) or case.webhook == "down"

    wait_until(asked, "the API server asks the impostor")


def _seconds_until_ready(kube: Any, namespace: str, pod: Any) -> float:
    core = client.CoreV1Api(kube)
    began = time.monotonic()
    core.create_namespaced_pod(namespace, pod)

    def ready() -> bool:
        conditions = core.read_namespaced_pod("decode", namespace).status.conditions or ()
        return any(c.type == "Ready" and c.status == "True" for c in conditions)

    _until(ready, f"the decode pod of {namespace} is ready")
    took = time.monotonic() - began
    core.delete_namespaced_pod("decode", namespace, grace_period_seconds=0)
    _until(lambda: not core.list_namespaced_pod(namespace).items, "the pod is gone")
    return took


def _until(done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {WITHIN_S:g} s: {what}")
        time.sleep(LOOK_S)


@contextlib.contextmanager
def _operator(node: NodeInfo, kube: Any, folder: Path, *more: str) -> Iterator[None]:
    folder.mkdir()
    reached = ("--attach-host", "0.0.0.0", "--advertise-address", NODE_ADDRESS)
    process = operator_process.OperatorProcess(node.kubeconfig, folder, *reached, *more)
    process.start()
    try:
        yield
    finally:
        process.end()
        hooks = client.AdmissionregistrationV1Api(kube)
        hooks.delete_mutating_webhook_configuration("windrow-operator")


# --- from helm install to the first harvested token -----------------------------------------------


def first(node: NodeInfo, kube: Any, image: str, folder: Path, rounds: int) -> list[Result]:
    """Time a first installation: chart, policy, decode pod, job, until the job has tokens."""
    served_pod.import_image(node, served_pod.OPERATOR_ARCHIVE)
    took = []
    for number in range(min(rounds, 3)):
        out = folder / f"out-{number}"
        out.mkdir()
        with _serving_namespace(kube):
            took.append(_first_token(kube, image, out))
            served_pod.helm("uninstall", "windrow", "-n", served_pod.SYSTEM, "--wait")
    value, spread = middle(took)
    return [
        Result("helm install to first harvested token", value, "s", "lower", FIRST_GOAL_S, spread)
    ]


def _first_token(kube: Any, image: str, out: Path) -> float:
    core = client.CoreV1Api(kube)
    began = time.monotonic()
    served_pod.helm(*served_pod.chart_command())
    _apply_policy(kube, {**served_pod.programs(), "out": str(out)})
    served_pod.await_prepared(core, image)
    core.create_namespaced_pod(served_pod.NAMESPACE, served_pod.decode_pod(image))
    served_pod.submit(kube, "tone", out / "tone", steps=100_000)
    _until(lambda: served_pod.step(kube, "tone") >= 1, "the job's first step")
    took = time.monotonic() - began
    jobs = client.CustomObjectsApi(kube)
    jobs.delete_namespaced_custom_object(*served_pod.JOBS, "tone")
    _until(lambda: not jobs.list_namespaced_custom_object(*served_pod.JOBS)["items"], "it is gone")
    return took


@contextlib.contextmanager
def _serving_namespace(kube: Any) -> Iterator[None]:
    core = client.CoreV1Api(kube)
    labels = {"pod-security.kubernetes.io/enforce": "privileged"}
    core.create_namespace({"metadata": {"name": served_pod.NAMESPACE, "labels": labels}})
    try:
        yield
    finally:
        core.delete_namespace(served_pod.NAMESPACE)

        def gone() -> bool:
            names = {item.metadata.name for item in core.list_namespace().items}
            return served_pod.NAMESPACE not in names

        _until(gone, "the namespace is gone")


def _apply_policy(kube: Any, mounted: dict[str, str], **changes: Any) -> None:
    where = ("windrow.dev", "v1alpha1", served_pod.NAMESPACE, "harvestpolicies")
    policy = served_pod.policy_of(mounted, **changes)
    client.CustomObjectsApi(kube).create_namespaced_custom_object(*where, policy)


# --- decode's steps beside an idle sidecar --------------------------------------------------------


def steps(node: NodeInfo, kube: Any, image: str, folder: Path, rounds: int) -> list[Result]:
    """Compare a pod's time per output token with an attached, idle sidecar and without Windrow."""
    operator_process.install_crds(kube)
    command = f"{sys.executable} -m windrow_sidecar.agent"
    tpot_s: dict[bool, list[float]] = {False: [], True: []}
    with (
        _operator(node, kube, folder / "s", "--sidecar-command", command),
        _serving_namespace(kube),
    ):
        _apply_policy(kube, served_pod.programs(), mode="observe")
        served_pod.await_prepared(client.CoreV1Api(kube), image)
        for number in range(rounds):
            for with_sidecar in (False, True) if number % 2 else (True, False):
                name = f"decode-{number}{'b' if with_sidecar else 'a'}"
                tpot_s[with_sidecar].append(_tpot_of_a_pod(kube, image, name, with_sidecar))
    ratios = [a / b for a, b in zip(tpot_s[True], tpot_s[False], strict=True)]
    value, spread = middle(ratios)
    return [
        Result(
            "decode's step with an idle sidecar, over without", value, "", "lower",
            STEPS_GOAL, spread,
        ),
        *(
            Result(
                f"TPOT {'with an idle sidecar' if one else 'without Windrow'}",
                *_ms(tpot_s[one]),
            )
            for one in (False, True)
        ),
    ]  # fmt: skip


def _ms(seconds: list[float]) -> tuple[float, str, Any, None, float]:
    value, spread = middle([1e3 * one for one in seconds])
    return value, "ms", "lower", None, spread


def _tpot_of_a_pod(kube: Any, image: str, name: str, with_sidecar: bool) -> float:
    core = client.CoreV1Api(kube)
    pod = served_pod.decode_pod(image, name)
    if not with_sidecar:
        pod["metadata"]["labels"]["windrow.dev/inject"] = "disabled"
    core.create_namespaced_pod(served_pod.NAMESPACE, pod)
    _until(lambda: bool(served_pod.is_ready(core)), "decode serves")
    if with_sidecar:
        _until(lambda: _observed(kube, name), "its sidecar has attached")
    address = served_pod.read(core).status.pod_ip
    tpot_s = asyncio.run(_play(f"http://{address}:{served_pod.PORT}"))
    core.delete_namespaced_pod(name, served_pod.NAMESPACE, grace_period_seconds=1)
    _until(lambda: not core.list_namespaced_pod(served_pod.NAMESPACE).items, "the pod is gone")
    return tpot_s


def _observed(kube: Any, pod: str) -> bool:
    where = ("windrow.dev", "v1alpha1", served_pod.NAMESPACE, "harvestslots")
    found = client.CustomObjectsApi(kube).list_namespaced_custom_object(*where)["items"]
    of_pod = [one for one in found if one["metadata"]["name"].startswith(pod)]
    conditions = [c for one in of_pod for c in one.get("status", {}).get("conditions", ())]
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


async def _play(endpoint: str) -> float:
    """Return the median of the answers' time per output token, in seconds."""
    every = 1 / LOAD_PER_SECOND
    requests = [
        TraceRequest(number * every, 200, OUTPUT_TOKENS)
        for number in range(int(LOAD_SECONDS * LOAD_PER_SECOND))
    ]
    async with aiohttp.ClientSession() as session:
        one = Client(session, [endpoint], seed=7)
        await one.play(requests[:6])  # warm
        one.answers.clear()
        await one.play(requests)
    if errors := [answer.error for answer in one.answers if answer.error]:
        raise RuntimeError(f"requests failed: {errors[:3]}")
    return statistics.median(answer.tpot_s for answer in one.answers)


_PARTS: dict[str, Callable[[NodeInfo, Any, str, Path, int], list[Result]]] = {
    "starts": starts,
    "first": first,
    "steps": steps,
}


if __name__ == "__main__":
    sys.exit(main())
