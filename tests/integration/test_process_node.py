"""The process node runs ordinary pods of a real API server as local processes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kubernetes import client
from waiting import DEADLINE_SECONDS, is_running, wait_until

from windrow_lab.machine.child_processes import descendants


class Node:
    """A node process that a test may end in any way."""

    def __init__(self, kubeconfig, directory):
        self.directory = directory
        self._command = [
            *(sys.executable, "-m", "windrow_lab.node", "--kubeconfig", str(kubeconfig)),
            *("--name", "process-node", "--dir", str(directory), "--backoff-seconds", "0.2"),
            *("--log-root", str(directory / "events"), "--env", "FLAVOUR=vanilla"),
        ]
        self.start()

    def start(self):
        self.directory.mkdir(exist_ok=True)
        with (self.directory / "node.log").open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def end(self, signum=signal.SIGTERM):
        self.process.send_signal(signum)
        return self.process.wait(timeout=DEADLINE_SECONDS)

    def log_of(self, namespace, pod, container):
        path = self.directory / "logs" / f"{namespace}_{pod}" / f"{container}.log"
        return path.read_text() if path.exists() else ""


@pytest.fixture
def node(control_plane, tmp_path_factory):
    running = Node(control_plane.kubeconfig, Path(tmp_path_factory.mktemp("n", numbered=True)))
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.end()
        print((running.directory / "node.log").read_text())


class Pods:
    """The pods of a test's namespace."""

    def __init__(self, core, namespace):
        self.core, self.namespace = core, namespace
        wait_until(
            lambda: core.list_namespaced_service_account(namespace).items, "a service account"
        )

    def create(self, name, annotations=None, **spec):
        spec.setdefault("terminationGracePeriodSeconds", 5)
        metadata = {"name": name, "annotations": annotations, "labels": {"app": "chat"}}
        return self.core.create_namespaced_pod(self.namespace, {"metadata": metadata, "spec": spec})

    def read(self, name):
        return self.core.read_namespaced_pod(name, self.namespace)

    def await_phase(self, name, phase):
        return wait_until(
            lambda: pod if (pod := self.read(name)).status.phase == phase else None,
            f"pod {name} is {phase}",
        )

    def await_ready(self, name):
        def ready():
            pod = self.read(name)
            conditions = {c.type: c.status for c in pod.status.conditions or []}
            return pod if conditions.get("Ready") == "True" else None

        return wait_until(ready, f"pod {name} is ready")

    def events(self, name):
        return {
            (event.reason, event.message)
            for event in self.core.list_namespaced_event(self.namespace).items
            if event.involved_object.name == name
        }

    def is_gone(self, name):
        try:
            self.read(name)
        except client.ApiException as error:
            return error.status == 404
        return False


@pytest.fixture
def pods(kube, namespace):
    return Pods(client.CoreV1Api(kube), namespace)


def python(name, code, **fields):
    return {"name": name, "image": "none", "command": ["python", "-uc", code], **fields}


SHOW = """
import json, os, sys
print(json.dumps({"env": dict(os.environ), "args": sys.argv[1:], "cwd": os.getcwd(),
                  "nice": os.nice(0), "cpus": sorted(os.sched_getaffinity(0))}))
"""


