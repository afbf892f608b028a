"""Windrow from Python: submit jobs, watch them, fetch their adapters.

from windrow.client import WindrowClient

client = WindrowClient()
job = client.submit(Path("examples/finetunejob.yaml"))
done = client.wait(job.name, namespace=job.namespace)
print(done.state, done.adapter_path)
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import urllib3
from kubernetes import client as k8s
from kubernetes import config as k8s_config

from windrow.crd import (
    API_VERSION,
    FINETUNE_JOB,
    GROUP,
    HARVEST_POLICY,
    HARVEST_SLOT,
    LATENCY_PROFILE,
    VERSION,
    Kind,
    LatencyProfileSpec,
    parse_job_spec,
    parse_policy_spec,
    parse_profile_spec,
)
from windrow.documents import read_document, whole_numbers
from windrow.errors import Transient, UserError
from windrow.views import EventView, JobView, SlotView

DEFAULT_NAMESPACE = "default"
_POLL_S = 0.5
# The server's answer is awaited no longer: a stalled connection must not stall the caller.
_TIMEOUT_S = 15


def read_manifest(path: Path) -> dict[str, Any]:
    """Read one YAML document; raise UserError when it is none."""
    return read_document(path, "Give one readable manifest; see examples/finetunejob.yaml.")


class WindrowClient:
    """Talks to one API server. All calls block; safe for one thread at a time.

    Every call raises UserError for what the caller must mend (not found, refused, malformed; a spec
    is checked before anything is sent) and Transient when the server cannot be reached.

    Args:
        kubeconfig: file with the credentials; None: as kubectl finds them, or those of the pod.
        api: a ready client, instead.
    """

    def __init__(self, kubeconfig: Path | None = None, *, api: k8s.ApiClient | None = None) -> None:
        self._api = api if api is not None else _load(kubeconfig)
        self._custom = k8s.CustomObjectsApi(self._api)
        self._core = k8s.CoreV1Api(self._api)

    @property
    def api(self) -> k8s.ApiClient:
        """The client underneath, for what this one does not do."""
        return self._api

    def version(self) -> str:
        """Return the version of Kubernetes (`v1.36.3`)."""
        with _answers("the API server"):
            found = k8s.VersionApi(self._api).get_code(_request_timeout=_TIMEOUT_S)
        return str(found.git_version)

    # Jobs

    def submit(self, manifest: Mapping[str, Any] | Path, *, namespace: str = "") -> JobView:
        """Create a FinetuneJob from a manifest or a file; `namespace` overrules the manifest's."""
        body = read_manifest(manifest) if isinstance(manifest, Path) else whole_numbers(manifest)
        check_head(body, FINETUNE_JOB)
        parse_job_spec(body.get("spec", {}))
        name = body["metadata"]["name"]
        namespace = namespace or body["metadata"].get("namespace") or DEFAULT_NAMESPACE
        body["metadata"] = {**body["metadata"], "namespace": namespace}
        with _answers(f"FinetuneJob {namespace}/{name}"):
            found = self._custom.create_namespaced_custom_object(
                GROUP, VERSION, namespace, FINETUNE_JOB.plural, body, _request_timeout=_TIMEOUT_S
            )
        return JobView.of(found)

    def get(self, name: str, *, namespace: str = DEFAULT_NAMESPACE) -> JobView:
        """Return one job."""
        return JobView.of(self._get(FINETUNE_JOB, name, namespace))

    def jobs(self, *, namespace: str | None = None) -> list[JobView]:
        """Return the jobs of a namespace; None: of all."""
        return [JobView.of(found) for found in self._list(FINETUNE_JOB, namespace)]

    def wait(
        self,
        name: str,
        *,
        namespace: str = DEFAULT_NAMESPACE,
        within: timedelta | None = None,
        on_change: Callable[[JobView], None] | None = None,
    ) -> JobView:
        """Return the job once it has succeeded or failed.

        `on_change` sees each new state of it. Raises TimeoutError after `within`; what is Transient
        is waited out.
        """
        deadline = None if within is None else time.monotonic() + within.total_seconds()
        seen: JobView | None = None
        while True:
            job = seen
            with contextlib.suppress(Transient):
                job = self.get(name, namespace=namespace)
            if job is not None and job != seen and on_change is not None:
                on_change(job)
            seen = job
            if job is not None and job.finished:
                return job
            if deadline is not None and time.monotonic() >= deadline:
                state = "unknown" if job is None else job.state
                raise TimeoutError(f"FinetuneJob {namespace}/{name} is {state} after {within}")
            time.sleep(_POLL_S)

    def suspend(self, name: str, *, namespace: str = DEFAULT_NAMESPACE) -> JobView:
        """Ask a job to checkpoint and to give its slot back."""
        return self._patch_spec(name, namespace, {"suspend": True})

    def resume(self, name: str, *, namespace: str = DEFAULT_NAMESPACE) -> JobView:
        """Let a suspended job go on from its checkpoint."""
        return self._patch_spec(name, namespace, {"suspend": False})

    def delete(self, name: str, *, namespace: str = DEFAULT_NAMESPACE) -> None:
        """Delete a job; a running one checkpoints first. Returns before it is gone."""
        with _answers(f"FinetuneJob {namespace}/{name}"):
            self._custom.delete_namespaced_custom_object(
                GROUP, VERSION, namespace, FINETUNE_JOB.plural, name, _request_timeout=_TIMEOUT_S
            )

    def adapter(self, name: str, *, namespace: str = DEFAULT_NAMESPACE) -> str:
        """Return the directory of a finished job's adapter."""
        job = self.get(name, namespace=namespace)
        if not job.adapter_path:
            raise UserError(
                f"has no adapter: it is {job.state}" + (f" ({job.message})" if job.message else ""),
                field=f"FinetuneJob {namespace}/{name}",
                remedy="Wait until it has succeeded: windrow get " + name,
            )
        return job.adapter_path

    def events(self, name: str, *, namespace: str = DEFAULT_NAMESPACE) -> list[EventView]:
        """Return the events about a job (or about anything else of that name), oldest first."""
        return self.recent_events(namespace=namespace, selector=f"involvedObject.name={name}")

    def logs(
        self, name: str, *, namespace: str = DEFAULT_NAMESPACE, follow: bool = False
    ) -> Iterator[str]:
        """Yield what has happened to a job, a line an event; `follow`: until it has finished."""
        told = 0
        while True:
            job = self.get(name, namespace=namespace)
            found = self.events(name, namespace=namespace)
            for event in found[told:]:
                mark = "!" if event.warning else " "
                yield f"{event.at} {mark} {event.reason}: {event.message}"
            told = len(found)
            if not follow or job.finished:
                return
            time.sleep(_POLL_S)

    # Policies, slots, profiles

    def apply_policy(self, manifest: Mapping[str, Any] | Path, *, namespace: str = "") -> None:
        """Create or replace a HarvestPolicy."""
        body = read_manifest(manifest) if isinstance(manifest, Path) else whole_numbers(manifest)
        check_head(body, HARVEST_POLICY)
        parse_policy_spec(body.get("spec", {}))
        name = body["metadata"]["name"]
        namespace = namespace or body["metadata"].get("namespace") or DEFAULT_NAMESPACE
        body["metadata"] = {**body["metadata"], "namespace": namespace}
        with _answers(f"HarvestPolicy {namespace}/{name}"):
            self._custom.patch_namespaced_custom_object(
                GROUP,
                VERSION,
                namespace,
                HARVEST_POLICY.plural,
                name,
                body,
                field_manager="windrow-client",
                force=True,
                _content_type="application/apply-patch+yaml",
                _request_timeout=_TIMEOUT_S,
            )

    def slots(self, *, namespace: str | None = None) -> list[SlotView]:
        """Return the harvested devices, by name."""
        found = [SlotView.of(slot) for slot in self._list(HARVEST_SLOT, namespace)]
        return sorted(found, key=lambda slot: (slot.namespace, slot.name))

    def profiles(self) -> list[LatencyProfileSpec]:
        """Return the latency profiles that have been taken."""
        return [parse_profile_spec(found["spec"]) for found in self._list(LATENCY_PROFILE, None)]

    def recent_events(
        self, *, namespace: str = DEFAULT_NAMESPACE, selector: str = ""
    ) -> list[EventView]:
        """Return the events of a namespace about our resources, oldest first."""
        with _answers(f"events of {namespace}"):
            found = self._core.list_namespaced_event(
                namespace, field_selector=selector, _request_timeout=_TIMEOUT_S
            )
        events = [_event(e) for e in found.items if e.involved_object.api_version == API_VERSION]
        return sorted(events, key=lambda event: event.at)

    def _get(self, kind: Kind, name: str, namespace: str) -> dict[str, Any]:
        with _answers(f"{kind.kind} {namespace}/{name}"):
            found: dict[str, Any] = self._custom.get_namespaced_custom_object(
                GROUP, VERSION, namespace, kind.plural, name, _request_timeout=_TIMEOUT_S
            )
        return found

    def _list(self, kind: Kind, namespace: str | None) -> list[dict[str, Any]]:
        with _answers(f"{kind.plural} of {namespace or 'all namespaces'}"):
            if namespace is None:
                found = self._custom.list_cluster_custom_object(
                    GROUP, VERSION, kind.plural, _request_timeout=_TIMEOUT_S
                )
            else:
                found = self._custom.list_namespaced_custom_object(
                    GROUP, VERSION, namespace, kind.plural, _request_timeout=_TIMEOUT_S
                )
        items: list[dict[str, Any]] = found["items"]
        return items

    def _patch_spec(self, name: str, namespace: str, change: dict[str, Any]) -> JobView:
        with _answers(f"FinetuneJob {namespace}/{name}"):
            found = self._custom.patch_namespaced_custom_object(
                GROUP,
                VERSION,
                namespace,
                FINETUNE_JOB.plural,
                name,
                {"spec": change},
                _content_type="application/merge-patch+json",
                _request_timeout=_TIMEOUT_S,
            )
        return JobView.of(found)


