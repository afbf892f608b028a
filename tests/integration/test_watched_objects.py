"""Collections that are watched, on a real API server and on one that fails by a script."""

from __future__ import annotations

import asyncio
import json

import pytest
import yaml
from aiohttp import web

from windrow_operator import watched
from windrow_operator.kube import ApiError, Kube, ObjectNotFound
from windrow_operator.watched import WatchedCollection

WITHIN_S = 60.0


class Watching:
    """Runs a watch in a task, and waits for what comes of it."""

    def __init__(self, kube, path, **more):
        self.changed, self.changes = asyncio.Event(), 0
        self.objects = WatchedCollection(
            kube, path, on_change=self._on_change, first_pause_s=0.01, **more
        )

    def _on_change(self):
        self.changes += 1
        self.changed.set()

    async def __aenter__(self):
        self.task = asyncio.create_task(self.objects.run())
        return self

    async def __aexit__(self, *_):
        self.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await self.task

    async def until(self, condition):
        async with asyncio.timeout(WITHIN_S):
            while not condition():
                assert not self.task.done(), self.task.exception()
                self.changed.clear()
                await self.changed.wait()

    @property
    def names(self):
        return {name for _, name in self.objects.objects}


# A real API server.


@pytest.fixture
async def server(kube, control_plane):
    server = await Kube.connect(control_plane.kubeconfig)
    yield server
    await server.close()


@pytest.fixture
async def things(server, namespace):
    """Return the path of a namespace's ConfigMaps, and a function that makes one of ours."""
    path = f"/api/v1/namespaces/{namespace}/configmaps"

    async def make(name, mine="yes", data=""):
        metadata = {"name": name, "labels": {"mine": mine}}
        return await server.create(path, {"metadata": metadata, "data": {"text": data}})

    return path, make


async def test_what_was_there_and_what_comes_changes_and_goes_is_known(server, things):
    path, make = things
    await make("first")
    await make("others", mine="no")
    async with Watching(server, path, labels="mine=yes") as watching:
        await watching.until(lambda: watching.objects.is_listed)
        assert watching.names == {"first"}
        # Longer than a line that a stream's reader takes as one.
        await make("second", data="x" * 600_000)
        await watching.until(lambda: watching.names == {"first", "second"})
        await server.merge(f"{path}/first", {"data": {"text": "changed"}})
        await watching.until(
            lambda: (
                [
                    body["data"]["text"]
                    for (_, name), body in watching.objects.objects.items()
                    if name == "first"
                ]
                == ["changed"]
            )
        )
        await server.delete(f"{path}/second")
        await watching.until(lambda: watching.names == {"first"})
        # What loses the label is gone for who asks by it.
        await server.merge(f"{path}/first", {"metadata": {"labels": {"mine": "no"}}})
        await watching.until(lambda: watching.names == set())
        assert watching.objects.error is None


async def test_a_watch_that_the_server_ends_goes_on_from_the_last_version(server, things):
    path, make = things
    _, version = await server.list_at(path)
    first = await make("first")
    seen = [event async for event in server.watch(path, version, seconds=1)]
    # The cluster puts a ConfigMap of its own into each namespace, perhaps only now.
    mine = [event for event in seen if event["object"]["metadata"].get("name") == "first"]
    assert [event["type"] for event in mine] == ["ADDED"]
    await make("second")
    at = first["metadata"]["resourceVersion"]
    more = [event async for event in server.watch(path, at, seconds=1)]
    named = {event["object"]["metadata"].get("name") for event in more}
    assert "second" in named
    assert "first" not in named


async def test_a_listing_in_pieces_is_of_one_version(server, things, monkeypatch):
    path, make = things
    for number in range(5):
        await make(f"thing-{number}")
    monkeypatch.setattr("windrow_operator.kube._PIECE", 2)
    found, version = await server.list_at(path, labels="mine=yes")
    assert {body["metadata"]["name"] for body in found} == {f"thing-{n}" for n in range(5)}
    assert int(version) >= max(int(body["metadata"]["resourceVersion"]) for body in found)


async def test_a_kind_that_the_server_does_not_know_is_said(server):
    async with Watching(server, "/apis/nobody.example/v1/things") as watching:
        await watching.until(lambda: watching.objects.error)
        assert isinstance(watching.objects.error, ObjectNotFound)
        assert not watching.objects.is_listed


# A server that fails by a script.


