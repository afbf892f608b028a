"""Edges that strangers reach: the webhook, token reviews, servers of tenants, streams."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import random
from datetime import UTC, datetime

import aiohttp
import grpc
import pytest
from aiohttp import web

from windrow.errors import UserError
from windrow.outputs import check_within
from windrow.proto import attach_pb2 as pb
from windrow_operator import attach, reports
from windrow_operator.bearer_tokens import (
    ACCOUNT,
    BearerTokens,
    TokenNotValid,
    TooManyFailures,
    account_of,
)
from windrow_operator.cluster_state import ClusterState
from windrow_operator.identity import Identity, Refused
from windrow_operator.injection import SidecarTemplate
from windrow_operator.metrics import Metrics
from windrow_operator.model import Pod
from windrow_operator.openai_api.keyring import Keyring
from windrow_operator.openai_api.refusals import CallRefused
from windrow_operator.rate_limit import Forgetful, TokenBucket
from windrow_operator.server_calls import NotLoaded, Servers
from windrow_operator.serving import Instance
from windrow_operator.webhook import PATH, Webhook
from windrow_sidecar.finetune.training.checkpoint import JobFolder
from windrow_sidecar.testing.attached_operator import certificate

NOW = datetime(2025, 1, 1, 12, 0, tzinfo=UTC)
ADAPTER = "adapter_model.safetensors"
KEY = "a-word-of-the-api-server"
# The engine of a decode pod is found by its command line.
DECODES = {
    "metadata": {"name": "x", "labels": {"windrow.dev/inject": "enabled"}},
    "spec": {
        "containers": [
            {
                "name": "d",
                "image": "lmsysorg/sglang:v0.5",
                "command": ["python", "-m", "sglang.launch_server"],
                "args": ["--model-path", "/m", "--disaggregation-mode", "decode"],
            }
        ]
    },
}


async def serve(stack, application):
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    stack.append(runner)
    return f"http://127.0.0.1:{runner.addresses[0][1]}"


@pytest.fixture
async def stack():
    runners = []
    yield runners
    for runner in runners:
        await runner.cleanup()


class Asked:
    """Counts what the operator's rights were used for."""

    def __init__(self):
        self.calls = []

    async def get(self, path):
        self.calls.append(path)
        return {"status": {"phase": "Bound", "accessModes": ["ReadWriteMany"]}}

    async def try_create(self, path, body):
        self.calls.append(path)
        return body

    async def create(self, path, body):
        self.calls.append(path)
        return {"status": {"authenticated": False}}


def webhook(**more):
    cluster, kube, notes = ClusterState(NOW), Asked(), []
    volume = {
        "name": "rows",
        "mountPath": "/rows",
        "persistentVolumeClaim": {"claimName": "bank-rows"},
    }
    spec = {"selector": {}, "objective": {"tpot": "40ms"}, "sidecar": {"volumes": [volume]}}
    metadata = {"namespace": "bank", "name": "chat", "uid": "u", "resourceVersion": "1"}
    cluster.put_policy({"metadata": metadata, "spec": spec})
    cluster.namespaces["bank"] = {}

    async def note(about, event):
        notes.append(event)

    template = SidecarTemplate("op:1", "CA")
    hook = Webhook(cluster, kube, lambda: template, Metrics(), note, keys=lambda: (KEY,), **more)
    return hook, kube, notes


def review(namespace="bank", pod=DECODES):
    return {"request": {"uid": "1", "namespace": namespace, "object": pod}}


async def test_the_api_server_is_answered_by_its_path(stack):
    hook, _, _ = webhook()
    url = await serve(stack, hook.application())
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}{PATH}/{KEY}", json=review()) as answer,
    ):
        said = (await answer.json())["response"]
    assert said["allowed"]
    assert "bank-rows" in base64.b64decode(said["patch"]).decode()


@pytest.mark.parametrize("path", [PATH, f"{PATH}/", f"{PATH}/wrong", f"{PATH}/{KEY}x", "/"])
async def test_a_stranger_is_told_nothing_by_the_webhook(stack, path):
    hook, kube, notes = webhook()
    url = await serve(stack, hook.application())
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}{path}", json=review()) as answer,
    ):
        assert answer.status in (403, 404)
        assert "bank" not in await answer.text()
    assert (kube.calls, notes) == ([], [])


