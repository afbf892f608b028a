"""A served name points to one version in all servers, and each finds it on its own volume."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace

import aiohttp
import pytest
from aiohttp import web

from windrow.crd import parse_job_spec
from windrow_operator.adapter_versions import (
    cache_of,
    kept_digests,
    loss_refusal,
    served_name,
    source_of,
    trial_name,
    versions,
)
from windrow_operator.cluster_state import ClusterState
from windrow_operator.deploy import CanaryFailed, Deployments
from windrow_operator.model import Job
from windrow_operator.policies import policy_of
from windrow_operator.server_calls import KeyRefused, NotLoaded, Servers, probes
from windrow_operator.serving import Instance

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def job(
    job_name,
    *,
    model="/m",
    ended=0,
    namespace="team",
    destination="",
    digest="",
    loss=None,
    **deploy,
):
    output = {"destination": destination or f"s3://team/{job_name}"}
    named = {"enabled": True, "name": "tone", **deploy}
    output["deploy"] = {key: value for key, value in named.items() if value is not None}
    spec = {
        "model": {"name": model},
        "dataset": {"source": "/rows.jsonl", "evalFraction": 0.1},
        "training": {"maxSteps": 1},
        "output": output,
    }
    status = {
        "conditions": [{"type": "Succeeded", "status": "True", "reason": "Completed"}],
        "completionTime": f"2026-01-01T00:00:{ended:02}Z",
        "adapter": {"path": output["destination"], "digest": digest},
    }
    if loss is not None:
        status["evaluation"] = {"baseLoss": 3.0, "tunedLoss": loss}
    return Job(namespace, job_name, f"uid-{job_name}", 1, NOW, parse_job_spec(spec), status=status)


def judged(one, reason):
    told = {"type": "Deployed", "status": "False", "reason": reason}
    conditions = [*one.status["conditions"], told]
    return replace(one, status={**one.status, "conditions": conditions})


def test_the_newest_version_that_has_not_failed_is_last():
    one, two, three = job("b", ended=1), job("a", ended=2), job("c", ended=3)
    others = [job("d", ended=4, name="other"), job("e", ended=5, namespace="others")]
    others += [job("g", ended=6, model="/another")]
    gone = replace(job("f", ended=6), deleted_at=NOW)
    known = [three, *others, gone, two, one]
    assert versions(two, known) == [one, two, three]
    assert versions(two, [judged(three, "CanaryFailed"), two, one]) == [one, two]


def test_no_two_namespaces_and_no_two_versions_share_a_name():
    # Namespaces hold no dot, so the first one ends them.
    assert served_name(job("x")) == "team.tone"
    assert served_name(job("x", namespace="team-2")) == "team-2.tone"
    assert served_name(job("x", name=None)) == "team.x"
    trials = {trial_name(job("x", digest=n * 64)) for n in "ab"}
    assert len(trials) == 2


def test_the_version_that_a_name_may_go_back_to_is_kept():
    known = [job(str(n), ended=n, digest=f"{n}" * 64) for n in range(4)]
    assert kept_digests("team", known) == ["2" * 64, "3" * 64]
    assert kept_digests("others", known) == []


@pytest.mark.parametrize(
    ("allowed", "loss", "before", "refused"),
    [
        (None, 9.0, 2.0, False),
        ("0", 2.0, 2.0, False),
        ("0", 2.1, 2.0, True),
        ("0.2", 2.1, 2.0, False),
        ("0", 2.9, None, False),  # against the base model
        ("0", 3.1, None, True),
        ("0", None, 2.0, True),  # it has sent none
    ],
)
def test_a_loss_is_compared_with_the_version_before_or_the_base_model(
    allowed, loss, before, refused
):
    earlier = None if before is None else job("a", loss=before)
    one = job("b", loss=loss, canary={"maxLossIncrease": allowed} if allowed else None)
    assert bool(loss_refusal(one, earlier)) == refused


def policy(**access):
    claim = {"persistentVolumeClaim": {"claimName": "c"}}
    volumes = [{"name": "v", "mountPath": "/vol", **claim}]
    sidecar = {"volumes": volumes, "adapterCache": {"volume": "v"}}
    spec = {"selector": {}, "objective": {"tpot": "40ms"}, "access": access, "sidecar": sidecar}
    return policy_of({"metadata": {"namespace": "team", "name": "p", "uid": "p"}, "spec": spec})


def test_each_namespace_has_a_folder_of_copies_below_its_own():
    anyone = {"matchExpressions": [{"key": "kubernetes.io/metadata.name", "operator": "Exists"}]}
    shared = policy(namespaceSelector=anyone)
    found = {cache_of(job("x", namespace=name), shared) for name in ("team", "others")}
    assert found == {
        "/vol/team/.windrow-adapters/team",
        "/vol/others/.windrow-adapters/others",
    }
    assert cache_of(job("x"), policy()) == "/vol/.windrow-adapters/team"


def test_an_adapter_is_read_from_its_jobs_destination_and_else_from_the_hub():
    assert source_of(job("x"), policy()) == "s3://team/x"
    assert source_of(job("x", destination="/vol/a"), policy()) == "/vol/a"
    assert source_of(job("x", destination="/elsewhere/a"), policy()) == ""
    pushed = job("x", destination="/elsewhere/a")
    hub = {"repository": "team/tone"}
    body = pushed.spec.model_dump(by_alias=True, mode="json", exclude_none=True)
    body["output"] |= {"hub": hub, "secretRef": {"name": "s"}}
    assert source_of(replace(pushed, spec=parse_job_spec(body)), policy()) == "hf://team/tone"


class Server:
    """A stand-in for SGLang's front: the names that it answers by, with their directories."""

    def __init__(self, refuses=""):
        self.names, self.refuses = {}, refuses

    def app(self):
        async def models(_request):
            known = [{"id": name, "root": path} for name, path in self.names.items()]
            return web.json_response({"data": known})

        async def load(request):
            body = await request.json()
            name, path = body["lora_name"], body["lora_path"]
            if path == self.refuses or name in self.names:
                return web.json_response({"success": False, "error_message": "no"}, status=400)
            self.names[name] = path
            return web.json_response({"success": True})

        async def unload(request):
            del self.names[(await request.json())["lora_name"]]
            return web.json_response({"success": True})

        app = web.Application()
        app.router.add_get("/v1/models", models)
        app.router.add_post("/load_lora_adapter", load)
        app.router.add_post("/unload_lora_adapter", unload)
        return app


