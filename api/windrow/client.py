"""Windrow from Python: submit jobs, watch them, fetch their adapters.

from windrow.client import WindrowClient

client = WindrowClient()
job = client.submit("examples/finetunejob.yaml")
done = client.wait(job.name, namespace=job.namespace)
print(done.state, done.adapter_path)
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

import urllib3
import urllib3.exceptions
import yaml
from kubernetes import client as k8s
from kubernetes import config as k8s_config
from urllib3 import HTTPHeaderDict

from windrow.conditions import Reason
from windrow.crd import (
    ANNOTATION_LOGS,
    API_VERSION,
    FINETUNE_JOB,
    GROUP,
    HARVEST_POLICY,
    HARVEST_SLOT,
    LATENCY_PROFILE,
    SIDECAR_CONTAINER,
    VERSION,
    Kind,
    LatencyProfileSpec,
    parse_job_spec,
    parse_policy_spec,
    parse_profile_spec,
)
from windrow.crd.servable import check_servable
from windrow.documents import read_document, whole_numbers
from windrow.errors import Transient, UserError
from windrow.kubeconfig import (
    ConfiguredUser,
    Kubeconfig,
    has_plugin,
    impersonation_headers,
    let_plugins_be_heard,
    require_usable,
    token_of_file,
)
from windrow.rundir import read_worker_line
from windrow.views import EventView, JobView, SlotView

DEFAULT_NAMESPACE = "default"
_MANAGER = "windrow-client"
_TRIES = 5  # of a write that meets another
_POLL_S = 0.5
# The server's answer is awaited no longer: a stalled connection must not stall the caller.
_TIMEOUT_S = 15


# A path, as `open` takes it.
Filename = str | os.PathLike[str]
# An object of Kubernetes, or the file that holds it.
Manifest = Mapping[str, Any] | Filename


def read_manifest(path: Filename) -> dict[str, Any]:
    """Read one YAML document; raise UserError when it is none."""
    path = Path(path).expanduser()
    return read_document(path, "Give one readable manifest; see examples/finetunejob.yaml.")


_POD_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class WindrowClient:
    """Talks to one API server. All calls block; safe for one thread at a time.

    Every call raises UserError for what the caller must fix (not found, refused, malformed; a spec
    is checked before anything is sent) and Transient when the server cannot be reached.

    Args:
        kubeconfig: file with the credentials; None: as kubectl finds them, or those of the pod.
        context: of that file; empty: the current one.
        api: a ready client, instead.

    Attributes:
        namespace: that is meant where a call names none: the context's, or the pod's.
    """

    def __init__(
        self,
        kubeconfig: Filename | None = None,
        *,
        context: str = "",
        api: k8s.ApiClient | None = None,
    ) -> None:
        self.namespace = DEFAULT_NAMESPACE
        if api is None:
            api, self.namespace = _load(kubeconfig, context)
        self._api = api
        self._custom = k8s.CustomObjectsApi(self._api)
        self._core = k8s.CoreV1Api(self._api)

    @property
    def api(self) -> k8s.ApiClient:
        """The client underneath, for what this one does not do."""
        return self._api

    def version(self) -> str:
        """Return the version of Kubernetes (`v1.36.3`)."""
        with translating_errors("the API server"):
            found = k8s.VersionApi(self._api).get_code(_request_timeout=_TIMEOUT_S)
        return str(found.git_version)

    # Jobs

    def submit(self, manifest: Manifest, *, namespace: str = "") -> JobView:
        """Create a FinetuneJob from a manifest or a file; `namespace` overrules the manifest's."""
        body = _body_of(manifest)
        check_head(body, FINETUNE_JOB)
        check_servable(parse_job_spec(body.get("spec", {})))
        name = body["metadata"]["name"]
        namespace = namespace or body["metadata"].get("namespace") or self.namespace
        body["metadata"] = {**body["metadata"], "namespace": namespace}
        with translating_errors(f"FinetuneJob {namespace}/{name}"):
            found = self._custom.create_namespaced_custom_object(
                GROUP, VERSION, namespace, FINETUNE_JOB.plural, body, _request_timeout=_TIMEOUT_S
            )
        return JobView.of(found)

    def get(self, name: str, *, namespace: str = "") -> JobView:
        """Return one job."""
        return JobView.of(self._get(FINETUNE_JOB, name, namespace))

    def jobs(self, *, namespace: str | None = None) -> list[JobView]:
        """Return the jobs of a namespace; None: of all."""
        return [JobView.of(found) for found in self._list(FINETUNE_JOB, namespace)]

    def wait(
        self,
        name: str,
        *,
        namespace: str = "",
        within: timedelta | float | None = None,
        on_change: Callable[[JobView], None] | None = None,
    ) -> JobView:
        """Return the job once it has succeeded or failed.

        What is Transient is waited out.

        Args:
            name: of the job.
            namespace: of the job.
            within: how long to wait at most, as a timedelta or in seconds; None: for ever.
            on_change: sees each new state of the job.

        Raises:
            TimeoutError: it had not ended `within` that time.
            UserError: there is no such job, or it will not end: it is suspended, or its
                spec is not valid.
        """
        namespace = namespace or self.namespace
        limit_s = None if within is None else _seconds(within)
        deadline = None if limit_s is None else time.monotonic() + limit_s
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
            if job is not None:
                _check_ends(job)
            if deadline is not None and time.monotonic() >= deadline:
                state = "unknown" if job is None else job.state
                raise TimeoutError(f"FinetuneJob {namespace}/{name} is {state} after {limit_s:g} s")
            time.sleep(_POLL_S)

    def suspend(self, name: str, *, namespace: str = "") -> JobView:
        """Ask a job to checkpoint and to give its slot back."""
        return self._patch_spec(name, namespace, {"suspend": True})

    def resume(self, name: str, *, namespace: str = "") -> JobView:
        """Let a suspended job go on from its checkpoint."""
        return self._patch_spec(name, namespace, {"suspend": False})

    def delete(self, name: str, *, namespace: str = "") -> None:
        """Delete a job; a running one checkpoints first. Returns before it is gone."""
        namespace = namespace or self.namespace
        with self._about(f"FinetuneJob {namespace}/{name}", namespace):
            self._custom.delete_namespaced_custom_object(
                GROUP, VERSION, namespace, FINETUNE_JOB.plural, name, _request_timeout=_TIMEOUT_S
            )

    def adapter(self, name: str, *, namespace: str = "") -> str:
        """Return the directory of a finished job's adapter."""
        job = self.get(name, namespace=namespace)
        if not job.adapter_path:
            raise UserError(
                f"has no adapter: it is {job.state}" + (f" ({job.message})" if job.message else ""),
                field=f"FinetuneJob {job.namespace}/{name}",
                remedy="Wait until it has succeeded: windrow get " + name,
            )
        return job.adapter_path

    def job_objects(self, *, namespace: str | None = None) -> list[dict[str, Any]]:
        """Return the jobs of a namespace (None: of all) as the API server holds them."""
        return self._list(FINETUNE_JOB, namespace)

    def conditions(self, name: str, *, namespace: str = "") -> list[dict[str, Any]]:
        """Return the conditions of a job."""
        found = self._get(FINETUNE_JOB, name, namespace)
        return list((found.get("status") or {}).get("conditions") or ())

    def events(self, name: str, *, namespace: str = "") -> list[EventView]:
        """Return the events about a job (or about anything else of that name), oldest first."""
        return self.recent_events(namespace=namespace, selector=f"involvedObject.name={name}")

    def logs(self, name: str, *, namespace: str = "", follow: bool = False) -> Iterator[str]:
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

    def worker_logs(self, name: str, *, namespace: str = "", follow: bool = False) -> Iterator[str]:
        """Yield the lines that a job's worker has written, from the log of its slot's sidecar.

        Of a job without a slot: what the sidecars of all slots still have. `follow`: until the
        job has ended, from slot to slot; before it has one, it is waited for.

        Raises:
            UserError: no sidecar has a line of it.
        """
        of = f"{namespace or self.namespace}/{name}"
        told: dict[tuple[str, str], int] = {}  # lines of each pod
        while True:
            job = self.get(name, namespace=namespace)
            for pod in self._pods_of(job, told):
                lines = (read_worker_line(line, of) for line in self._sidecar_log(*pod))
                found = [line for line in lines if line is not None]
                yield from found[told.get(pod, 0) :]
                if found:
                    told[pod] = max(told.get(pod, 0), len(found))
            if not follow or job.finished:
                break
            time.sleep(_POLL_S)
        if not told:
            raise UserError(
                f"FinetuneJob {of} has no worker whose log can be read: it is {job.state}",
                field="name",
                remedy="What has happened to it: windrow explain " + name,
            )

    def _pods_of(self, job: JobView, known: Mapping[tuple[str, str], int]) -> list[tuple[str, str]]:
        """Return the pods whose sidecars may have lines of a job that are not known."""
        if not job.slot and known:
            return list(known)
        slots = [s for s in self.slots() if job.slot in ("", f"{s.namespace}/{s.name}")]
        return list(dict.fromkeys((slot.namespace, slot.pod) for slot in slots))

    def _sidecar_log(self, namespace: str, pod: str) -> list[str]:
        """Return the lines of a pod's sidecar, oldest first; none of a pod that is gone."""
        try:
            with translating_errors(f"pod {namespace}/{pod}"):
                body = self._core.read_namespaced_pod(pod, namespace, _request_timeout=_TIMEOUT_S)
        except NotFound:
            return []
        spec = body.spec
        names = [
            c.name for c in (*(spec.init_containers or ()), *(spec.ephemeral_containers or ()))
        ]
        ours = [one for one in names if one.partition("-")[0] == SIDECAR_CONTAINER]
        local = (body.metadata.annotations or {}).get(ANNOTATION_LOGS)
        lines: list[str] = []
        for container in ours:
            if local:  # pods of a local cluster are processes of this machine
                path = Path(local, f"{container}.log")
                lines += path.read_text(errors="replace").splitlines() if path.is_file() else []
                continue
            with translating_errors(f"log of pod {namespace}/{pod}"):
                text = self._core.read_namespaced_pod_log(
                    pod, namespace, container=container, _request_timeout=_TIMEOUT_S
                )
            lines += str(text).splitlines()
        return lines

    # Policies, slots, profiles

    def apply_policy(self, manifest: Manifest, *, namespace: str = "", force: bool = False) -> str:
        """Create or replace a HarvestPolicy; returns namespace/name.

        The policy is then as the manifest says: what that leaves out is gone.

        Args:
            manifest: of the policy.
            namespace: instead of the manifest's.
            force: replace it also where others manage its spec.

        Raises:
            UserError: the manifest is not valid, or the spec is managed by somebody else
                (kubectl, Argo CD, Flux, Helm); the message names them.
        """
        body = _body_of(manifest)
        check_head(body, HARVEST_POLICY)
        parse_policy_spec(body.get("spec", {}))
        name = body["metadata"]["name"]
        namespace = namespace or body["metadata"].get("namespace") or self.namespace
        body["metadata"] = {**body["metadata"], "namespace": namespace}
        with translating_errors(f"HarvestPolicy {namespace}/{name}"):
            for _ in range(_TRIES):
                try:
                    self._put_policy(namespace, name, body, force=force)
                    break
                except k8s.ApiException as error:
                    # It came, went or changed meanwhile: the operator writes its status.
                    if error.status not in (HTTPStatus.CONFLICT, HTTPStatus.NOT_FOUND):
                        raise
                    last = error
            else:
                raise last
        return f"{namespace}/{name}"

    def _put_policy(
        self, namespace: str, name: str, body: Mapping[str, Any], *, force: bool
    ) -> None:
        kind = (GROUP, VERSION, namespace, HARVEST_POLICY.plural)
        options = {"field_manager": _MANAGER, "_request_timeout": _TIMEOUT_S}
        try:
            found = self._custom.get_namespaced_custom_object(
                *kind, name, _request_timeout=_TIMEOUT_S
            )
        except k8s.ApiException as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            self._custom.create_namespaced_custom_object(*kind, body, **options)
            return
        others = managers_of_spec(found) - {_MANAGER}
        if others and not force:
            raise UserError(
                f"HarvestPolicy {namespace}/{name} is managed by {', '.join(sorted(others))}",
                field="spec",
                remedy="Apply it there, or replace it with --force (force=True).",
            )
        # Labels and annotations of others stay, and with its version nothing is overwritten that
        # came meanwhile.
        there, own = found["metadata"], body["metadata"]
        metadata = {**there, **own, "resourceVersion": there["resourceVersion"]}
        for key in ("labels", "annotations"):
            metadata[key] = {**(there.get(key) or {}), **(own.get(key) or {})}
        metadata.pop("managedFields", None)
        self._custom.replace_namespaced_custom_object(
            *kind, name, {**body, "metadata": metadata}, **options
        )

    def slots(self, *, namespace: str | None = None) -> list[SlotView]:
        """Return the harvested devices, by name."""
        found = [SlotView.of(slot) for slot in self._list(HARVEST_SLOT, namespace)]
        return sorted(found, key=lambda slot: (slot.namespace, slot.name))

    def profiles(self) -> list[LatencyProfileSpec]:
        """Return the latency profiles that have been taken."""
        return [parse_profile_spec(found["spec"]) for found in self._list(LATENCY_PROFILE, None)]

    def recent_events(self, *, namespace: str = "", selector: str = "") -> list[EventView]:
        """Return the events of a namespace about our resources, oldest first."""
        namespace = namespace or self.namespace
        with translating_errors(f"events of {namespace}"):
            found = self._core.list_namespaced_event(
                namespace, field_selector=selector, _request_timeout=_TIMEOUT_S
            )
        if not found.items:
            self._require_namespace(namespace)
        events = [_event(e) for e in found.items if e.involved_object.api_version == API_VERSION]
        return sorted(events, key=lambda event: event.at)

    def manifest(self, name: str, *, namespace: str = "") -> dict[str, Any]:
        """Return a job as the API server holds it, status and all."""
        return self._get(FINETUNE_JOB, name, namespace)

    def _get(self, kind: Kind, name: str, namespace: str) -> dict[str, Any]:
        namespace = namespace or self.namespace
        with self._about(f"{kind.kind} {namespace}/{name}", namespace):
            found: dict[str, Any] = self._custom.get_namespaced_custom_object(
                GROUP, VERSION, namespace, kind.plural, name, _request_timeout=_TIMEOUT_S
            )
        return found

    @contextmanager
    def _about(self, what: str, namespace: str) -> Iterator[None]:
        """Translate errors; where nothing is found, name a missing namespace."""
        try:
            with translating_errors(what):
                yield
        except NotFound:
            self._require_namespace(namespace)
            raise

    def _require_namespace(self, namespace: str) -> None:
        """Raise UserError if there is no such namespace; without the right to ask, do nothing."""
        try:
            self._core.read_namespace(namespace, _request_timeout=_TIMEOUT_S)
        except k8s.ApiException as e:
            if e.status == 404:
                raise _no_namespace(namespace) from e
        except (urllib3.exceptions.HTTPError, OSError):
            return  # what was asked first has been answered

    def _list(self, kind: Kind, namespace: str | None) -> list[dict[str, Any]]:
        with translating_errors(f"{kind.plural} of {namespace or 'all namespaces'}"):
            if namespace is None:
                found = self._custom.list_cluster_custom_object(
                    GROUP, VERSION, kind.plural, _request_timeout=_TIMEOUT_S
                )
            else:
                found = self._custom.list_namespaced_custom_object(
                    GROUP, VERSION, namespace, kind.plural, _request_timeout=_TIMEOUT_S
                )
        items: list[dict[str, Any]] = found["items"]
        if namespace is not None and not items:
            self._require_namespace(namespace)  # the API server lists an absent namespace as empty
        return items

    def _patch_spec(self, name: str, namespace: str, change: dict[str, Any]) -> JobView:
        namespace = namespace or self.namespace
        with self._about(f"FinetuneJob {namespace}/{name}", namespace):
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