async def test_where_a_certificate_is_asked_for_the_path_alone_is_not_enough(stack):
    hook, kube, _ = webhook(client_names=["kube-apiserver"])
    url = await serve(stack, hook.application())
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}{PATH}/{KEY}", json=review()) as answer,
    ):
        assert answer.status == 403
    assert kube.calls == []


async def test_the_webhook_bounds_what_it_reads(stack):
    hook, _, _ = webhook()
    url = await serve(stack, hook.application())
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}{PATH}/{KEY}", data=io.BytesIO(b"x" * (3 * 2**20))) as answer,
    ):
        assert answer.status == 413


async def test_whatever_is_sent_to_the_webhook_the_pod_is_admitted_or_the_call_refused():
    """A hundred malformed reviews of each kind; `benchmarks` runs a hundred thousand."""
    hook, _, _ = webhook()
    dice = random.Random(7)
    for _ in range(300):
        said = json.loads(json.dumps(review()))
        spoil(said["request"], dice)
        answer = await hook.review(said) if "uid" in said["request"] else None
        assert answer is None or answer["response"]["allowed"]


def spoil(body, dice, depth=0):
    """Replace some part of a review by something else."""
    part = dice.choice(list(body) if isinstance(body, dict) else range(len(body)))
    if depth < 6 and isinstance(body[part], dict | list) and body[part] and dice.random() < 0.8:
        spoil(body[part], dice, depth + 1)
        return
    if part == "uid":
        return
    body[part] = dice.choice([None, 5, "x" * 1000, [], {}, [None], {"a": []}, True, -1.5, [[]]])


def jwt_like(number):
    return f"ey{number}.x.y"


async def test_made_up_tokens_are_reviewed_so_many_times():
    kube = Asked()
    identity = Identity(ClusterState(NOW), kube)
    codes = []
    for number in range(200):
        said = {"authorization": f"Bearer {jwt_like(number)}"}
        with pytest.raises(Refused) as refused:
            await identity.identify(said, "ipv4:10.0.0.9")
        codes.append(refused.value.code)
    assert 0 < len(kube.calls) <= 25
    assert codes[-1] is grpc.StatusCode.RESOURCE_EXHAUSTED
    with pytest.raises(Refused) as refused:  # another address is not held up by it
        await identity.identify({"authorization": "Bearer other"}, "ipv4:10.0.0.8")
    assert refused.value.code is grpc.StatusCode.UNAUTHENTICATED


class SlowReviews(Asked):
    """An API server whose reviews all wait until the last has come."""

    def __init__(self):
        super().__init__()
        self.answers = asyncio.Event()

    async def create(self, path, body):
        self.calls.append(path)
        await self.answers.wait()
        user = {"username": f"{ACCOUNT}blue:ci", "extra": {}}
        return {"status": {"authenticated": "good" in body["spec"]["token"], "user": user}}


@pytest.mark.parametrize("port", ["stream", "api"])
async def test_made_up_tokens_that_come_at_once_are_reviewed_so_many_times(port):
    kube = SlowReviews()
    identity = Identity(ClusterState(NOW), kube)
    keyring = Keyring(kube, "windrow-system", ())

    async def ask(number):
        said = f"Bearer {jwt_like(number)}"
        if port == "api":
            await keyring.key_of(said, "10.0.0.9")
        else:
            await identity.identify({"authorization": said}, "10.0.0.9")

    asking = [asyncio.create_task(ask(number)) for number in range(500)]
    for _ in range(5):
        await asyncio.sleep(0)
    assert 0 < len(kube.calls) <= 32
    kube.answers.set()
    refused = await asyncio.gather(*asking, return_exceptions=True)
    assert all(isinstance(error, Refused | CallRefused) for error in refused)
    assert len(kube.calls) <= 20 + 32


async def test_a_token_that_is_bound_to_no_pod_or_of_no_account_counts_as_a_failure():
    kube = SlowReviews()
    kube.answers.set()
    tokens = BearerTokens(kube, "", known_s=1, at_once=4, failures_per_second=1e-9, most=8)

    async def accept(user):
        return account_of(user)

    with pytest.raises(TokenNotValid, match="audience"):
        await tokens.reviewed("good", "peer", 0.0, accept)
    for _ in range(20):
        tokens.check_address("peer", 0.0)
        tokens.count_failure("peer", 0.0)
    with pytest.raises(TooManyFailures):
        await tokens.reviewed("good", "peer", 0.0, accept)
    assert len(kube.calls) == 1
    tokens.check_address("peer", 301.0)  # forgotten


