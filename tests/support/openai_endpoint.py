"""The endpoint of `windrow serve-api` in a thread, over objects in memory."""

from __future__ import annotations

import asyncio
import copy
import threading
import uuid
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import UTC, datetime
from urllib.parse import parse_qs, urlsplit

from aiohttp import web

from windrow_operator.connections import listen
from windrow_operator.kube import ApiError, Conflict, ObjectNotFound
from windrow_operator.openai_api.catalogue import ModelCatalogue
from windrow_operator.openai_api.files import KeyFiles, StorageLimits
from windrow_operator.openai_api.keyring import AUDIENCE, Keyring
from windrow_operator.openai_api.server import ApiParts, OpenAIServer
from windrow_operator.openai_api.stores import open_store

GROUP = "/apis/windrow.dev/v1alpha1"


class HeldObjects:
    """`Kube` over a dictionary: objects by their paths."""

    def __init__(self):
        self.objects, self.accounts, self.allowed, self.asked = {}, {}, set(), []
        self.silent = False

    def put(self, path, **body):
        meta = {"name": path.rpartition("/")[2], "uid": uuid.uuid4().hex, **body.pop("meta", {})}
        if "/namespaces/" in path:
            meta["namespace"] = path.split("/namespaces/")[1].split("/")[0]
        meta.setdefault("creationTimestamp", "2026-01-02T03:04:05Z")
        self.objects[path] = {"metadata": meta, **body}
        return self.objects[path]

    def job(self, namespace, name):
        return self.objects[f"{GROUP}/namespaces/{namespace}/finetunejobs/{name}"]

    def _check(self):
        if self.silent:
            raise ApiError(0, "no answer")

    async def get(self, path):
        self._check()
        parts = urlsplit(path)
        if parts.path.endswith("/events"):
            (wanted,) = parse_qs(parts.query)["fieldSelector"]
            uid = wanted.partition("=")[2]
            found = [b for b in self.objects.values() if b.get("involved") == uid]
            return {"items": copy.deepcopy(found)}
        if path not in self.objects:
            raise ObjectNotFound(404, path)
        return copy.deepcopy(self.objects[path])

    async def list(self, path, *, labels=""):
        self._check()
        name, _, value = labels.partition("=")
        plural = path.rpartition("/")[2]
        found = [
            body
            for key, body in self.objects.items()
            if key.split("/")[-2] == plural and (path in key or "/namespaces/" not in path)
        ]
        return copy.deepcopy(
            [
                b
                for b in found
                if not labels or (b["metadata"].get("labels") or {}).get(name) == value
            ]
        )

    async def create(self, path, body):
        self._check()
        self.asked.append(path)
        if path.endswith("/tokenreviews"):
            user = self.accounts.get(body["spec"]["token"])
            if user is None:
                return {"status": {"authenticated": False}}
            groups = ["system:serviceaccounts"]
            found = {"username": user, "groups": groups, "uid": "u"}
            return {"status": {"authenticated": True, "audiences": [AUDIENCE], "user": found}}
        if path.endswith("/subjectaccessreviews"):
            return {"status": {"allowed": body["spec"]["user"] in self.allowed}}
        key = f"{path}/{body['metadata']['name']}"
        if key in self.objects:
            raise Conflict(409, "exists")
        held = copy.deepcopy(body)
        return copy.deepcopy(self.put(key, meta=held.pop("metadata"), **held))

    async def merge(self, path, change):
        self._check()
        body = self.objects[path]
        body["spec"] |= change.get("spec") or {}
        added = (change.get("metadata") or {}).get("annotations") or {}
        body["metadata"].setdefault("annotations", {}).update(added)
        return copy.deepcopy(body)

    async def delete(self, path):
        self._check()
        self.objects.pop(path, None)


class ChatServer:
    """Chat server that knows some models by name, as SGLang's answers OpenAI's client.

    Attributes:
        asked: the bodies of requests for models that it knows.
    """

    def __init__(self, *models):
        self.models, self.asked = models, []

    async def complete(self, request):
        body = await request.json()
        if body["model"] not in self.models:
            message = f"The model `{body['model']}` does not exist"
            return web.json_response({"error": {"message": message}}, status=404)
        self.asked.append(body)
        said = {"role": "assistant", "content": f"As {body['model']} says."}
        choice = {"index": 0, "message": said, "finish_reason": "stop"}
        answer = {"id": "1", "object": "chat.completion", "created": 1, "model": body["model"]}
        return web.json_response({**answer, "choices": [choice]})


@contextmanager
def serving_chat(*models):
    """Serve a ChatServer while it is open; yields the base URL and the server."""
    started, ending, chat = Future(), Future(), ChatServer(*models)

    async def run():
        application = web.Application()
        application.router.add_post("/v1/chat/completions", chat.complete)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        started.set_result(f"http://127.0.0.1:{runner.addresses[0][1]}/v1")
        await asyncio.wrap_future(ending)
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    try:
        yield started.result(timeout=30), chat
    finally:
        ending.set_result(None)
        thread.join()


@contextmanager
def served(held, storage, *, limits=None, template=None, key_secrets=("keys",)):
    """Serve the API over `held` and `storage` while it is open; yields the base URL."""
    started, ending = Future(), Future()

    async def run():
        def clock():
            return datetime(2026, 1, 2, 3, 5, tzinfo=UTC)

        files = KeyFiles(open_store(storage), limits or StorageLimits(), clock().timestamp.__call__)
        template_ = template or {}
        catalogue = ModelCatalogue(held, template_.get("policies") or (), ())
        keyring = Keyring(held, "windrow-system", key_secrets)
        parts = ApiParts(held, keyring, files, catalogue, clock, template_)
        endpoint = OpenAIServer(parts)
        runner = web.AppRunner(endpoint.application(), access_log=None)
        await runner.setup()
        server = await listen(runner.server, endpoint.connections, "127.0.0.1", 0, None)
        started.set_result(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")
        await asyncio.wrap_future(ending)
        server.close()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    try:
        yield started.result(timeout=30)
    finally:
        ending.set_result(None)
        thread.join()
