"""Answer the calls of the API: who calls, what is allowed, and what the API server then holds."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, TypeVar
from urllib.parse import urlencode

from aiohttp import BodyPartReader, web

from windrow.conditions import timestamp
from windrow.crd import FINETUNE_JOB, parse_job_spec
from windrow.crd.servable import check_servable
from windrow.errors import UserError
from windrow.outputs import OWN_FOLDER
from windrow_operator.connections import Connections
from windrow_operator.kube import ApiError, Conflict, Kube, ObjectNotFound, kind_path
from windrow_operator.openai_api import jobs
from windrow_operator.openai_api.catalogue import ModelCatalogue
from windrow_operator.openai_api.files import (
    PURPOSE,
    KeyFiles,
    PendingUpload,
    UploadedFile,
    checked_filename,
)
from windrow_operator.openai_api.keyring import ApiKey, Keyring
from windrow_operator.openai_api.refusals import (
    CallRefused,
    busy,
    invalid,
    missing,
    unavailable,
)
from windrow_operator.openai_api.requests import JobRequest, job_request
from windrow_operator.openai_api.stores import StoreSilent
from windrow_operator.rate_limit import Forgetful, TokenBucket

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Body = dict[str, Any]
_T = TypeVar("_T")

_MOST_BODY_BYTES: Final = 1 << 20
_MOST_FIGURES_BYTES: Final = 16 << 20
_MOST_ACTIVE_JOBS: Final = 100
_PIECE_BYTES: Final = 1 << 20
# A caller that sends nothing for so long is gone.
_SILENT_S: Final = 60.0
# An upload may take so long, and as long as its bytes take at this rate: a caller that sends one
# byte a minute would have a place for ever.
_LEAST_BYTES_PER_SECOND: Final = 16 << 10
# Keys are as many as a tenant makes service accounts, so it is namespaces that share the places.
_UPLOADS_AT_ONCE, _UPLOADS_OF_NAMESPACE = 16, 4
# Connections whose caller has not shown a key, and for how long: the API server may be slow.
_MOST_UNPROVEN, _PROVEN_WITHIN = 256, timedelta(seconds=30)
_CALLS_PER_SECOND, _CALLS_AT_ONCE = 20.0, 100.0
_MOST_REMEMBERED: Final = 4096
_FIELDS_OF_UPLOAD: Final = ("purpose", "file")
_KEY = web.RequestKey("key", ApiKey)


@dataclass(frozen=True)
class ApiParts:
    """Parts of the endpoint.

    Attributes:
        kube: holds the jobs.
        keyring: knows who calls.
        files: what callers have uploaded.
        catalogue: which models are served.
        template: fields of a spec for every job.
        clock: returns the time, with a zone.
    """

    kube: Kube
    keyring: Keyring
    files: KeyFiles
    catalogue: ModelCatalogue
    clock: Callable[[], datetime]
    template: Mapping[str, Any] = field(default_factory=dict)


class OpenAIServer:
    """The endpoint.

    Args:
        parts: what it is made of.

    Attributes:
        connections: those of callers that have not shown a key yet.
    """

    def __init__(self, parts: ApiParts) -> None:
        self._parts, self._kube, self._files = parts, parts.kube, parts.files
        self._uploads: Counter[str] = Counter()  # under way, by namespace
        self.connections = Connections(_MOST_UNPROVEN, _PROVEN_WITHIN)
        self._rates: Forgetful[TokenBucket] = Forgetful(3600.0, _MOST_REMEMBERED)

    def application(self) -> web.Application:
        """Return the HTTP application."""
        application = web.Application(
            client_max_size=_MOST_BODY_BYTES, middlewares=[self._in_their_words]
        )
        job = "/v1/fine_tuning/jobs/{id}"
        application.add_routes(
            [
                web.get("/healthz", _healthy),
                web.post("/v1/files", self._upload),
                web.get("/v1/files", self._list_files),
                web.get("/v1/files/{id}", self._file),
                web.delete("/v1/files/{id}", self._delete_file),
                web.get("/v1/files/{id}/content", self._content),
                web.post("/v1/fine_tuning/jobs", self._create_job),
                web.get("/v1/fine_tuning/jobs", self._list_jobs),
                web.get(job, self._job),
                web.get(f"{job}/events", self._events),
                web.get(f"{job}/checkpoints", self._checkpoints),
                web.post(f"{job}/cancel", self._cancel),
                web.post(f"{job}/pause", self._pause),
                web.post(f"{job}/resume", self._resume),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{id:.+}", self._model),
                web.delete("/v1/models/{id:.+}", self._delete_model),
            ]
        )
        return application

    # Before and after each call

    @web.middleware
    async def _in_their_words(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Say who calls, and answer every refusal with OpenAI's error object."""
        try:
            if request.path != "/healthz":
                authorization = request.headers.get("Authorization", "")
                key = await self._parts.keyring.key_of(authorization, request.remote or "")
                self._count(key)
                self.connections.forget(request.transport)
                request[_KEY] = key
            return await handler(request)
        except CallRefused as refused:
            return _refusal(refused)
        except web.HTTPException as error:
            return _refusal(_of_http(request, error))
        except UserError as error:
            return _refusal(CallRefused(400, str(error), param=error.field or None))
        except (ApiError, StoreSilent) as error:
            log.warning("%s %s: %s", request.method, request.path, error)
            return _refusal(unavailable(f"Something behind this server does not answer: {error}"))
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception:  # of which the caller learns nothing but that it was ours
            log.exception("%s %s failed", request.method, request.path)
            failed = CallRefused(500, "This server has failed.", kind="server_error")
            return _refusal(failed)

    def _count(self, key: ApiKey) -> None:
        now_s = asyncio.get_running_loop().time()
        bucket = self._rates.get(key, now_s)
        if bucket is None:
            bucket = TokenBucket.full(_CALLS_PER_SECOND, _CALLS_AT_ONCE, now_s)
        if bucket.level_at(now_s) < 1:
            raise busy(f"A key may make {_CALLS_PER_SECOND:g} calls a second.", 1.0)
        bucket.take(1, now_s)
        self._rates.put(key, bucket, now_s)

    # Files

    async def _upload(self, request: web.Request) -> web.Response:
        if not request.content_type.startswith("multipart/"):
            raise CallRefused(
                400, "The body is not multipart/form-data with `purpose` and `file`.", param="file"
            )
        with self._place(request[_KEY].namespace):
            await self._files.begin(request[_KEY], request.content_length or 0)
            return web.json_response((await self._received(request)).body)

    @contextmanager
    def _place(self, namespace: str) -> Iterator[None]:
        """Have a place among the uploads while it is open."""
        all_, own = self._uploads.total(), self._uploads[namespace]
        if all_ >= _UPLOADS_AT_ONCE or own >= _UPLOADS_OF_NAMESPACE:
            raise busy("Too many uploads are under way. Try again later.", 5.0)
        self._uploads[namespace] += 1
        try:
            yield
        finally:
            self._uploads[namespace] -= 1
            self._uploads += Counter()  # drops those at 0

    async def _received(self, request: web.Request) -> UploadedFile:
        """Take the parts in their order; what is stored is seen once all of them are right."""
        upload: PendingUpload | None = None
        purpose: str | None = None
        try:
            reader: Any = await request.multipart()
            while (part := await _in_time(reader.next())) is not None:
                if _name_of(part) == "purpose":
                    _check_first(purpose)
                    purpose = await _in_time(_short(part))
                    _check_purpose(purpose)
                else:
                    upload = await self._next_file(request[_KEY], part, upload)
            _check_purpose(purpose)
            return await _whole(upload)
        except BaseException as error:
            if upload is not None:
                await asyncio.shield(upload.drop())
            if isinstance(error, ValueError):
                raise CallRefused(400, f"The body cannot be read: {error}", param="file") from error
            raise

    async def _next_file(
        self, key: ApiKey, part: BodyPartReader, before: PendingUpload | None
    ) -> PendingUpload:
        if before is not None:
            raise invalid("file", "is sent twice", "Send one file.")
        return await self._files.upload(key, checked_filename(part.filename), _pieces(part))

    async def _list_files(self, request: web.Request) -> web.Response:
        found = [each.body for each in await self._files.list(request[_KEY])]
        if request.query.get("purpose", PURPOSE) != PURPOSE:
            found = []
        if request.query.get("order") == "asc":
            found.reverse()
        return _page(request, found, 10_000)

    async def _file(self, request: web.Request) -> web.Response:
        file_id = request.match_info["id"]
        if job := jobs.name_of_results(file_id):
            body, text = await self._results(request[_KEY], file_id, job)
            return web.json_response(
                {
                    "id": file_id,
                    "object": "file",
                    "bytes": len(text),
                    "created_at": jobs.unix((body.get("status") or {}).get("completionTime")) or 0,
                    "filename": "step_metrics.csv",
                    "purpose": "fine-tune-results",
                    "status": "processed",
                }
            )
        return web.json_response((await self._files.get(request[_KEY], file_id)).body)

    async def _content(self, request: web.Request) -> web.StreamResponse:
        key, file_id = request[_KEY], request.match_info["id"]
        if job := jobs.name_of_results(file_id):
            _, text = await self._results(key, file_id, job)
            return web.Response(body=text, content_type="text/csv")
        found = await self._files.get(key, file_id)
        pieces = self._files.store.pieces(self._files.rows_path(key, found.id))
        try:
            first = await asyncio.to_thread(next, pieces, b"")
        except FileNotFoundError:
            raise missing("file", file_id, "id") from None
        response = web.StreamResponse(headers={"Content-Type": "application/jsonl"})
        response.content_length = found.bytes
        await response.prepare(request)
        piece = first
        while piece:
            await response.write(piece)
            piece = await asyncio.to_thread(next, pieces, b"")
        await response.write_eof()
        return response

    async def _results(self, key: ApiKey, file_id: str, job: str) -> tuple[Body, bytes]:
        """Return a job that has ended, and the file with the losses of its steps."""
        body = await self._job_of(key, job)
        if body is None or jobs.status_of(body) != "succeeded":
            raise missing("file", file_id, "id")
        return body, jobs.results_csv(await self._losses(key, body)).encode()

    async def _delete_file(self, request: web.Request) -> web.Response:
        key, file_id = request[_KEY], request.match_info["id"]
        found = await self._files.get(key, file_id)
        for body in await self._jobs_of(key):
            said = jobs.request_of(body)
            uses = found.id in (said.get("training_file"), said.get("validation_file"))
            if uses and not jobs.is_over(jobs.status_of(body)):
                raise CallRefused(
                    400,
                    f"id: {found.id} is read by the job {jobs.id_of(body)}. Cancel the job first.",
                    param="id",
                    code="file_in_use",
                )
        await self._files.delete(key, found.id)
        return web.json_response({"id": found.id, "object": "file", "deleted": True})

    # Jobs

    async def _create_job(self, request: web.Request) -> web.Response:
        asked = job_request(await _json(request))
        key = request[_KEY]
        training = await self._files.get(key, asked.training_file, "training_file")
        if (training.form == "preference") != (asked.method == "dpo"):
            raise invalid(
                "training_file",
                f"has rows of the format {training.form}, and the method is {asked.method}",
                "Rows with two answers (preferred_output, or chosen and rejected) are for the "
                "method dpo, all others for supervised.",
            )
        sources = {"training": self._url_of(key, training.id)}
        if asked.validation_file:
            rows = await self._files.get(key, asked.validation_file, "validation_file")
            if rows.form != training.form:
                raise invalid(
                    "validation_file",
                    f"has rows of the format {rows.form}, and training_file of {training.form}",
                    "Upload rows of the same format.",
                )
            sources["validation"] = self._url_of(key, rows.id)
        model = await self._parts.catalogue.resolve(key.namespace, asked.model)
        active = [b for b in await self._jobs_of(key) if not jobs.is_over(jobs.status_of(b))]
        if len(active) >= _MOST_ACTIVE_JOBS:
            raise busy(f"There are {len(active)} jobs that have not ended.", 60.0)
        if asked.wandb and not (self._parts.template.get("tracking") or {}).get("secretRef"):
            raise invalid(
                "integrations[0]",
                "is for a server that has a key of Weights & Biases, and this one has none",
                "Leave integrations out. An administrator can name a Secret in "
                "tracking.secretRef of the template of jobs.",
                code="unsupported_integration",
            )
        manifest = jobs.manifest_of(
            asked, key, model, training, sources, self._files.store, self._parts.template
        )
        check_servable(parse_job_spec(manifest["spec"]))
        try:
            path = kind_path(FINETUNE_JOB, key.namespace)
            made = await self._kube.create(path, manifest)
        except Conflict as error:
            raise _clash(asked, manifest) from error
        except ApiError as error:
            if error.is_refusal:
                raise CallRefused(
                    400, f"The job is refused: {error}", code="job_refused"
                ) from error
            raise
        return web.json_response(jobs.job_object(made, self._parts.clock()))

    def _url_of(self, key: ApiKey, file_id: str) -> str:
        return self._files.store.url(self._files.rows_path(key, file_id))

    async def _jobs_of(self, key: ApiKey) -> list[Body]:
        """Return the jobs of a key, newest first."""
        path = kind_path(FINETUNE_JOB, key.namespace)
        found = await self._kube.list(path, labels=f"{jobs.LABEL_KEY}={key.label}")

        def order(body: Body) -> tuple[str, str]:
            return body["metadata"]["creationTimestamp"], body["metadata"]["name"]

        return sorted(found, key=order, reverse=True)

    async def _job_of(self, key: ApiKey, name: str) -> Body | None:
        """Return a job of a key; None: there is none of that name, or another key has it."""
        try:
            body = await self._kube.get(kind_path(FINETUNE_JOB, key.namespace, name))
        except ObjectNotFound:
            return None
        label = (body["metadata"].get("labels") or {}).get(jobs.LABEL_KEY)
        return body if label == key.label else None

    async def _asked(self, request: web.Request) -> Body:
        """Return the job that a call is about."""
        job_id = request.match_info["id"]
        name = jobs.name_of(job_id)
        body = await self._job_of(request[_KEY], name) if name else None
        if body is None:
            raise missing("fine_tuning_job", job_id, "fine_tuning_job_id")
        return body

    async def _list_jobs(self, request: web.Request) -> web.Response:
        wanted = {
            name.removeprefix("metadata[").removesuffix("]"): value
            for name, value in request.query.items()
            if name.startswith("metadata[")
        }
        now = self._parts.clock()
        found = [jobs.job_object(body, now) for body in await self._jobs_of(request[_KEY])]
        kept = [each for each in found if wanted.items() <= (each["metadata"] or {}).items()]
        return _page(request, kept, 20)

    async def _job(self, request: web.Request) -> web.Response:
        return self._answer(await self._asked(request))

    def _answer(self, body: Body) -> web.Response:
        return web.json_response(jobs.job_object(body, self._parts.clock()))

    async def _events(self, request: web.Request) -> web.Response:
        body = await self._asked(request)
        meta = body["metadata"]
        query = urlencode({"fieldSelector": f"involvedObject.uid={meta['uid']}", "limit": 500})
        noted = await self._kube.get(f"/api/v1/namespaces/{meta['namespace']}/events?{query}")
        losses = await self._losses(request[_KEY], body)
        return _page(request, jobs.events_of(body, noted.get("items") or (), losses), 20)

    async def _checkpoints(self, request: web.Request) -> web.Response:
        body = await self._asked(request)
        folder = self._own_folder(request[_KEY], body)
        names: list[str] = []
        if folder:
            names = await asyncio.to_thread(self._files.store.names, f"{folder}/checkpoints")
        losses = await self._losses(request[_KEY], body)
        return _page(request, jobs.checkpoint_objects(body, names, losses), 10)

    async def _losses(self, key: ApiKey, body: Body) -> list[Body]:
        folder = self._own_folder(key, body)
        if not folder:
            return []
        path = f"{folder}/metrics.jsonl"
        text = await asyncio.to_thread(self._files.store.read, path, _MOST_FIGURES_BYTES)
        return jobs.losses_of(text or b"")

    def _own_folder(self, key: ApiKey, body: Body) -> str:
        """Return where a job leaves its figures, in the store; empty: it writes elsewhere."""
        adapters = f"{key.folder}/adapters"
        root = self._files.store.url(adapters)
        destination = str((body["spec"].get("output") or {}).get("destination") or "")
        name = destination.removeprefix(f"{root}/")
        if name == destination or "/" in name or name.startswith("."):
            return ""
        return f"{adapters}/{name}/{OWN_FOLDER}/{body['metadata']['uid']}"

    async def _cancel(self, request: web.Request) -> web.Response:
        at = timestamp(self._parts.clock())
        change = {
            "metadata": {"annotations": {jobs.CANCELLED: at}},
            "spec": {"suspend": True},
        }
        return await self._change(request, change, "cancelled", ())

    async def _pause(self, request: web.Request) -> web.Response:
        return await self._change(request, {"spec": {"suspend": True}}, "paused", ("paused",))

    async def _resume(self, request: web.Request) -> web.Response:
        body = await self._asked(request)
        if (status := jobs.status_of(body)) != "paused":
            raise _not_now(body, "resumed", f"it is {status}, and only a paused job can be")
        return await self._change(request, {"spec": {"suspend": False}}, "resumed", ())

    async def _change(
        self, request: web.Request, change: Body, done: str, not_if: tuple[str, ...]
    ) -> web.Response:
        body = await self._asked(request)
        status = jobs.status_of(body)
        if jobs.is_over(status) or status in not_if:
            raise _not_now(body, done, f"it is {status}")
        meta = body["metadata"]
        path = kind_path(FINETUNE_JOB, meta["namespace"], meta["name"])
        return self._answer(await self._kube.merge(path, change))

    # Models

    async def _models(self, request: web.Request) -> web.Response:
        key = request[_KEY]
        served = [each.body for each in await self._parts.catalogue.models(key.namespace)]
        tuned = [_tuned(body) for body in await self._jobs_of(key) if _is_tuned(body)]
        return web.json_response({"object": "list", "data": [*served, *tuned]})

    async def _model(self, request: web.Request) -> web.Response:
        name, key = request.match_info["id"], request[_KEY]
        for served in await self._parts.catalogue.models(key.namespace):
            if served.name == name:
                return web.json_response(served.body)
        return web.json_response(_tuned(await self._tuned_job(key, name)))

    async def _tuned_job(self, key: ApiKey, name: str) -> Body:
        for body in await self._jobs_of(key):
            if _is_tuned(body) and jobs.tuned_model(body) == name:
                return body
        raise missing("model", name[:256], "model")

    async def _delete_model(self, request: web.Request) -> web.Response:
        """Delete the job of a tuned model, which unloads it; the adapter's files stay."""
        name, key = request.match_info["id"], request[_KEY]
        body = await self._tuned_job(key, name)
        meta = body["metadata"]
        await self._kube.delete(kind_path(FINETUNE_JOB, meta["namespace"], meta["name"]))
        return web.json_response({"id": name, "object": "model", "deleted": True})


