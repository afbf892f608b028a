"""Run finetune jobs in the built-in engine: from its command line, or for an agent."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from windrow.documents import read_document
from windrow.errors import UserError
from windrow.rundir import ENV_LAYER_PROGRAM, RunDir
from windrow_sidecar.engines.builtin.llama.model import LlamaModel
from windrow_sidecar.engines.builtin.llama.riding import Product
from windrow_sidecar.engines.builtin.settings import EngineSettings
from windrow_sidecar.engines.builtin.streamed import StreamedWeights
from windrow_sidecar.finetune.colocated.slot import EngineWeights
from windrow_sidecar.finetune.colocated.standby import JobOrder, warm_up
from windrow_sidecar.finetune.in_engine.host import EngineHost, KeptReaders
from windrow_sidecar.finetune.in_engine.joined_products import RiderSeat, join_products
from windrow_sidecar.finetune.job.assembly import read_job
from windrow_sidecar.finetune.model.decoder_stack import DecoderStack
from windrow_sidecar.finetune.model.loading import ExportedWeights
from windrow_sidecar.qos.terms import HarvestTerms, make_terms


def prepare(settings: EngineSettings) -> BuiltinHost:
    """Read the jobs and load libraries; to be called before the process has a second thread.

    Raises:
        UserError: a job cannot be read, or wants what only a cluster has.
    """
    jobs = [check_local(path) for path in settings.finetune_jobs]
    if settings.finetune_fused:
        os.environ.setdefault(ENV_LAYER_PROGRAM, "packed")  # whose products others may join
    warm_up(str(settings.model_path))
    readers = KeptReaders()
    if settings.run_dir is not None:
        return BuiltinHost(
            settings.finetune_fused, settings.run_dir, readers, terms=terms_of(settings)
        )
    own = Path(tempfile.mkdtemp(prefix="windrow-in-engine-"))
    run_dir = RunDir(own)
    try:
        orders = {str(job["name"]): _write_job(run_dir, job) for job in jobs}
    except OSError:
        shutil.rmtree(own, ignore_errors=True)
        raise
    return BuiltinHost(
        settings.finetune_fused,
        run_dir,
        readers,
        terms=terms_of(settings),
        orders=orders,
        own_folder=own,
    )


def check_local(path: Path) -> Mapping[str, object]:
    """Return a manifest as a worker reads it from its job directory.

    Raises:
        UserError: it is not a FinetuneJob, or names a Secret, which only a cluster has.
    """
    job = read_job(path)
    spec = job.spec
    for field, secret in (
        ("spec.model.secretRef", spec.model.secret_ref),
        ("spec.dataset.secretRef", spec.dataset.secret_ref),
        ("spec.output.secretRef", spec.output.secret_ref),
        ("spec.tracking.secretRef", spec.tracking.secret_ref if spec.tracking else None),
    ):
        if secret is not None:
            raise UserError(
                f"{path} names the Secret {secret.name}, which only a cluster has",
                field=field,
                remedy="Leave it out, or apply the job to a cluster.",
            )
    document = read_document(path, "Name a FinetuneJob manifest.")
    return {
        "namespace": job.namespace,
        "name": job.name,
        "uid": job.uid,
        "epoch": 1,
        "spec": document["spec"],
    }


def _write_job(run_dir: RunDir, job: Mapping[str, object]) -> JobOrder:
    order = JobOrder(str(job["uid"]), 1)
    folder = run_dir.job_dir(order.job_uid)
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    return order


def terms_of(settings: EngineSettings) -> HarvestTerms | None:
    """Return the policy that the command line names; None: the agent sends one.

    Raises:
        UserError: no such policy, or an objective that is not one.
    """
    if settings.finetune_objective_s is None:
        return None
    return make_terms(
        name="command line",
        policy=settings.finetune_policy,
        mode="harvest",
        objective_seconds=settings.finetune_objective_s,
        percentile=99.0,
        scope="perStep",
        max_compute_percent=100,
        max_memory_percent=100,
    )


class BuiltinHost(EngineHost):
    """Finetuning in the built-in engine's process (see `InEngineFinetune`).

    Args:
        fused: whether decode's steps ride along with the forwards of jobs.
        run_dir, readers, terms, orders, own_folder: see `EngineHost`.
    """

    def __init__(
        self,
        fused: bool,
        run_dir: RunDir,
        readers: KeptReaders,
        *,
        terms: HarvestTerms | None = None,
        orders: Mapping[str, JobOrder] | None = None,
        own_folder: Path | None = None,
    ) -> None:
        super().__init__(run_dir, readers, terms, orders, own_folder)
        self._fused = fused

    def serves(self, model: LlamaModel, streamed: StreamedWeights | None) -> None:
        """Note whose weights decode computes with: steps ride along over the same ones.

        `streamed`: where memory holds some of them only; jobs compute with the same.
        """
        own = None
        if streamed is not None:
            manifest = streamed.layout.manifest(streamed.fingerprint)
            exported = ExportedWeights(manifest, streamed.pages.storage)
            own = EngineWeights(exported, streamed.layers)
        if not self._fused:
            self.shares(own, None)
            return
        shapes = [
            {
                Product.QKV: layer.qkv.shape,
                Product.O: layer.out.shape,
                Product.GATE_UP: layer.gate_up.shape,
                Product.DOWN: layer.down.shape,
            }
            for layer in model.layers
        ]

        def joins(stack: DecoderStack, seat: RiderSeat) -> str:
            if stack.depth != len(shapes):
                return "the job's model is not the one that decode serves"
            return join_products(stack, lambda layer, product: shapes[layer][product], seat)

        self.shares(own, joins)