class Scripted:
    """Serves listings and watches from a script; keeps what was asked."""

    def __init__(self):
        self.items, self.version, self.asked, self.watches = {}, 10, [], []
        self.waits = asyncio.Event()  # a watch has come that has no end

    def thing(self, name):
        self.version += 1
        metadata = {"name": name, "uid": name, "resourceVersion": str(self.version)}
        return {"metadata": metadata}

    async def answer(self, request):
        query = request.query
        if "watch" not in query:
            self.asked.append("list")
            metadata = {"resourceVersion": str(self.version)}
            return web.json_response({"items": [*self.items.values()], "metadata": metadata})
        self.asked.append(f"watch {query['resourceVersion']}")
        assert query["allowWatchBookmarks"] == "true"
        step = self.watches.pop(0) if self.watches else None
        if isinstance(step, int):
            return web.json_response({"message": "as told"}, status=step)
        response = web.StreamResponse()
        await response.prepare(request)
        for event in step or ():
            await response.write(json.dumps(event).encode() + b"\n")
        if step is None:
            self.waits.set()
            await asyncio.Event().wait()  # nothing happens any more
        return response


@pytest.fixture
async def scripted(tmp_path):
    script = Scripted()
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", script.answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    config = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
    }
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    server = await Kube.connect(tmp_path / "kubeconfig")
    yield server, script
    await server.close()
    await runner.cleanup()


def bookmark(version):
    return {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(version)}}}


def gone():
    return {"type": "ERROR", "object": {"code": 410, "message": "too old resource version"}}


async def played(scripted, *watches, names):
    """Return what is asked until the watch that has no end and these names are known."""
    server, script = scripted
    script.watches = list(watches)
    async with Watching(server, "/apis/x/v1/things") as watching:
        await watching.until(lambda: watching.names == names and watching.objects.error is None)
        async with asyncio.timeout(WITHIN_S):
            await script.waits.wait()
        assert watching.names == names
    return script.asked


async def test_a_watch_goes_on_from_a_bookmark_without_another_listing(scripted):
    _, script = scripted
    script.items = {"a": script.thing("a")}
    added = {"type": "ADDED", "object": script.thing("b")}
    asked = await played(scripted, [added], [bookmark(77)], names={"a", "b"})
    assert asked == ["list", "watch 12", "watch 12", "watch 77"]


@pytest.mark.parametrize("how", ["an event", "the answer"])
async def test_a_version_that_is_too_old_means_another_listing(scripted, how):
    _, script = scripted
    script.items = {"a": script.thing("a")}
    asked = await played(scripted, [gone()] if how == "an event" else 410, names={"a"})
    assert asked == ["list", "watch 11", "list", "watch 11"]


async def test_a_server_that_fails_is_asked_again_from_the_same_version(scripted):
    _, script = scripted
    script.items = {"a": script.thing("a")}
    asked = await played(scripted, 500, 503, names={"a"})
    assert asked == ["list", "watch 11", "watch 11", "watch 11"]


async def test_what_is_no_longer_allowed_is_unknown_until_it_is(scripted):
    _, script = scripted
    script.items = {"a": script.thing("a")}
    asked = await played(scripted, 403, names={"a"})
    assert asked == ["list", "watch 11", "list", "watch 11"]


async def test_an_event_that_is_none_is_an_error_and_no_end(scripted):
    server, script = scripted
    script.watches = [[]]
    with pytest.raises(ApiError, match="watch"):
        async for _ in _broken(server, script):
            pass


async def _broken(server, script):
    async def answer(request):
        return web.Response(text="{not json\n")

    script.answer = answer
    runner = web.AppRunner(web.Application())
    runner.app.router.add_get("/{path:.*}", answer)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server._api.configuration.host = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async for event in server.watch("/apis/x/v1/things", "1"):
            yield event
    finally:
        await runner.cleanup()


class Failing:
    """A client whose every call fails; counts them."""

    def __init__(self, error):
        self.error, self.calls = error, 0

    async def list_at(self, *_, **__):
        self.calls += 1
        raise self.error


@pytest.mark.parametrize("urgent", [True, False])
async def test_pauses_grow_and_are_short_while_somebody_waits(monkeypatch, urgent):
    slept, clock = [], [0.0]
    real = asyncio.sleep

    async def sleep(seconds):
        clock[0] += seconds
        slept.append(seconds)
        await real(0)

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(watched.asyncio, "sleep", sleep)
    monkeypatch.setattr(watched.random, "uniform", lambda low, high: high)
    monkeypatch.setattr(watched.asyncio, "get_running_loop", lambda: FakeLoop(clock))
    failing = Failing(ApiError(0, "no answer"))
    objects = WatchedCollection(
        failing, "/apis/x", on_change=lambda: None, is_urgent=lambda: urgent
    )
    task = loop.create_task(objects.run())
    while failing.calls < 8:
        await real(0)
    task.cancel()
    # Doubled from one second: 1, 2, 4, 8, 16, 30, 30 s.
    expected = 1 + 2 * 6 if urgent else 1 + 2 + 4 + 8 + 16 + 30 + 30
    assert expected <= sum(slept) <= expected + 1
    assert objects.error is failing.error


class FakeLoop:
    def __init__(self, clock):
        self._clock = clock

    def time(self):
        return self._clock[0]