def test_where_one_server_refuses_a_version_all_have_the_one_before():
    servers = [Server(), Server(refuses="/two")]

    async def run():
        runners, found = [], []
        for n, server in enumerate(servers):
            runner = web.AppRunner(server.app())
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            runners.append(runner)
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            found.append(Instance(f"d/decode-{n}", str(n), "decode", url))
        try:
            async with aiohttp.ClientSession() as session:
                calls = Servers(session)
                await calls.load_everywhere([(i, "/one") for i in found], "tone", pinned=False)
                with pytest.raises(NotLoaded, match="decode-1 refuses: no"):
                    await calls.load_everywhere([(i, "/two") for i in found], "tone", pinned=False)
        finally:
            for runner in runners:
                await runner.cleanup()

    asyncio.run(run())
    assert [server.names for server in servers] == [{"tone": "/one"}] * 2


def test_each_instance_answers_a_canary_and_decode_only_with_a_prefill_instance():
    prefill = [Instance(f"p{n}", "", "prefill", "", bootstrap=f"10.0.0.{n} 8998") for n in (1, 2)]
    decode = [Instance(f"d{n}", "", "decode", "") for n in (1, 2, 3)]
    whole = Instance("w", "", "decode", "", is_whole=True)
    pairs = probes([*prefill, *decode, whole])
    assert {each for pair in pairs for each in pair} == {*prefill, *decode, whole}
    assert (whole,) in pairs
    assert all(len(pair) == 2 for pair in pairs if whole not in pair)
    assert probes(decode) == []


class Answering:
    """Servers that take every adapter, and answer as `says` by what a request names."""

    def __init__(self, says):
        self.says, self.names = says, []

    async def load_everywhere(self, targets, name, *, pinned):
        self.names.append(name)

    async def unload(self, instance, name):
        self.names.remove(name)

    async def ask(self, parts, model, prompt):
        said = self.says["adapter" if ":" in model else "base"]
        if isinstance(said, Exception):
            raise said
        return said


SILENT = NotLoaded("w does not answer v1/completions: TimeoutError")


@pytest.mark.parametrize(
    ("says", "first", "later"),
    [
        ({"adapter": "", "base": ""}, "", ""),
        ({"adapter": "w answers with an error", "base": ""}, CanaryFailed, CanaryFailed),
        ({"adapter": SILENT, "base": ""}, CanaryFailed, CanaryFailed),
        ({"adapter": SILENT, "base": SILENT}, "No canary was asked", NotLoaded),
        ({"adapter": KeyRefused("w asks for a key"), "base": ""}, "asks for a key", "asks for a"),
    ],
)
def test_a_canary_says_something_where_servers_answer_without_the_adapter(says, first, later):
    target = (Instance("w", "", "decode", "", is_whole=True), "/a")
    deployments = Deployments(ClusterState(NOW), None, None, lambda: NOW)
    for before, outcome in ((None, first), (job("a"), later)):
        servers = Answering(says)
        trying = deployments._try_out(job("b"), before, [target], servers)
        if isinstance(outcome, str):
            assert outcome in asyncio.run(trying)
            # The first version stays under its name, a later one leaves its name of the trial.
            assert servers.names == ([] if before else ["team.tone"])
        else:
            with pytest.raises(outcome):
                asyncio.run(trying)
            assert servers.names == []


class Silent(Deployments):
    """Deployments of which the servers of one namespace never answer."""

    def __init__(self, cluster, silent):
        super().__init__(cluster, None, None, lambda: NOW)
        self.silent, self.tended = silent, []
        self.both_blue = asyncio.Event()

    def _wanted(self):
        return list(self._cluster.jobs.values())

    async def _tend(self, job, servers):
        self.tended.append(job.uid)
        if job.namespace == self.silent:
            await asyncio.Event().wait()
        if self.tended.count("blue-2") > 1:
            self.both_blue.set()


def test_servers_of_one_namespace_that_do_not_answer_hold_up_its_own_adapters_alone(monkeypatch):
    monkeypatch.setattr("windrow_operator.deploy._ROUND_SECONDS", 0.01)
    uids = ("red-1", "red-2", "blue-1", "blue-2")
    jobs = {uid: SimpleNamespace(namespace=uid.partition("-")[0], uid=uid) for uid in uids}
    cluster = SimpleNamespace(jobs=jobs, job_view=jobs.__getitem__)

    async def scene():
        deployments = Silent(cluster, "red")
        running = asyncio.create_task(deployments.run())
        await deployments.both_blue.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return deployments.tended

    tended = asyncio.run(scene())
    assert tended.count("red-1") == 1
    assert "red-2" not in tended
