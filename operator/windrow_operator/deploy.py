"""Load finished adapters into serving pods, with roll-back, and unload them.

Apart from the driver's loop, because a server takes seconds to load and may not answer at all.
An adapter that decode answers by must be loaded where its prompts are computed as well, since their
KV depends on it: all decode and prefill instances of the model have it, or none.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from http import HTTPStatus
from typing import Any

import aiohttp

from windrow.conditions import ConditionType, Reason, get_condition
from windrow.crd import FINALIZER_ADAPTER, FINETUNE_JOB
from windrow.crd.servable import unreachable, unservable
from windrow.errors import UserError
from windrow_operator import status, tenancy
from windrow_operator.cluster_state import ClusterState
from windrow_operator.command_line import is_open, option_of
from windrow_operator.decode_pods import (
    MODE,
    matching_rule,
    model_of,
    other_engine,
    serving_container,
    serving_option,
)
from windrow_operator.events import Recorder
from windrow_operator.finalizers import set_finalizer
from windrow_operator.kube import ApiError, Kube, ObjectNotFound, kind_path
from windrow_operator.model import CheckedPolicy, Job, key_of
from windrow_operator.planning import same_model
from windrow_operator.reconcile import Event
from windrow_operator.secrets import read_server_key

log = logging.getLogger(__name__)

_ROUND_SECONDS = 2.0
_RETRY_SECONDS = 60.0  # after a refusal, and between two looks for new instances
_TIMEOUT = aiohttp.ClientTimeout(total=60, sock_connect=5)
_DEFAULT_PORT = "30000"  # SGLang's
# In this order it is loaded: nobody may ask decode for what prefill does not know.
_ROLES = ("prefill", "decode")
# Of an answer: what is read, and what of its error message is repeated.
_MOST_BYTES = 2**20
_MOST_REPEATED = 256
_BOTH_PARTS = ("", "null")  # of `--disaggregation-mode`: not disaggregated


class NotLoaded(Exception):
    """A server did not take an adapter; the message names it and says why."""


@dataclass(frozen=True, slots=True)
class Instance:
    """A serving process."""

    key: str  # of its pod
    uid: str
    role: str
    url: str
    token: str = field(default="", repr=False)  # that its server asks for


def instances(pods: Iterable[Mapping[str, Any]], job: Job) -> list[Instance]:
    """Return the ready decode and prefill instances of the job's model, prefill first.

    One that says no part and is harvested computes its prompts itself: it counts as decode.
    """
    found = []
    for pod in pods:
        metadata, state = pod["metadata"], pod.get("status") or {}
        container = serving_container(pod)
        role = option_of(container, MODE)
        if role in _BOTH_PARTS and matching_rule(pod):
            role = "decode"
        if role not in _ROLES or not same_model(job, model_of(container)) or not _is_ready(pod):
            continue
        if other_engine(container):  # it has the option, and other calls
            continue
        url = _url_of(state["podIP"], _port_of(container))
        key = key_of(metadata["namespace"], metadata["name"])
        if url:
            found.append(Instance(key, metadata["uid"], role, url))
    return sorted(found, key=lambda each: (_ROLES.index(each.role), each.key))


def _port_of(container: Mapping[str, Any]) -> str:
    """Return the port of a server: by its command line, else the one that it declares."""
    declared = [str(port["containerPort"]) for port in container.get("ports") or ()]
    written = serving_option(container, "--port")
    if is_open(written):
        # A variable whose value is not in the pod's spec: what is declared says it.
        return (declared or [_DEFAULT_PORT])[0]
    return written or _DEFAULT_PORT


def _url_of(address: str, port: str) -> str:
    """Return where a pod serves; empty: its command line names no port, whatever else it holds."""
    try:
        host = ipaddress.ip_address(address)
    except ValueError:
        return ""
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        return ""
    return f"http://[{host}]:{port}" if host.version == 6 else f"http://{host}:{port}"


def _is_ready(pod: Mapping[str, Any]) -> bool:
    state = pod.get("status") or {}
    ready = get_condition(state.get("conditions"), "Ready")
    gone = pod["metadata"].get("deletionTimestamp") is not None
    return not gone and bool(state.get("podIP")) and ready is not None and ready["status"] == "True"


def adapter_name(job: Job) -> str:
    """Return the name by which servers know the job's adapter; no two jobs share one."""
    return f"{job.namespace}.{job.name}"