def _is_tuned(body: Body) -> bool:
    return jobs.status_of(body) == "succeeded"


def _tuned(body: Body) -> Body:
    created = jobs.unix((body.get("status") or {}).get("completionTime")) or 0
    return {
        "id": jobs.tuned_model(body),
        "object": "model",
        "created": created,
        "owned_by": body["metadata"]["namespace"],
    }


async def _healthy(request: web.Request) -> web.Response:
    del request
    return web.json_response({"status": "ok"})


async def _json(request: web.Request) -> object:
    try:
        async with asyncio.timeout(_SILENT_S):
            return json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise CallRefused(400, f"The body is not JSON: {error}", code="invalid_json") from error
    except TimeoutError as error:
        raise CallRefused(408, "The body did not come in time.", kind="timeout_error") from error


def _name_of(part: object) -> str:
    """Return the name of a part; refuses what is not one of an upload."""
    if not isinstance(part, BodyPartReader):
        raise invalid("file", "holds parts of its own", "Send purpose and file.")
    if part.name not in _FIELDS_OF_UPLOAD:
        raise invalid(
            (part.name or "")[:64],
            "is not a field that this server knows",
            "Send purpose and file.",
            code="unknown_parameter",
        )
    return part.name


async def _whole(upload: PendingUpload | None) -> UploadedFile:
    if upload is None:
        raise invalid("file", "is missing", "Send one.", "missing_required_parameter")
    return await upload.commit()