class NotFound(UserError):
    """Error of a request for an object that does not exist."""


def _body_of(manifest: Manifest) -> dict[str, Any]:
    if isinstance(manifest, Mapping):
        return dict(whole_numbers(dict(manifest)))
    return read_manifest(manifest)


def _seconds(within: timedelta | float) -> float:
    seconds = within.total_seconds() if isinstance(within, timedelta) else within
    # A bool is an int to Python, and no length of time.
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or math.isnan(seconds):
        raise UserError(
            f"{within!r} is not a length of time",
            field="within",
            remedy="Give seconds, a timedelta, or None to wait for ever.",
        )
    return float(seconds)


def _check_ends(job: JobView) -> None:
    """Raise UserError for a job that does not end before somebody changes it."""
    where = f"FinetuneJob {job.namespace}/{job.name}"
    if job.state == "Suspended" and job.suspended:
        raise UserError(
            "is suspended, so it does not end", field=where, remedy="Resume it, then wait."
        )
    if job.state == "Invalid" and job.reason == Reason.INVALID_SPEC:
        raise UserError(
            f"is not valid: {job.message}", field=where, remedy="Fix its spec, then wait."
        )


def managers_of_spec(body: Mapping[str, Any]) -> frozenset[str]:
    """Return who has written fields of an object's spec, by its managedFields."""
    entries = (body.get("metadata") or {}).get("managedFields") or ()
    return frozenset(
        str(entry.get("manager"))
        for entry in entries
        if not entry.get("subresource") and "f:spec" in (entry.get("fieldsV1") or {})
    )


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
    for key in ("labels", "annotations"):
        entries = metadata.get(key) or {}
        if not isinstance(entries, Mapping):
            raise UserError(
                f"{entries!r} is not an object", field=f"metadata.{key}", remedy="Write NAME: TEXT."
            )
        for name, value in entries.items():
            if value is not None and not isinstance(value, str):
                raise UserError(
                    f"{value!r} is not text",
                    field=f"metadata.{key}[{name}]",
                    remedy="Put quotes around the value.",
                )


