"""Have sidecars copy adapters to where their pods' servers load them from.

What sidecars answer is kept until their streams end. The directory is computed here, from the
policy and the job: an answer says only whether a copy is there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from windrow.crd.harvestpolicy import VolumeSpec
from windrow.errors import UserError
from windrow.outputs import is_bucket
from windrow.proto import attach_pb2 as pb
from windrow_operator import claims, tenancy
from windrow_operator.adapter_versions import cache_of, digest_of, source_of
from windrow_operator.kube import Kube
from windrow_operator.model import CheckedPolicy, Job
from windrow_operator.secrets import read_secrets
from windrow_operator.server_calls import NotLoaded
from windrow_operator.serving import Instance

log = logging.getLogger(__name__)

# A copy takes minutes at most; one that is not answered is asked for again.
_ASKED_AGAIN_AFTER_S: Final = 900.0
# A server that refuses may not have found the copy: it is looked at again, but not each time.
_LOOKED_AT_AGAIN_AFTER_S: Final = 600.0


class SidecarStream(Protocol):
    """The stream of a pod's sidecar."""

    stores_adapters: bool

    def send(self, message: pb.OperatorMessage) -> None:
        """Queue a message."""


class StillFetching(Exception):
    """Copies are on their way; the message says whose."""


@dataclass
class _Order:
    """An order to a sidecar."""

    sidecar: SidecarStream
    job_uid: str
    asked_at_s: float
    answer: str | None = None  # None: none yet; "": the copy is there