async def _short(part: BodyPartReader) -> str:
    found = await part.read_chunk(256)
    if not part.at_eof() and await part.read_chunk(1):
        raise invalid("purpose", "is too long", f"Write {PURPOSE}.")
    return found.decode(errors="replace")


def _check_first(purpose: str | None) -> None:
    """Refuse a second field: each may take its time, and there could be thousands."""
    if purpose is not None:
        raise invalid("purpose", "is sent twice", "Send it once.")


def _check_purpose(purpose: str | None) -> None:
    if purpose is None:
        raise invalid(
            "purpose", "is missing", f"Write {PURPOSE}.", code="missing_required_parameter"
        )
    if purpose != PURPOSE:
        raise invalid("purpose", f"{purpose[:64]!r} has no use here", f"Write {PURPOSE}.")


async def _in_time(awaited: Awaitable[_T]) -> _T:
    try:
        async with asyncio.timeout(_SILENT_S):
            return await awaited
    except TimeoutError as error:
        raise CallRefused(408, "The upload has stopped.", kind="timeout_error") from error


async def _pieces(
    part: BodyPartReader, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[bytes]:
    begun_s, taken = clock(), 0
    while not part.at_eof():
        piece = await _in_time(part.read_chunk(_PIECE_BYTES))
        taken += len(piece)
        if clock() - begun_s > _SILENT_S + taken / _LEAST_BYTES_PER_SECOND:
            raise CallRefused(408, "The upload is too slow.", kind="timeout_error")
        if piece:
            yield piece


def _page(request: web.Request, found: list[Body], default: int) -> web.Response:
    """Return the part of a listing that a call asks for by `after` and `limit`."""
    text = request.query.get("limit", str(default))
    if not text.isdecimal() or not 1 <= int(text) <= 10_000:
        raise invalid("limit", f"{text[:32]!r} is not a limit", "Write an integer from 1 to 10000.")
    limit, after = int(text), request.query.get("after")
    begin = 0
    if after:
        places = [n for n, each in enumerate(found) if each["id"] == after]
        if not places:
            raise invalid("after", f"{after[:128]!r} is not in the list", "Begin without it.")
        begin = places[0] + 1
    shown = found[begin : begin + limit]
    return web.json_response(
        {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": begin + limit < len(found),
        }
    )


def _clash(asked: JobRequest, manifest: Mapping[str, Any]) -> CallRefused:
    name = manifest["metadata"]["name"]
    if asked.suffix:
        return invalid(
            "suffix",
            f"{name!r} is the name of another job in namespace {manifest['metadata']['namespace']}",
            "Choose another suffix, or delete the model that has it.",
            code="suffix_taken",
        )
    return unavailable("Two jobs were made under one name. Try again.")


def _not_now(body: Mapping[str, Any], done: str, why: str) -> CallRefused:
    return CallRefused(
        400,
        f"The job {jobs.id_of(body)} cannot be {done}: {why}.",
        param="fine_tuning_job_id",
        code="invalid_job_status",
    )


def _refusal(refused: CallRefused) -> web.Response:
    headers = {"Retry-After": f"{refused.retry_after_s:.0f}"} if refused.retry_after_s else {}
    return web.json_response(refused.body, status=refused.status, headers=headers)


def _of_http(request: web.Request, error: web.HTTPException) -> CallRefused:
    if error.status == 404:
        return CallRefused(
            404, f"Unknown request URL: {request.method} {request.path}", code="unknown_url"
        )
    if error.status == 413:
        return CallRefused(413, f"The body is larger than {_MOST_BODY_BYTES} bytes.")
    return CallRefused(error.status, f"{request.method} {request.path}: {error.reason}")
