"""The operator's client against a server that is busy."""

import pytest
import yaml
from aiohttp import web

from windrow_operator.kube import ApiError, Kube
from windrow_operator.lease import NotLeading


@pytest.fixture
async def busy(tmp_path):
    """A server that gives the answers it is told to, and a client of it."""
    answers, asked = [], []

    async def answer(request):
        asked.append(f"{request.method} {request.path}")
        status, headers = answers.pop(0) if answers else (200, {})
        return web.json_response({"message": "later"}, status=status, headers=headers)

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [
            {"name": "c", "cluster": {"server": f"http://127.0.0.1:{runner.addresses[0][1]}"}}
        ],
        "users": [{"name": "u", "user": {"token": "t"}}],
    }
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    server = await Kube.connect(tmp_path / "kubeconfig")
    yield server, answers, asked
    await server.close()
    await runner.cleanup()


async def test_what_is_put_off_is_asked_again_when_the_server_said(busy):
    server, answers, asked = busy
    answers += [(429, {"Retry-After": "0"}), (503, {"Retry-After": "0"})]
    await server.replace("/apis/x", {})
    assert asked == ["PUT /apis/x"] * 3


async def test_what_is_put_off_for_long_is_the_callers_to_wait_for(busy):
    server, answers, asked = busy
    answers.append((429, {"Retry-After": "60"}))
    with pytest.raises(ApiError) as refused:
        await server.get("/apis/x")
    assert refused.value.retry_after.total_seconds() == 60
    assert len(asked) == 1


async def test_a_server_that_stays_busy_is_not_asked_for_ever(busy):
    server, answers, asked = busy
    answers += [(429, {"Retry-After": "0"})] * 100
    with pytest.raises(ApiError):
        await server.get("/apis/x")
    assert len(asked) == 4


async def test_an_error_of_the_server_is_not_repeated_unless_it_asks(busy):
    server, answers, asked = busy
    answers.append((500, {}))
    with pytest.raises(ApiError):
        await server.create("/apis/x", {})
    assert len(asked) == 1


async def test_who_may_not_write_any_more_asks_nothing(busy):
    server, _, asked = busy

    def ended():
        raise NotLeading("the term is over")

    former = server.variant(may_write=ended)
    with pytest.raises(NotLeading):
        await former.replace("/apis/x", {})
    await former.get("/apis/x")
    assert asked == ["GET /apis/x"]


@pytest.mark.parametrize("name", ["..", "../../blue/secrets/store", ".", "", "a/%2e%2e/b", "a\\b"])
async def test_a_name_leads_to_no_other_object(busy, name):
    """The client resolves dots, so a Secret of another namespace would be read by them."""
    server, _, asked = busy
    for call in (server.get, server.delete):
        with pytest.raises(ApiError, match="is not the path of an object"):
            await call(f"/api/v1/namespaces/red/secrets/{name}")
    assert asked == []
    await server.get("/api/v1/namespaces/red/secrets/a.b-c?x=..")
    assert asked == ["GET /api/v1/namespaces/red/secrets/a.b-c"]