class Servers:
    """SGLang's calls for adapters."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def load_everywhere(
        self, wanted: Sequence[Instance], name: str, path: str, *, pinned: bool
    ) -> None:
        """Load an adapter into instances in their order, or into none.

        Raises NotLoaded when one refuses: those that had taken it by this call have unloaded it.
        """
        taken: list[Instance] = []
        try:
            for instance in wanted:
                if name not in await self._names(instance):
                    taken.append(instance)  # before the call: its answer may be lost
                    body = {"lora_name": name, "lora_path": path, "pinned": pinned}
                    await self._call(instance, "load_lora_adapter", body)
        except NotLoaded:
            for instance in reversed(taken):
                with contextlib.suppress(NotLoaded):
                    await self.unload(instance, name)
            raise

    async def unload(self, instance: Instance, name: str) -> None:
        """Unload an adapter where it is loaded. Raises NotLoaded when the server does not."""
        if name in await self._names(instance):
            await self._call(instance, "unload_lora_adapter", {"lora_name": name})

    async def _names(self, instance: Instance) -> set[str]:
        answer = await self._request("GET", instance, "v1/models")
        models = answer.get("data")
        named = models if isinstance(models, list) else ()
        return {str(model.get("id")) for model in named if isinstance(model, dict)}

    async def _call(self, instance: Instance, call: str, body: Mapping[str, Any]) -> None:
        answer = await self._request("POST", instance, call, body)
        if answer.get("success") is not True:
            raise NotLoaded(f"{instance.key} refuses{_reason_of(answer)}")

    async def _request(
        self, method: str, instance: Instance, call: str, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        # Whoever made the pod answers: nothing of it is followed, and little is read or repeated.
        try:
            headers = {"Authorization": f"Bearer {instance.token}"} if instance.token else {}
            async with self._session.request(
                method,
                f"{instance.url}/{call}",
                json=body,
                headers=headers,
                allow_redirects=False,
            ) as response:
                if response.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
                    raise NotLoaded(_refused_key(instance, response.status))
                if 300 <= response.status < 400:
                    raise NotLoaded(f"{instance.key} answers {call} with a redirect")
                answer = json.loads(await _read(response.content, instance, call))
        except (aiohttp.ClientError, TimeoutError) as error:
            raise NotLoaded(
                f"{instance.key} does not answer {call}: {type(error).__name__}"
            ) from error
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise NotLoaded(f"{instance.key} does not answer {call} with a JSON object")
        return answer


def _refused_key(instance: Instance, status: int) -> str:
    what = "does not take the key of" if instance.token else "asks for a key: give it by"
    return f"{instance.key} {what} spec.access.serverKeySecret of its policy (HTTP {status})"


async def _read(content: aiohttp.StreamReader, instance: Instance, call: str) -> bytes:
    """Return the body of an answer, which may have so many bytes."""
    read = bytearray()
    async for piece in content.iter_chunked(64 * 1024):
        read += piece
        if len(read) > _MOST_BYTES:
            raise NotLoaded(f"{instance.key} answers {call} with more than {_MOST_BYTES} bytes")
    return bytes(read)


def _reason_of(answer: Mapping[str, Any]) -> str:
    """Return why a server refuses, in its own words: short, and without what is not printed."""
    said = answer.get("error_message")
    if not isinstance(said, str) or not said.strip():
        return " and says no error_message"
    words = " ".join("".join(c if c.isprintable() else " " for c in said[:_MOST_REPEATED]).split())
    return f": {words}{'...' if len(said) > _MOST_REPEATED else ''}"


class Deployments:
    """Keeps the adapters of finished jobs loaded as their specs ask."""

    def __init__(
        self,
        cluster: ClusterState,
        kube: Kube,
        recorder: Recorder,
        clock: Callable[[], datetime],
    ) -> None:
        self._cluster, self._kube, self._recorder, self._clock = cluster, kube, recorder, clock
        self._look_at: dict[str, float] = {}  # by job UID: not before that time of the loop

    async def run(self) -> None:
        """Round after round, until cancelled."""
        async with aiohttp.ClientSession(timeout=_TIMEOUT) as session:
            servers = Servers(session)
            while True:
                for job in self._cluster.job_views(list(self._cluster.index.with_adapters)):
                    await self._tend(job, servers)
                self._look_at = {u: t for u, t in self._look_at.items() if u in self._cluster.jobs}
                await asyncio.sleep(_ROUND_SECONDS)

    async def _tend(self, job: Job, servers: Servers) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s < self._look_at.get(job.uid, 0.0) and job.deleted_at is None:
            return
        try:
            if job.deleted_at is not None:
                await self._withdraw(job, servers)
            elif _is_wanted(job):
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
        assert job.spec is not None
        if why := unreachable(job.spec):
            # Of a job that was accepted before new ones were checked.
            message = f"spec.output.destination: {why}. Nothing is loaded"
            await self._tell(job, Reason.NOT_LOADED, message)
            return
        if refused := next(unservable(job.spec), None):
            # Of a job that was accepted before new ones were checked.
            message = f"spec.adapter.{refused[0]}: {refused[1]}. Nothing is loaded"
            await self._tell(job, Reason.NOT_LOADED, message)
            return
        found = instances(await self._pods(job), job)
        name = adapter_name(job)
        if not any(instance.role == "decode" for instance in found):
            message = (
                f"No ready decode instance serves {job.spec.model.name} under a HarvestPolicy with "
                "access.adapters that admits the job's namespace"
            )
            await self._tell(job, Reason.NO_INSTANCES, message)
            return
        body = job.body
        if FINALIZER_ADAPTER not in (body["metadata"].get("finalizers") or ()):
            body = await set_finalizer(
                self._kube, self._cluster, dict(body), FINALIZER_ADAPTER, present=True
            )
        path = str(job.status["adapter"]["path"])
        try:
            opened = await self._with_keys(found)
            await servers.load_everywhere(opened, name, path, pinned=job.spec.output.deploy.pinned)
        except NotLoaded as error:
            await self._tell(job, Reason.NOT_LOADED, f"{error}. No instance has it.", body)
        else:
            what = ", ".join(f"{instance.key} ({instance.role})" for instance in found)
            ask = f'Requests ask for it with "model": "{job.spec.model.name}:{name}"'
            await self._tell(job, Reason.LOADED, f"{ask}. Loaded into {what}", body)

    async def _withdraw(self, job: Job, servers: Servers) -> None:
        """Unload the adapter of a job that is being deleted, then let it go."""
        if FINALIZER_ADAPTER not in (job.body["metadata"].get("finalizers") or ()):
            return
        found = instances(await self._pods(job), job)
        try:
            found = await self._with_keys(found)
        except NotLoaded as error:
            log.warning("job %s: %s", job.key, error)
        for instance in reversed(found):
            try:
                await servers.unload(instance, adapter_name(job))
            except NotLoaded as error:
                # Whoever deletes a job must not wait for a server that does not answer; the next
                # start of that server begins without the adapter.
                log.warning("job %s: cannot unload the adapter: %s", job.key, error)
        body = dict(job.body)
        await set_finalizer(self._kube, self._cluster, body, FINALIZER_ADAPTER, present=False)

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

    async def _tell(
        self, job: Job, reason: Reason, message: str, body: Mapping[str, Any] | None = None
    ) -> None:
        after = status.deployed(job, reason, message, self._clock())
        if after == dict(job.status):
            return
        path = kind_path(FINETUNE_JOB, job.namespace, job.name, "status")
        written = await self._kube.replace(path, {**(body or job.body), "status": after})
        self._cluster.put_job(written)
        event = Event(reason, message, warning=reason is not Reason.LOADED)
        await self._recorder.record(written, event)


def _is_wanted(job: Job) -> bool:
    done = get_condition(job.status.get("conditions"), ConditionType.SUCCEEDED)
    ended_well = done is not None and done["status"] == "True"
    return ended_well and job.spec is not None and job.spec.output.deploy.enabled