def check_head(body: Mapping[str, Any], kind: Kind) -> None:
    """Raise UserError unless `body` is a named object of that kind and of our version."""
    for key, wanted in (("apiVersion", API_VERSION), ("kind", kind.kind)):
        if body.get(key) != wanted:
            raise UserError(
                f"{body.get(key)!r} is not {wanted}", field=key, remedy=f"Write {key}: {wanted}."
            )
    metadata = body.get("metadata")
    if not isinstance(metadata, Mapping) or not isinstance(metadata.get("name"), str):
        raise UserError("is missing", field="metadata.name", remedy="Give the object a name.")


def _load(kubeconfig: Path | None) -> k8s.ApiClient:
    if kubeconfig is None and "KUBERNETES_SERVICE_HOST" in os.environ:
        configuration = k8s.Configuration()
        k8s_config.load_incluster_config(client_configuration=configuration)
        return k8s.ApiClient(configuration)
    try:
        return k8s_config.new_client_from_config(str(kubeconfig) if kubeconfig else None)
    except k8s_config.ConfigException as e:
        raise UserError(
            f"no cluster to talk to: {e}",
            field="--kubeconfig",
            remedy="Start one with `windrow up`, or set KUBECONFIG.",
        ) from e


@contextmanager
def _answers(what: str) -> Iterator[None]:
    """Turn the client's exceptions into ours."""
    try:
        yield
    except k8s.ApiException as e:
        raise _translated(what, e) from e
    except (urllib3.exceptions.HTTPError, OSError) as e:
        raise Transient(f"{what}: the API server does not answer ({type(e).__name__})") from e


def _translated(what: str, e: k8s.ApiException) -> Exception:
    try:
        message = json.loads(e.body)["message"]
    except (ValueError, TypeError, KeyError):
        message = e.reason
    match e.status:
        case 404:
            return UserError("not found", field=what, remedy="See `windrow get` for what there is.")
        case 409:
            return UserError(
                "exists already", field=what, remedy="Delete it first or take another name."
            )
        case 400 | 422:
            return UserError(f"refused: {message}", field=what, remedy="Mend the manifest.")
        case 401 | 403:
            return UserError(
                f"not allowed: {message}", field=what, remedy="Ask for the rights, or log in again."
            )
        case _:
            return Transient(f"{what}: HTTP {e.status}: {message}")


def _event(found: Any) -> EventView:  # noqa: ANN401 - the client's models are untyped
    at = found.last_timestamp or found.event_time or found.metadata.creation_timestamp
    return EventView(
        at=at.isoformat(timespec="seconds").replace("+00:00", "Z"),
        kind=found.involved_object.kind,
        name=found.involved_object.name,
        reason=found.reason or "",
        message=found.message or "",
        warning=found.type == "Warning",
    )