def _load(kubeconfig: Filename | None, context: str) -> tuple[k8s.ApiClient, str]:
    """Return a client and the namespace that its context names."""
    named = kubeconfig or os.environ.get("KUBECONFIG")
    try:
        if not named and not context and "KUBERNETES_SERVICE_HOST" in os.environ:
            configuration = k8s.Configuration()
            k8s_config.load_incluster_config(client_configuration=configuration)
            configuration.proxy = None  # of the environment: meant for the world outside
            return k8s.ApiClient(configuration), _namespace_of_the_pod()
        # Handed over: the library reads KUBECONFIG when it is imported, and never again.
        path = os.path.expanduser(kubeconfig) if kubeconfig else os.environ.get("KUBECONFIG")
        read = Kubeconfig(path or "", context)
        read.require_context()
        user = read.user()
        headers = impersonation_headers(user)
        require_usable(user)
        in_file = bool(token_of_file(user))
        configuration = k8s.Configuration()
        let_plugins_be_heard()
        k8s_config.load_kube_config(
            read.filled or path or None,
            context=context or None,
            client_configuration=configuration,
        )
        if read.proxy:
            configuration.no_proxy = None  # of the environment; kubectl asks it for others alone
        if has_plugin(user):
            _require_credentials(configuration)
        if in_file:
            configuration.refresh_api_key_hook = partial(_take_token, user)
        api = k8s.ApiClient(configuration)
        _send_with_all(api, headers)
        namespace = read.namespace
    except UserError:
        raise
    # A ValueError: text that is not UTF-8, or data that is not base64.
    except (k8s_config.ConfigException, OSError, ValueError, yaml.YAMLError) as e:
        if not named and not context:
            raise UserError(
                "there is no cluster to talk to: none is up, and kubectl has no configuration",
                remedy="Start one with `windrow up`, or set KUBECONFIG.",
            ) from e
        raise UserError(
            f"no cluster to talk to: {str(e).rstrip('.')}",
            field="--context" if context else "--kubeconfig",
            remedy=_remedy_for(path or "", context),
        ) from e
    return api, namespace or DEFAULT_NAMESPACE