def test_a_service_account_is_named_by_two_parts():
    assert account_of({"username": f"{ACCOUNT}blue:ci"}) == ("blue", "ci")
    for name in ("", "admin", "blue:ci", ACCOUNT, f"{ACCOUNT}blue", f"{ACCOUNT}blue:"):
        assert account_of({"username": name}) is None


async def test_a_token_longer_than_any_is_reviewed_by_nobody():
    kube = Asked()
    identity = Identity(ClusterState(NOW), kube)
    with pytest.raises(Refused):
        await identity.identify({"authorization": f"Bearer {'x' * 100_000}"}, "ipv4:10.0.0.9")
    assert kube.calls == []


def test_a_stream_that_sends_too_fast_is_read_no_faster():
    bucket = TokenBucket.full(100.0, 512.0, 0.0)
    waited = sum(bucket.take(1, 0.0) == 0 for _ in range(1000))
    assert waited == 512
    assert bucket.take(1, 0.0) == pytest.approx(4.89)
    assert bucket.take(1, 60.0) == 0


def test_what_is_remembered_is_bounded_and_forgotten():
    memory = Forgetful(10.0, 3)
    for number in range(100):
        memory.put(number, number, float(number))
    assert len(memory) == 3
    assert memory.get(99, 105.0) == 99
    assert memory.get(99, 109.0) is None
    assert memory.get(5, 100.0) is None


# --- servers of tenants ---------------------------------------------------------------------------


def hostile(answer):
    application = web.Application()

    async def models(request):
        return web.json_response({"data": ["not an object", {"id": 5}]})

    application.router.add_get("/v1/models", models)
    application.router.add_post("/load_lora_adapter", answer)
    return application


async def loaded(url):
    one = Instance("evil/decode-0", "u", "decode", url)
    async with aiohttp.ClientSession() as session:
        try:
            await Servers(session).load_everywhere([(one, "/a")], "evil.job", pinned=False)
        except NotLoaded as error:
            return str(error)
    return ""


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_server_that_redirects_leads_the_operator_nowhere(stack, status):
    asked = []
    inner = web.Application()

    async def secret(request):
        asked.append(request.path)
        return web.json_response({"success": True, "SecretAccessKey": "inner"})

    inner.router.add_route("*", "/{any:.*}", secret)
    target = await serve(stack, inner)

    async def moved(request):
        return web.Response(status=status, headers={"Location": f"{target}/credentials"})

    said = await loaded(await serve(stack, hostile(moved)))
    assert asked == []
    assert said == "evil/decode-0 answers load_lora_adapter with a redirect"


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 200_000,
        b"x" * (2 * 2**20),
        b'{"success": "yes", "key": "inner"}',
        b"",
        b"\xff",
        b"[]",
    ],
)
async def test_of_what_a_server_answers_nothing_but_its_error_message_is_repeated(stack, body):
    async def answer(request):
        return web.Response(body=body, content_type="application/json")

    said = await loaded(await serve(stack, hostile(answer)))
    assert said.startswith("evil/decode-0 ")
    assert "inner" not in said
    assert len(said) < 300


# --- destinations ---------------------------------------------------------------------------------


def publish(destination, uid, namespace, volume):
    folder = JobFolder(check_within(destination, [volume]), uid, 1, namespace=namespace)
    folder.claim()
    folder.put_adapter(
        lambda into: (into / "adapter_model.safetensors").write_text(uid),
        "adapter_model.safetensors",
    )


def test_a_destination_keeps_its_owner(tmp_path):
    place = tmp_path / "bank" / "support"
    publish(place, "first", "bank", tmp_path)
    publish(place, "second", "bank", tmp_path)
    for taken in (place, place / ".windrow" / "first", place / ".windrow" / "first" / "deeper"):
        for namespace in ("evil", ""):
            with pytest.raises(UserError, match="destination"):
                publish(taken, "other", namespace, tmp_path)
    assert (place / ADAPTER).read_text() == "second"


