"""`python -m windrow_operator.openai_api`: serve the API until the process is asked to end."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import ssl
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from aiohttp import web

from windrow.crd import parse_job_spec
from windrow.documents import read_document
from windrow.errors import UserError, WindrowError
from windrow.plain_text import RecordFormatter
from windrow_operator.connections import listen
from windrow_operator.kube import Kube
from windrow_operator.log_lines import JsonFormatter
from windrow_operator.openai_api.catalogue import ModelCatalogue
from windrow_operator.openai_api.files import KeyFiles, StorageLimits
from windrow_operator.openai_api.keyring import Keyring
from windrow_operator.openai_api.server import ApiParts, OpenAIServer
from windrow_operator.openai_api.stores import DirectoryStore, open_store

log = logging.getLogger(__name__)

_SHARED_UMASK = 0o002  # sidecars write beside it, by the volume's group
_DRAFTS_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """The command line, typed."""

    kubeconfig: str
    in_pod: bool
    namespace: str
    host: str
    port: int
    storage: str
    key_secrets: tuple[str, ...]
    offering: tuple[str, ...]
    template: Mapping[str, Any]
    limits: StorageLimits
    certificate: Path | None
    private_key: Path | None
    log_json: bool


def parse(arguments: Sequence[str], environ: Mapping[str, str]) -> ApiSettings:
    """Return the settings of a command line in an environment.

    Raises:
        UserError: the template of jobs is not a part of a spec.
    """
    parser = argparse.ArgumentParser(
        prog="windrow serve-api",
        description="Serves OpenAI's calls for files, finetuning jobs and models.",
    )
    add = parser.add_argument
    add("--storage", required=True, help="directory that decode pods mount, or s3://bucket/folder")
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=8080, help="port to listen on; 0: any free one")
    add(
        "--kubeconfig",
        default=environ.get("KUBECONFIG", ""),
        help="default: KUBECONFIG, else the pod's service account, else kubectl's own",
    )
    add("--namespace", default="windrow-system", help="where the Secrets with API keys are")
    add("--key-secret", action="append", default=[], help="name of a Secret with API keys")
    add("--offering-namespaces", default="", help="as for the operator, by commas")
    add("--job-template", type=Path, help="YAML file with fields of a FinetuneJob's spec")
    add("--max-file-mib", type=int, default=512, help="of one file")
    add("--max-key-gib", type=int, default=8, help="of all files of a key")
    add("--max-files", type=int, default=1000, help="of a key")
    add("--tls-certificate", type=Path, help="PEM file; without, the server speaks plain HTTP")
    add("--tls-key", type=Path, help="PEM file of its private key")
    add("--log-json", action="store_true", help="one JSON object per log line")
    given = parser.parse_args(arguments)
    template: dict[str, Any] = {}
    if given.job_template is not None:
        remedy = "Write fields of a FinetuneJob's spec, like policies: [serving/chat]."
        template = read_document(given.job_template, remedy)
        _check_template(template)
    return ApiSettings(
        kubeconfig=given.kubeconfig,
        in_pod="KUBERNETES_SERVICE_HOST" in environ,
        namespace=given.namespace,
        host=given.host,
        port=given.port,
        storage=given.storage,
        key_secrets=tuple(given.key_secret),
        offering=tuple(filter(None, given.offering_namespaces.split(","))),
        template=template,
        limits=StorageLimits(given.max_file_mib << 20, given.max_key_gib << 30, given.max_files),
        certificate=given.tls_certificate,
        private_key=given.tls_key,
        log_json=given.log_json,
    )


def _check_template(template: Mapping[str, Any]) -> None:
    """Refuse a template with which no job would be valid."""
    from windrow_operator.openai_api.jobs import spec_of

    least = {
        "model": {"name": "m"},
        "dataset": {"source": "/rows.jsonl"},
        "training": {"epochs": 1},
        "output": {"destination": "s3://bucket/folder"},
    }
    parse_job_spec(spec_of(template, least))


async def serve(settings: ApiSettings) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        UserError: the storage, the kubeconfig or a certificate cannot be used.
        OSError: the port is taken.
    """
    os.umask(_SHARED_UMASK)
    store = open_store(settings.storage)
    if isinstance(store, DirectoryStore) and (left := store.sweep(_DRAFTS_S)):
        log.info("removed %d drafts of uploads that broke off", left)
    kube = await Kube.connect(settings.kubeconfig, in_pod=settings.in_pod)

    def clock() -> datetime:
        return datetime.now(UTC)

    parts = ApiParts(
        kube=kube,
        keyring=Keyring(kube, settings.namespace, settings.key_secrets),
        files=KeyFiles(store, settings.limits, lambda: clock().timestamp()),
        catalogue=ModelCatalogue(kube, settings.template.get("policies") or (), settings.offering),
        template=settings.template,
        clock=clock,
    )
    endpoint = OpenAIServer(parts)
    runner = web.AppRunner(endpoint.application(), access_log=None)
    try:
        await runner.setup()
        assert runner.server is not None
        place = (settings.host, settings.port)
        server = await listen(runner.server, endpoint.connections, *place, _tls(settings))
        scheme = "https" if settings.certificate else "http"
        for each in server.sockets:
            log.info("serving %s://%s:%d/v1", scheme, *each.getsockname()[:2])
        await _asked_to_end()
        server.close()
    finally:
        await runner.cleanup()
        await kube.close()


def _tls(settings: ApiSettings) -> ssl.SSLContext | None:
    if settings.certificate is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(settings.certificate, settings.private_key)
    except (OSError, ssl.SSLError) as error:
        raise UserError(
            f"{settings.certificate} cannot be served with: {error}",
            field="--tls-certificate",
            remedy="Name a PEM file, and its key by --tls-key.",
        ) from error
    return context


async def _asked_to_end() -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(number, ended.set)
    await ended.wait()


def main() -> int:
    """Run; return 0 when it was asked to end, 1 or 2 when it cannot go on."""
    handler = logging.StreamHandler()
    handler.setFormatter(RecordFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    try:
        settings = parse(sys.argv[1:], os.environ)
        if settings.log_json:
            handler.setFormatter(JsonFormatter())
        asyncio.run(serve(settings))
    except UserError as error:
        log.error("%s", error)  # noqa: TRY400 - the message says it all
        return 2
    except (WindrowError, OSError) as error:
        log.error("%s", error)  # noqa: TRY400 - the message says it all
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