def _remedy_for(files: str, context: str) -> str:
    """Return what to do about a kubeconfig that names no cluster, or of which parts are missing."""
    if context:
        return "Name a context that `kubectl config get-contexts` shows."
    if any(os.path.isfile(os.path.expanduser(name)) for name in files.split(os.pathsep) if name):
        return f"Correct {files}, or name another one by --kubeconfig."
    return "Start one with `windrow up`, or set KUBECONFIG."


def _take_token(user: ConfiguredUser | None, configuration: k8s.Configuration) -> None:
    configuration.api_key["BearerToken"] = f"Bearer {token_of_file(user)}"


def _require_credentials(configuration: k8s.Configuration) -> None:
    # The library writes what a plugin's failure was, and goes on without credentials.
    if not (configuration.api_key or configuration.cert_file or configuration.username):
        raise k8s_config.ConfigException("the credential plugin gave no credentials")


def _send_with_all(api: k8s.ApiClient, headers: list[tuple[str, str]]) -> None:
    """Have every request carry `headers`, of which several may have one name."""
    if not headers:
        return
    send = api.rest_client.request

    def request(method: str, url: str, **options: Any) -> Any:  # noqa: ANN401 - the library's own
        merged = HTTPHeaderDict(options.pop("headers", None) or {})
        for name, value in headers:
            merged.add(name, value)
        return send(method, url, headers=merged, **options)

    api.rest_client.request = request


