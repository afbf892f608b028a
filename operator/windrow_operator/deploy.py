"""Load finished adapters into serving pods, with roll-back, and unload them.

Apart from the driver's loop, because a server takes seconds to load and may not answer at all.
An adapter that decode answers by must be loaded where its prompts are computed as well, since their
KV depends on it: all decode and prefill instances of the model have it, or none.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

import aiohttp

from windrow.conditions import Reason
from windrow.crd import FINALIZER_ADAPTER, FINETUNE_JOB
from windrow.crd.finetunejob import CanarySpec
from windrow.crd.servable import unservable
from windrow.errors import UserError
from windrow.outputs import is_bucket
from windrow_operator import status, tenancy
from windrow_operator.adapter_caches import AdapterCaches, SidecarStream, StillFetching
from windrow_operator.adapter_versions import (
    cache_of,
    digest_of,
    has_failed,
    is_proven,
    is_wanted,
    kept_digests,
    loss_refusal,
    served_name,
    trial_name,
    versions,
)
from windrow_operator.cluster_state import ClusterState
from windrow_operator.events import Recorder
from windrow_operator.finalizers import set_finalizer
from windrow_operator.kube import ApiError, Kube, ObjectNotFound, kind_path
from windrow_operator.model import CheckedPolicy, Job
from windrow_operator.reconcile import Event
from windrow_operator.secrets import read_server_key
from windrow_operator.server_calls import KeyRefused, NotLoaded, Servers, Target, probes
from windrow_operator.serving import Instance, instances, workers_of_dynamo

log = logging.getLogger(__name__)

_ROUND_SECONDS = 2.0
_RETRY_SECONDS = 60.0  # after a refusal, and between two looks for new instances
_TIMEOUT = aiohttp.ClientTimeout(total=60, sock_connect=5)
_WARNINGS: Final = (Reason.NOT_LOADED, Reason.NO_INSTANCES, Reason.CANARY_FAILED)


class CanaryFailed(Exception):
    """Servers do not answer by a version, and do without it; the message names one."""


class Deployments:
    """Keeps the adapters of finished jobs loaded as their specs ask."""

    def __init__(
        self,
        cluster: ClusterState,
        kube: Kube,
        recorder: Recorder,
        clock: Callable[[], datetime],
        sidecar_of: Callable[[str], SidecarStream | None] = lambda pod_uid: None,
    ) -> None:
        self._cluster, self._kube, self._recorder, self._clock = cluster, kube, recorder, clock
        self.caches = AdapterCaches(kube, sidecar_of, time.monotonic)
        self._look_at: dict[str, float] = {}  # by job UID: not before that time of the loop

    async def run(self) -> None:
        """Round after round, until cancelled.

        Each namespace has rounds of its own: servers of one that do not answer hold up its adapters
        alone, and neither they nor their number keep others from a connection.
        """
        connector = aiohttp.TCPConnector(limit=0)
        rounds: dict[str, asyncio.Task[None]] = {}
        async with (
            aiohttp.ClientSession(timeout=_TIMEOUT, connector=connector) as session,
            asyncio.TaskGroup() as tasks,
        ):
            servers = Servers(session)
            while True:
                rounds = {name: task for name, task in rounds.items() if not task.done()}
                for namespace, jobs in self._by_namespace().items():
                    if namespace not in rounds:
                        rounds[namespace] = tasks.create_task(self._round(jobs, servers))
                for uid in [uid for uid in self._look_at if uid not in self._cluster.jobs]:
                    del self._look_at[uid]
                await asyncio.sleep(_ROUND_SECONDS)

    def _by_namespace(self) -> dict[str, list[Job]]:
        found: dict[str, list[Job]] = {}
        for job in self._wanted():
            found.setdefault(job.namespace, []).append(job)
        return found

    async def _round(self, jobs: Iterable[Job], servers: Servers) -> None:
        for known in jobs:
            if known.uid in self._cluster.jobs:  # as it is by its turn
                await self._tend(self._cluster.job_view(known.uid), servers)

    async def _tend(self, job: Job, servers: Servers) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s < self._look_at.get(job.uid, 0.0) and job.deleted_at is None:
            return
        try:
            if job.deleted_at is not None:
                await self._withdraw(job, servers)
            elif is_wanted(job) and not has_failed(job):
                self._look_at[job.uid] = now_s + _RETRY_SECONDS
                await self._deploy(job, servers)
        except ObjectNotFound:
            self._cluster.drop_job(job.uid)
        except ApiError as error:
            # A conflict among them: the watch brings the newer version.
            log.info("the adapter of job %s: %s", job.key, error)
            self._look_at.pop(job.uid, None)
        except Exception:  # a surprise in one job must not stop the others
            log.exception("cannot load or unload the adapter of job %s", job.key)

    async def _deploy(self, job: Job, servers: Servers) -> None:
        """Have the served name point to the job's version, once that has passed its canary."""
        assert job.spec is not None
        if refused := next(unservable(job.spec), None):
            # Of a job that was accepted before new ones were checked.
            message = f"spec.adapter.{refused[0]}: {refused[1]}. Nothing is loaded"
            await self._tell(job, Reason.NOT_LOADED, message)
            return
        known = versions(job, self._wanted())
        place = next((n for n, each in enumerate(known) if each.uid == job.uid), len(known))
        if newer := [each for each in known[place + 1 :] if is_proven(each)]:
            about = f"{served_name(job)} points to the version of job {newer[-1].name}"
            await self._tell(job, Reason.SUPERSEDED, about)
            return
        if known[place + 1 :] and not is_proven(job):
            return  # the newest is tried first
        before = next((each for each in reversed(known[:place]) if is_proven(each)), None)
        if not is_proven(job) and (why := loss_refusal(job, before)):
            await self._reject(job, before, why)
            return
        pods = await self._pods(job)
        found = instances(pods, job)
        if not any(instance.role == "decode" for instance in found):
            message = (
                f"No ready decode instance serves {job.spec.model.name} under a HarvestPolicy with "
                "access.adapters that admits the job's namespace"
            )
            if workers := workers_of_dynamo(pods, job):
                message = (
                    f"{', '.join(workers)}: a worker of Dynamo has no server of SGLang's, by "
                    "which adapters are loaded. Load this one by Dynamo, from its destination"
                )
            await self._tell(job, Reason.NO_INSTANCES, message)
            return
        try:
            paths = await self._paths(job, found)
            targets = [(each, paths[each.key]) for each in await self._with_keys(found)]
            job = await self._hold(job)
            note = "" if is_proven(job) else await self._try_out(job, before, targets, servers)
            pinned = job.spec is not None and job.spec.output.deploy.pinned
            await servers.load_everywhere(targets, served_name(job), pinned=pinned)
        except StillFetching as fetching:
            self._look_at.pop(job.uid, None)
            await self._tell(
                job, Reason.FETCHING, f"It is being copied to the volume of {fetching}"
            )
        except NotLoaded as error:
            if digest := digest_of(job):
                self.caches.forget(digest)
            name = served_name(job)
            kept = f" {name} points to the version of job {before.name}." if before else ""
            await self._tell(job, Reason.NOT_LOADED, f"{error}. No instance has it.{kept}")
        except CanaryFailed as error:
            await self._reject(job, before, str(error))
        else:
            assert job.spec is not None
            what = ", ".join(f"{instance.key} ({instance.role})" for instance in found)
            ask = f'Requests ask for it with "model": "{job.spec.model.name}:{served_name(job)}"'
            await self._tell(job, Reason.LOADED, f"{ask}. Loaded into {what}{note}")
            if before is not None:
                self._look_at.pop(before.uid, None)  # its condition says so soon

    def _wanted(self) -> list[Job]:
        return self._cluster.job_views(list(self._cluster.index.with_adapters))

    async def _hold(self, job: Job) -> Job:
        """Have the job unload its adapter before it goes; return it as it is then."""
        if FINALIZER_ADAPTER in (job.body["metadata"].get("finalizers") or ()):
            return job
        body = dict(job.body)
        await set_finalizer(self._kube, self._cluster, body, FINALIZER_ADAPTER, present=True)
        return self._cluster.job_view(job.uid)

    async def _try_out(
        self, job: Job, before: Job | None, targets: Sequence[Target], servers: Servers
    ) -> str:
        """Ask each instance for an answer by the new version; return what to say of it.

        Where the name points to an earlier version, the new one is loaded beside it first.

        Raises:
            NotLoaded: it could not be loaded, or servers answer nothing at all.
            CanaryFailed: they answer, but not by this version, which no instance has any more.
        """
        assert job.spec is not None
        name = trial_name(job) if before is not None else served_name(job)
        canary = job.spec.output.deploy.canary or CanarySpec()
        pinned = name == served_name(job) and job.spec.output.deploy.pinned
        await servers.load_everywhere(targets, name, pinned=pinned)
        model, asked = job.spec.model.name, [each for each, _ in targets]
        note, passed = "", False
        try:
            groups = probes(asked)
            if not groups:
                note = ". No canary was asked: no prefill instance computes prompts for decode"
            # All at once: servers that do not answer hold up other adapters as long as one of them.
            found = await asyncio.gather(
                *(_trial(servers, parts, model, name, canary.prompt) for parts in groups),
                return_exceptions=True,
            )
            for outcome in found:
                if isinstance(outcome, CanaryFailed):
                    raise outcome
            for outcome in found:
                unasked = NotLoaded if before is None else KeyRefused  # nothing is served so far
                if isinstance(outcome, unasked):
                    note = f". No canary was asked: {outcome}"
                elif outcome:
                    raise outcome
            passed = True
        finally:
            if name != served_name(job) or not passed:
                await self._unload(reversed(asked), name, job, servers)
        return note

    async def _reject(self, job: Job, before: Job | None, why: str) -> None:
        """Note that a version has failed; the name points to the one before it."""
        name = served_name(job)
        rest = f"{name} points to the version of job {before.name}" if before else "Nobody has it"
        await self._tell(job, Reason.CANARY_FAILED, f"{why}. {rest}")
        if before is not None:
            self._look_at.pop(before.uid, None)

    async def _paths(self, job: Job, found: Sequence[Instance]) -> dict[str, str]:
        """Return the directory of the job's version as each instance sees it, by its key.

        Raises:
            StillFetching: a copy is on its way.
            NotLoaded: an instance cannot have it; says what to change.
        """
        assert job.spec is not None
        place = str(job.status["adapter"]["path"])
        policies = self._caching(job, found)
        for each in found:
            if each.uid in policies or not is_bucket(place):
                continue
            policy = self._policy_of(each, job)
            what = "names no sidecar.adapterCache"
            if digest_of(job) == "":
                what = "can copy it, but the worker that wrote it was too old to report its digest"
            raise NotLoaded(
                f"{each.key} loads from paths, the adapter is in {place}, and policy "
                f"{policy.name if policy else 'of its namespace'} {what}"
            )
        keep = kept_digests(job.namespace, self._wanted())
        cached = await self.caches.require(job, policies, found, keep)
        return {each.key: cached.get(each.key, place) for each in found}

    def _caching(self, job: Job, found: Iterable[Instance]) -> dict[str, CheckedPolicy]:
        """Return the policies by which instances load from copies, by the UIDs of their pods."""
        if not digest_of(job):
            return {}
        known = ((each.uid, self._policy_of(each, job)) for each in found)
        return {uid: policy for uid, policy in known if policy and cache_of(job, policy)}

    def _policy_of(self, instance: Instance, job: Job) -> CheckedPolicy | None:
        """Return the policy under which an instance takes adapters.

        What only prefills is under none itself: it mounts what decode of its namespace does.
        """
        pod = self._cluster.pods.get(instance.uid)
        if pod is not None and (policy := self._cluster.policy_of(pod)) is not None:
            return policy
        namespace = instance.key.partition("/")[0]
        pods = [each for each in self._cluster.pods.values() if each.namespace == namespace]
        known = {
            policy.name: policy
            for each in pods
            if self._takes_adapters(policy := self._cluster.policy_of(each), job) and policy
        }
        return known[min(known)] if known else None

    async def _withdraw(self, job: Job, servers: Servers) -> None:
        """Unload the adapter of a job that is being deleted, then let it go.

        Where an earlier version has the name next, it takes the place in `_deploy`.
        """
        if FINALIZER_ADAPTER not in (job.body["metadata"].get("finalizers") or ()):
            return
        others = versions(job, self._wanted())
        found = instances(await self._pods(job), job)
        if others:
            self._look_at.pop(others[-1].uid, None)
        else:
            try:
                found = await self._with_keys(found)
            except NotLoaded as error:
                log.warning("job %s: %s", job.key, error)
            await self._unload(reversed(found), served_name(job), job, servers)
            if digest_of(job) not in kept_digests(job.namespace, self._wanted()):
                self.caches.drop(job, self._caching(job, found), found)
        body = dict(job.body)
        await set_finalizer(self._kube, self._cluster, body, FINALIZER_ADAPTER, present=False)

    async def _unload(
        self, found: Iterable[Instance], name: str, job: Job, servers: Servers
    ) -> None:
        for instance in found:
            try:
                await servers.unload(instance, name)
            except NotLoaded as error:
                # The deletion of a job must not wait for a server that does not answer; the next
                # start of that server begins without the adapter.
                log.warning("job %s: cannot unload the adapter: %s", job.key, error)

    async def _with_keys(self, found: list[Instance]) -> list[Instance]:
        """Return the instances with the key that the policies of their namespaces name.

        Raises:
            NotLoaded: a Secret is named that cannot be read.
        """
        keys: dict[str, str] = {}
        named = {
            policy.namespace: policy.spec.access.server_key_secret
            for _, policy in sorted(self._cluster.policies.items(), reverse=True)
            if policy.spec and policy.spec.access.server_key_secret and policy.spec.access.adapters
        }
        for namespace in {instance.key.partition("/")[0] for instance in found} & named.keys():
            secret = named[namespace]
            assert secret is not None
            try:
                keys[namespace] = await read_server_key(
                    self._kube, namespace, secret.name, secret.key
                )
            except UserError as error:
                raise NotLoaded(str(error)) from error
        return [
            replace(instance, token=keys.get(instance.key.partition("/")[0], ""))
            for instance in found
        ]

    async def _pods(self, job: Job) -> list[dict[str, Any]]:
        """Return the pods that the job may load adapters into, by the policies that admit it.

        Beside the decode pods under these policies, what only prefills in their namespaces.
        """
        namespaces, closed = set(), set()
        for pod in self._cluster.pods.values():
            if self._takes_adapters(self._cluster.policy_of(pod), job):
                namespaces.add(pod.namespace)
            else:
                closed.add(pod.uid)
        found = []
        for namespace in sorted(namespaces):
            pods = await self._kube.list(f"/api/v1/namespaces/{namespace}/pods")
            found += [pod for pod in pods if pod["metadata"]["uid"] not in closed]
        return found

    def _takes_adapters(self, policy: CheckedPolicy | None, job: Job) -> bool:
        if policy is None or policy.spec is None or not policy.spec.access.adapters:
            return False
        return not tenancy.closed_to(job, policy)

    async def _tell(self, job: Job, reason: Reason, message: str) -> None:
        after = status.deployed(job, reason, message, self._clock())
        if after == dict(job.status):
            return
        path = kind_path(FINETUNE_JOB, job.namespace, job.name, "status")
        written = await self._kube.replace(path, {**job.body, "status": after})
        self._cluster.put_job(written)
        event = Event(reason, message, warning=reason in _WARNINGS)
        await self._recorder.record(written, event)


async def _trial(
    servers: Servers, parts: Sequence[Instance], model: str, name: str, prompt: str
) -> None:
    """Have instances answer a request by an adapter.

    Raises:
        CanaryFailed: they do not, and do by the base model.
        NotLoaded: they answer neither.
        KeyRefused: they take no request with their policy's key.
    """
    if why := await _answer(servers, parts, f"{model}:{name}", prompt):
        if other := await _answer(servers, parts, model, prompt):
            raise NotLoaded(f"{other} also without an adapter")
        raise CanaryFailed(f"{why}, and not without the adapter")


async def _answer(servers: Servers, parts: Sequence[Instance], model: str, prompt: str) -> str:
    """Return why instances give no answer; "": they do. Raises KeyRefused."""
    try:
        return await servers.ask(parts, model, prompt)
    except KeyRefused:
        raise
    except NotLoaded as error:
        return str(error)