class AdapterCaches:
    """Orders to sidecars, and what they answered.

    Args:
        kube: reads Secrets of jobs.
        sidecar_of: returns the stream of a pod's sidecar, by the pod's UID.
        clock: seconds of any clock.
    """

    def __init__(
        self,
        kube: Kube,
        sidecar_of: Callable[[str], SidecarStream | None],
        clock: Callable[[], float],
    ) -> None:
        self._kube, self._sidecar_of, self._clock = kube, sidecar_of, clock
        # By pod UID, digest and namespace: each namespace has copies of its own.
        self._orders: dict[tuple[str, str, str], _Order] = {}

    def answered(self, pod_uid: str, told: pb.AdapterStored) -> None:
        """Take a sidecar's answer to an order; others say nothing."""
        for (uid, digest, _), order in self._orders.items():
            asked = (uid, digest, order.job_uid) == (pod_uid, told.digest, told.job_uid)
            if asked and order.answer is None:
                order.answer = claims.text(told.error)

    def forget(self, digest: str) -> None:
        """Have copies looked at again that were last looked at a while ago."""
        before_s = self._clock() - _LOOKED_AT_AGAIN_AFTER_S
        for key, order in [*self._orders.items()]:
            if key[1] == digest and order.asked_at_s < before_s:
                del self._orders[key]

    def drop(
        self, job: Job, policies: Mapping[str, CheckedPolicy], found: Sequence[Instance]
    ) -> None:
        """Have the copies of a job's version removed, where a sidecar can be asked for that.

        Args:
            job: that goes; no other job has its digest.
            policies: see `require`.
            found: the instances.
        """
        for policy, sharing in self._by_volume(policies, found).values():
            volume = policy.spec.sidecar.cache_volume if policy.spec else None
            able = (self._sidecar_of(each.uid) for each in sharing)
            sidecar = next((each for each in able if each and each.stores_adapters), None)
            if sidecar is None or volume is None:
                continue
            order = pb.StoreAdapter(
                job_uid=job.uid,
                digest=digest_of(job),
                cache=cache_of(job, policy),
                outputs=_outputs(job, policy, volume),
                forget=True,
            )
            sidecar.send(pb.OperatorMessage(adapter=order))
        for key in [key for key in self._orders if key[1:] == (digest_of(job), job.namespace)]:
            del self._orders[key]

    @staticmethod
    def _by_volume(
        policies: Mapping[str, CheckedPolicy], found: Iterable[Instance]
    ) -> dict[tuple[str, str], tuple[CheckedPolicy, list[Instance]]]:
        """Return the instances that share a volume with copies, with the policy that names it."""
        ways: dict[tuple[str, str], tuple[CheckedPolicy, list[Instance]]] = {}
        for each in found:
            if policy := policies.get(each.uid):
                ways.setdefault(_volume_of(policy, each), (policy, []))[1].append(each)
        return ways

    async def require(
        self,
        job: Job,
        policies: Mapping[str, CheckedPolicy],
        found: Sequence[Instance],
        keep: Iterable[str],
    ) -> dict[str, str]:
        """Return the directory of the job's version for each instance, by its key.

        Args:
            job: that has succeeded, with a digest.
            policies: with a cache, by the UID of the pod whose instance loads from it.
            found: the instances.
            keep: digests of other versions of the namespace that stay.

        Raises:
            StillFetching: a copy is on its way.
            NotLoaded: one cannot be had; says why.
        """
        digest, wanted = digest_of(job), {**dict.fromkeys(keep), digest_of(job): None}
        paths = {
            each.key: f"{cache_of(job, policies[each.uid])}/{digest}"
            for each in found
            if each.uid in policies
        }
        fetching = []
        for policy, sharing in self._by_volume(policies, found).values():
            if not await self._ordered(job, policy, sharing, list(wanted)):
                fetching.append(sharing[0].key)
        if fetching:
            raise StillFetching(", ".join(fetching))
        return paths

    async def _ordered(
        self, job: Job, policy: CheckedPolicy, sharing: Sequence[Instance], keep: list[str]
    ) -> bool:
        """Return whether the copy on the volume that these instances share is there."""
        digest, now_s = digest_of(job), self._clock()
        able = [(each, self._sidecar_of(each.uid)) for each in sharing]
        attached = [
            (each, sidecar) for each, sidecar in able if sidecar and sidecar.stores_adapters
        ]
        if not attached:
            raise NotLoaded(
                f"no sidecar beside {', '.join(each.key for each in sharing)} can copy it to the "
                f"cache of policy {policy.name}: none is attached, or they are older than that"
            )
        for each, sidecar in attached:
            order = self._orders.get((each.uid, digest, job.namespace))
            if order is None or order.sidecar is not sidecar:
                continue
            if order.answer == "":
                return True
            if order.answer:
                del self._orders[each.uid, digest, job.namespace]  # asked again later
                raise NotLoaded(f"{each.key} cannot copy it: {order.answer}")
            if now_s - order.asked_at_s < _ASKED_AGAIN_AFTER_S:
                return False
        each, sidecar = attached[0]
        message = pb.OperatorMessage(adapter=await self._order(job, policy, keep))
        self._orders[each.uid, digest, job.namespace] = _Order(sidecar, job.uid, now_s)
        sidecar.send(message)
        return False

    async def _order(self, job: Job, policy: CheckedPolicy, keep: Sequence[str]) -> pb.StoreAdapter:
        assert job.spec is not None
        assert policy.spec is not None
        source, cache = source_of(job, policy), policy.spec.sidecar.adapter_cache
        volume = policy.spec.sidecar.cache_volume
        assert cache is not None
        assert volume is not None
        if not source:
            raise NotLoaded(
                f"{job.spec.output.destination} is on no volume of policy {policy.name} "
                "(sidecar.volumes), and spec.output.hub names no repository"
            )
        secret: Mapping[str, str] = {}
        if job.spec.output.secret_ref is not None and "://" in source:
            try:
                secret = (await read_secrets(self._kube, job.namespace, job.spec)).output
            except UserError as error:
                raise NotLoaded(str(error)) from error
            if refusal := tenancy.endpoint_refusal(job, policy, secret):
                raise NotLoaded(f"spec.output.secretRef: {refusal}")
        if is_bucket(source):
            secret = {key: value for key, value in secret.items() if key != "HF_TOKEN"}
        return pb.StoreAdapter(
            job_uid=job.uid,
            source=source,
            digest=digest_of(job),
            cache=cache_of(job, policy),
            cache_bytes=cache.size,
            keep=keep,
            outputs=_outputs(job, policy, volume),
            access=tenancy.access_of(job, policy),
            secret=secret,
        )


def _outputs(job: Job, policy: CheckedPolicy, volume: VolumeSpec) -> pb.Outputs:
    tree = tenancy.tree_of(policy, volume, job.namespace)
    return pb.Outputs(trees=[tree], mounts=[volume.mount_path])


def _volume_of(policy: CheckedPolicy, instance: Instance) -> tuple[str, str]:
    """Return what tells volumes apart: a claim is one for all pods, a directory one of a node."""
    volume = policy.spec.sidecar.cache_volume if policy.spec else None
    of_node = volume is not None and volume.host_path is not None
    return policy.key, instance.node if of_node else ""