def _namespace_of_the_pod() -> str:
    try:
        return _POD_NAMESPACE.read_text(encoding="utf-8").strip() or DEFAULT_NAMESPACE
    except OSError:
        return DEFAULT_NAMESPACE


@contextmanager
def translating_errors(what: str) -> Iterator[None]:
    """Turn the Kubernetes client's exceptions into ours.

    Args:
        what: is asked for or changed; an error begins with it.

    Raises:
        UserError: what was asked for was refused.
        Transient: the API server does not answer, or has failed.
    """
    try:
        yield
    except k8s.ApiException as e:
        raise _translated(what, e) from e
    except (urllib3.exceptions.HTTPError, OSError) as e:
        raise Transient(f"{what}: the API server does not answer{_silence(e)}") from e


def _silence(error: Exception) -> str:
    """Return where no answer came from and why not, as far as an error of the transport says."""
    at = ""
    if isinstance(error, urllib3.exceptions.PoolError) and isinstance(
        error.pool, urllib3.HTTPConnectionPool
    ):
        at = f" at {error.pool.host}:{error.pool.port}"
    why = type(error).__name__
    cause: BaseException | None = error
    while cause is not None:
        said = isinstance(cause, OSError) and cause.strerror
        why = said or type(cause).__name__
        if said:
            break
        reason = getattr(cause, "reason", None)
        cause = reason if isinstance(reason, BaseException) else cause.__cause__
    return f"{at} ({why})"