def test_a_container_gets_what_its_spec_and_the_downward_api_say(node, pods):
    pods.core.create_namespaced_config_map(
        pods.namespace, {"metadata": {"name": "settings"}, "data": {"color": "green"}}
    )
    pods.core.create_namespaced_secret(
        pods.namespace, {"metadata": {"name": "keys"}, "stringData": {"word": "mellon"}}
    )
    cpu = min(os.sched_getaffinity(0))
    environment = [
        {"name": "PLAIN", "value": "$(COLOR) in /run/windrow/page"},
        {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "APP", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['app']"}}},
        {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {
            "name": "COLOR",
            "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "color"}},
        },
        {"name": "WORD", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "word"}}},
    ]
    environment.append(environment.pop(0))
    container = python("show", SHOW, args=["--dir=/run/windrow", "$(WORD)", "$$(WORD)", "$(NO)"])
    container |= {
        "env": environment,
        "workingDir": "/run/windrow",
        "volumeMounts": [{"name": "run", "mountPath": "/run/windrow"}],
    }
    pods.create(
        "show",
        annotations={"windrow.dev/nice.show": "7", "windrow.dev/cpuset": str(cpu)},
        restartPolicy="Never",
        containers=[container],
        volumes=[{"name": "run", "emptyDir": {}}],
    )
    done = pods.await_phase("show", "Succeeded")
    seen = json.loads(node.log_of(pods.namespace, "show", "show"))
    volume = node.directory / "p" / done.metadata.uid[:13] / "run"
    assert seen["args"] == [f"--dir={volume}", "mellon", "$(WORD)", "$(NO)"]
    assert seen["cwd"] == str(volume)
    assert seen["env"]["PLAIN"] == f"green in {volume}/page"
    assert (seen["env"]["NAME"], seen["env"]["APP"]) == ("show", "chat")
    assert seen["env"]["NODE"] == "process-node"
    assert seen["env"]["FLAVOUR"] == "vanilla"
    assert seen["env"]["WINDROW_LOG_DIR"] == str(node.directory / "events" / "show")
    assert seen["nice"] == os.nice(0) + 7
    assert seen["cpus"] == [cpu]
    assert done.metadata.annotations["windrow.dev/log-dir"] == str(
        node.directory / "logs" / f"{pods.namespace}_show"
    )


SIDECAR = """
import pathlib, signal, sys, time
run = pathlib.Path("/run/windrow")
(run / "order").open("a").write("sidecar ")
(run / "token-seen").write_text((pathlib.Path("/var/run/windrow") / "token").read_text())
(run / "up").touch()
def end(*_):
    (run / "order").open("a").write("sidecar-ends ")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
signal.pause()
"""
MAIN = """
import pathlib, signal, sys
run = pathlib.Path("/run/windrow")
(run / "order").open("a").write("main ")
def end(*_):
    (run / "order").open("a").write("main-ends ")
    print((run / "order").read_text(), flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("serving", flush=True)
signal.pause()
"""


def decode_like_pod():
    mounts = [{"name": "run", "mountPath": "/run/windrow"}]
    token_mount = {"name": "token", "mountPath": "/var/run/windrow", "readOnly": True}
    prepare = "open('/run/windrow/order', 'a').write('init ')"
    token = {"serviceAccountToken": {"audience": "windrow", "path": "token"}}
    return {
        "initContainers": [
            python("prepare", prepare, volumeMounts=mounts),
            python(
                "windrow",
                SIDECAR,
                restartPolicy="Always",
                volumeMounts=[*mounts, token_mount],
                startupProbe={
                    "exec": {"command": ["test", "-e", "/run/windrow/up"]},
                    "periodSeconds": 1,
                },
            ),
        ],
        "containers": [python("decode", MAIN, volumeMounts=mounts)],
        "volumes": [
            {"name": "run", "emptyDir": {}},
            {"name": "token", "projected": {"sources": [token]}},
        ],
    }


@pytest.mark.extended
def test_a_native_sidecar_starts_before_and_ends_after_the_containers(node, kube, pods):
    pods.create("decode-0", **decode_like_pod())
    pod = pods.await_ready("decode-0")
    run = node.directory / "p" / pod.metadata.uid[:13] / "run"
    wait_until(lambda: "serving" in node.log_of(pods.namespace, "decode-0", "decode"), "it serves")
    assert (run / "order").read_text() == "init sidecar main "

    review = client.AuthenticationV1Api(kube).create_token_review(
        {"spec": {"token": (run / "token-seen").read_text(), "audiences": ["windrow"]}}
    )
    identity = review.status.user.extra
    assert identity["authentication.kubernetes.io/pod-uid"] == [pod.metadata.uid]
    assert pod.status.pod_ip == "127.0.0.1"
    assert pod.status.init_container_statuses[1].state.running is not None

    processes = descendants(node.process.pid)
    pods.core.delete_namespaced_pod("decode-0", pods.namespace)
    wait_until(lambda: pods.is_gone("decode-0"), "the pod is deleted")
    log = node.log_of(pods.namespace, "decode-0", "decode")
    assert "init sidecar main main-ends" in log
    wait_until(lambda: not run.parent.exists(), "the pod's files are gone")
    left = [pid for pid in processes if is_running(pid)]
    assert len(left) == 1, "the supervisor alone stays"