@pytest.mark.parametrize("words", ["", "[]", "{", '{"uid": 5}', "[" * 100_000])
def test_an_owner_that_cannot_be_read_is_another(tmp_path, words):
    place = tmp_path / "support"
    publish(place, "first", "bank", tmp_path)
    (place / ".windrow" / "owner.json").write_text(words)
    with pytest.raises(UserError, match="destination"):
        publish(place, "second", "bank", tmp_path)


# --- what sidecars send ---------------------------------------------------------------------------


def test_whatever_bytes_a_sidecar_sends_nothing_breaks_and_nothing_grows():
    """A thousand spoilt messages; nothing that they name is kept beyond the bounds."""
    dice = random.Random(11)
    cluster = ClusterState(NOW)
    pod = cluster.pods["uid"] = Pod("evil", "decode-0", "uid")
    good = pb.SidecarMessage(
        hello=pb.SidecarHello(
            slots=[pb.SlotFacts(index=n, model="/m") for n in range(3)],
            running=[pb.RunningJob(job_uid="u", epoch=1)],
        )
    ).SerializeToString()
    taken = 0
    for _ in range(1000):
        wire = bytearray(good)
        for _ in range(dice.randrange(1, 8)):
            wire[dice.randrange(len(wire))] = dice.randrange(256)
        try:
            message = pb.SidecarMessage.FromString(bytes(wire))
        except Exception:  # noqa: BLE001 - what gRPC refuses before we see it
            continue
        if message.WhichOneof("message") == "hello":
            taken += 1
            reports.take_hello(cluster, pod, message.hello, NOW, first=True)
    assert taken > 20
    assert len(cluster.slots) <= 64
    assert len(cluster.runs) == 0


# --- connections that say nothing -----------------------------------------------------------------


class Silent:
    """The context of a call, and requests of which none comes."""

    def invocation_metadata(self):
        return ()

    def peer(self):
        return "ipv4:10.0.0.9:1"

    def __aiter__(self):
        return self

    async def __anext__(self):
        await asyncio.Event().wait()


class Anybody:
    """Takes every token for that of one pod."""

    async def identify(self, metadata, peer=""):
        return Pod("evil", "decode-0", "uid")


async def test_a_connection_without_a_hello_ends(monkeypatch):
    monkeypatch.setattr(attach, "_HELLO_WITHIN_S", 0.01)
    server = attach.AttachServer(ClusterState(NOW), Asked(), Metrics(), clock=lambda: NOW)
    server._identity = Anybody()
    with pytest.raises(Refused) as refused:
        await server._arrive(Silent(), Silent())
    assert refused.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert server._arriving == 0


async def test_connections_to_the_stream_are_bounded_before_their_handshake(monkeypatch):
    monkeypatch.setattr(attach, "_MOST_CONNECTIONS", 3)
    server = attach.AttachServer(ClusterState(NOW), Asked(), Metrics(), clock=lambda: NOW)
    key, cert = certificate()
    port = await server.start("127.0.0.1", 0, grpc.ssl_server_credentials([(key, cert)]))
    silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
    try:
        reader, _ = silent[-1]
        async with asyncio.timeout(5):  # those that may stay have ten seconds
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        assert not any(reader.at_eof() for reader, _ in silent[:3])
    finally:
        for _, writer in silent:
            writer.close()
        await server.stop()


async def test_one_pod_does_not_hold_all_places_of_those_on_their_way():
    server = attach.AttachServer(ClusterState(NOW), Asked(), Metrics(), clock=lambda: NOW)
    server._identity = Anybody()
    held = [asyncio.create_task(server._arrive(Silent(), Silent())) for _ in range(4)]
    await asyncio.sleep(0)
    with pytest.raises(Refused) as refused:
        await server._arrive(Silent(), Silent())
    assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)
    assert server._arriving == 0
    assert not server._greeting


async def test_those_on_their_way_are_bounded(monkeypatch):
    monkeypatch.setattr(attach, "_MOST_ARRIVING", 0)
    server = attach.AttachServer(ClusterState(NOW), Asked(), Metrics(), clock=lambda: NOW)
    with pytest.raises(Refused) as refused:
        await server._arrive(Silent(), Silent())
    assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