def _translated(what: str, e: k8s.ApiException) -> Exception:
    status = _status_of(e)
    message, details = status.get("message", e.reason), status.get("details") or {}
    match e.status:
        case 404 if not status:
            # No object of the API: the path itself is unknown.
            return UserError(
                "the API server does not know the kinds of windrow.dev",
                field=what,
                remedy="Install them: kubectl apply -f crds/.",
            )
        case 404 if details.get("kind") == "namespaces":
            return _no_namespace(details.get("name", ""))
        case 404:
            return NotFound("not found", field=what, remedy="See `windrow get` for what there is.")
        case 409:
            return UserError(
                "exists already", field=what, remedy="Delete it first or take another name."
            )
        case 400 | 422:
            return UserError(f"refused: {message}", field=what, remedy="Fix the manifest.")
        case 401 | 403:
            return UserError(
                f"not allowed: {message}", field=what, remedy="Ask for the rights, or log in again."
            )
        case _:
            return Transient(f"{what}: HTTP {e.status}: {message}")


def _status_of(e: k8s.ApiException) -> dict[str, Any]:
    """Return the Status object of a refusal; nothing where it is another text."""
    try:
        found = json.loads(e.body)
    except (ValueError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def _no_namespace(name: str) -> UserError:
    return UserError(
        f"there is no namespace {name!r}",
        field="namespace",
        remedy=f"Name another, or create it: kubectl create namespace {name}.",
    )


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