@pytest.mark.extended
def test_a_sidecar_that_is_killed_comes_back_while_the_container_goes_on(node, pods):
    pods.create("decode-0", **decode_like_pod())
    before = pods.await_ready("decode-0").status
    sidecar = before.init_container_statuses[1].container_id.removeprefix("process://")
    os.kill(int(sidecar), signal.SIGKILL)

    def restarted():
        status = pods.read("decode-0").status
        found = status.init_container_statuses[1]
        return status if found.restart_count == 1 and found.state.running else None

    after = wait_until(restarted, "the sidecar runs again")
    assert after.init_container_statuses[1].last_state.terminated.exit_code == 137
    assert after.container_statuses[0].container_id == before.container_statuses[0].container_id
    assert after.container_statuses[0].restart_count == 0


@pytest.mark.extended
def test_a_container_that_crashes_is_started_again_after_a_growing_delay(node, pods):
    pods.create("crash", containers=[python("main", "import sys; sys.exit(3)")])

    def crashed_often():
        statuses = pods.read("crash").status.container_statuses
        return statuses[0] if statuses and statuses[0].restart_count >= 3 else None

    status = wait_until(crashed_often, "three restarts")
    assert (status.last_state.terminated or status.state.terminated).exit_code == 3
    wait_until(lambda: any(r == "BackOff" for r, _ in pods.events("crash")), "a BackOff event")


@pytest.mark.extended
def test_what_a_killed_container_started_dies_with_it(node, pods, tmp_path):
    orphan = tmp_path / "orphan.pid"
    code = (
        "import subprocess, sys, signal\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"open({str(orphan)!r}, 'w').write(str(child.pid))\n"
        "signal.pause()\n"
    )
    pods.create("parent", restartPolicy="Never", containers=[python("main", code)])
    child = int(wait_until(lambda: orphan.exists() and orphan.read_text(), "the child's pid"))
    status = pods.await_ready("parent").status.container_statuses[0]
    os.kill(int(status.container_id.removeprefix("process://")), signal.SIGKILL)
    failed = pods.await_phase("parent", "Failed")
    assert failed.status.container_statuses[0].state.terminated.signal == 9
    assert not is_running(child)


SERVER = """
import http.server, os, pathlib
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if pathlib.Path("/state" + self.path).exists() else 200)
        self.end_headers()
    def log_message(self, *_): pass
server = http.server.HTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler)
server.serve_forever()
"""


def test_probes_decide_on_readiness_and_on_restarts(node, pods):
    from windrow_lab.machine.ports import free_port

    port = free_port()

    def probe(path):
        get = {"path": path, "port": "http"}
        return {"httpGet": get, "periodSeconds": 1, "failureThreshold": 1}

    server = python(
        "server",
        SERVER,
        ports=[{"name": "http", "containerPort": port}],
        env=[{"name": "PORT", "value": str(port)}],
        volumeMounts=[{"name": "state", "mountPath": "/state"}],
        startupProbe={"tcpSocket": {"port": port}, "periodSeconds": 1},
        readinessProbe=probe("/busy"),
        livenessProbe=probe("/dead"),
    )
    pods.create("web", containers=[server], volumes=[{"name": "state", "emptyDir": {}}])
    pod = pods.await_ready("web")
    state = node.directory / "p" / pod.metadata.uid[:13] / "state"

    (state / "busy").touch()
    wait_until(
        lambda: not pods.read("web").status.container_statuses[0].ready, "the pod is not ready"
    )
    assert pods.read("web").status.container_statuses[0].restart_count == 0
    (state / "busy").unlink()
    pods.await_ready("web")

    (state / "dead").touch()
    wait_until(
        lambda: pods.read("web").status.container_statuses[0].restart_count == 1, "a restart"
    )
    (state / "dead").unlink()
    pods.await_ready("web")
    assert any(reason == "Unhealthy" for reason, _ in pods.events("web"))


@pytest.mark.extended
def test_a_pod_that_asks_for_what_is_missing_waits_and_says_so(node, pods):
    source = {"configMapKeyRef": {"name": "later", "key": "word"}}
    code = "import os; print(os.environ['WORD'])"
    container = python("main", code, env=[{"name": "WORD", "valueFrom": source}])
    pods.create("waits", restartPolicy="Never", containers=[container])

    def waiting():
        statuses = pods.read("waits").status.container_statuses
        return statuses[0].state.waiting if statuses else None

    def complains():
        found = waiting()
        return found if found and found.reason == "CreateContainerConfigError" else None

    assert "'later' not found" in wait_until(complains, "a reason").message
    pods.core.create_namespaced_config_map(
        pods.namespace, {"metadata": {"name": "later"}, "data": {"word": "here"}}
    )
    pods.await_phase("waits", "Succeeded")
    assert node.log_of(pods.namespace, "waits", "main") == "here\n"


@pytest.mark.extended
def test_a_container_that_ignores_sigterm_is_killed_when_its_grace_is_over(node, pods):
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up'); "
    code += "[signal.pause() for _ in iter(int, 1)]"
    pods.create("stubborn", terminationGracePeriodSeconds=1, containers=[python("main", code)])
    status = pods.await_ready("stubborn").status.container_statuses[0]
    wait_until(lambda: "up" in node.log_of(pods.namespace, "stubborn", "main"), "it is up")
    pods.core.delete_namespaced_pod("stubborn", pods.namespace)
    wait_until(lambda: pods.is_gone("stubborn"), "the pod is deleted", seconds=10)
    assert not is_running(int(status.container_id.removeprefix("process://")))


@pytest.mark.extended
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_however_the_node_ends_its_containers_end_and_its_successor_runs_them_again(
    node, pods, signum
):
    pods.create("decode-0", **decode_like_pod())
    pods.await_ready("decode-0")
    processes = descendants(node.process.pid)
    assert len(processes) >= 3
    node.end(signum)
    wait_until(lambda: not any(is_running(pid) for pid in processes), "nothing is left running")

    node.start()

    def runs_again():
        status = pods.read("decode-0").status.container_statuses[0]
        return status if status.restart_count == 1 and status.state.running else None

    assert wait_until(runs_again, "the containers run again").last_state.terminated
    pods.await_ready("decode-0")


@pytest.mark.extended
def test_an_ephemeral_container_runs_beside_decode_and_ends_with_the_pod(node, pods):
    pods.create("decode-0", **decode_like_pod())
    before = pods.await_ready("decode-0")
    command = ["python", "-c", "import time; print('added', flush=True); time.sleep(600)"]
    added = {"name": "windrow-1", "image": "none", "command": command}
    added["targetContainerName"] = "decode"
    pods.core.patch_namespaced_pod_ephemeralcontainers(
        "decode-0", pods.namespace, {"spec": {"ephemeralContainers": [added]}}
    )

    def status():
        found = pods.read("decode-0").status.ephemeral_container_statuses
        return found[0] if found else None

    running = wait_until(lambda: status() and status().state.running and status(), "it runs")
    wait_until(lambda: "added" in node.log_of(pods.namespace, "decode-0", "windrow-1"), "its log")
    # Killed, it stays ended: the next one has another name. The pod is ready all the while.
    os.kill(int(running.container_id.removeprefix("process://")), signal.SIGKILL)
    ended = wait_until(lambda: status().state.terminated, "it has ended")
    assert ended.exit_code == 128 + signal.SIGKILL
    second = {**added, "name": "windrow-2"}
    pods.core.patch_namespaced_pod_ephemeralcontainers(
        "decode-0", pods.namespace, {"spec": {"ephemeralContainers": [second]}}
    )

    def second_pid():
        for found in pods.read("decode-0").status.ephemeral_container_statuses:
            if found.name == "windrow-2" and found.state.running:
                return int(found.container_id.removeprefix("process://"))
        return None

    pid = wait_until(second_pid, "the second one runs")
    after = pods.await_ready("decode-0").status
    assert after.container_statuses[0].container_id == (
        before.status.container_statuses[0].container_id
    )
    pods.core.delete_namespaced_pod("decode-0", pods.namespace)
    wait_until(lambda: pods.is_gone("decode-0"), "the pod is deleted")
    assert not is_running(pid)
