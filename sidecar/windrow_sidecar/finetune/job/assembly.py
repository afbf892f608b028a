"""Read a job and put its model, adapter, rows and optimizer together."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from windrow.crd import FINETUNE_JOB, FinetuneJobSpec, parse_job_spec
from windrow.documents import read_document
from windrow.errors import UserError
from windrow.outputs import OWN_FOLDER, check_alone, check_within, folder_of, path_of
from windrow.served_chats import PLAIN
from windrow.sglang import own_rendering
from windrow_sidecar.compute.device import ComputeDevice
from windrow_sidecar.compute.host_device import HostDevice
from windrow_sidecar.engine_facts import NO_LIMITS, NOTHING_KNOWN, EngineFacts
from windrow_sidecar.finetune.adapter.adapters import (
    ADAPTER,
    Adapter,
    add_adapter,
    check_reach,
    trainable,
)
from windrow_sidecar.finetune.adapter.compiled_layer import use_compiled
from windrow_sidecar.finetune.adapter.config import prefix_tokens
from windrow_sidecar.finetune.adapter.layer_programs import use_graphs, use_program
from windrow_sidecar.finetune.adapter.served import not_served
from windrow_sidecar.finetune.data.readers import RowsWanted
from windrow_sidecar.finetune.data.reading import ModelLimits, read_dataset
from windrow_sidecar.finetune.data.remote import NO_CREDENTIALS, Credentials
from windrow_sidecar.finetune.data.source_access import UNCONFINED, SourceAccess
from windrow_sidecar.finetune.data.split import BatchPlan, DataSplit, lengths_of
from windrow_sidecar.finetune.data.store import TokenFile
from windrow_sidecar.finetune.data.tokens import RowTokenizer
from windrow_sidecar.finetune.engine.micro_batch_group import ModelParts
from windrow_sidecar.finetune.engine.orders import Order, layer_major
from windrow_sidecar.finetune.engine.sharded_stream import ShardedStream
from windrow_sidecar.finetune.engine.sizing import TaskletSizing, WholeRows
from windrow_sidecar.finetune.engine.stream import TaskletStream
from windrow_sidecar.finetune.engine.suspension import between_modules
from windrow_sidecar.finetune.job.packing import Packing, packing_of
from windrow_sidecar.finetune.model.around import InTurn
from windrow_sidecar.finetune.model.boundaries import Boundaries, TorchBoundaries
from windrow_sidecar.finetune.model.decoder_stack import DecoderStack
from windrow_sidecar.finetune.model.layer_program import ProgramName
from windrow_sidecar.finetune.model.loading import BaseModel
from windrow_sidecar.finetune.model.loss import Head
from windrow_sidecar.finetune.recompute.activation_budget import ActivationBudget, JobMemory
from windrow_sidecar.finetune.recompute.checkpointed_layers import PlannedLayers
from windrow_sidecar.finetune.tasklets import MicroLimits
from windrow_sidecar.finetune.tensor_parallel.adapter import AdapterParts
from windrow_sidecar.finetune.tensor_parallel.sharding import Sharding
from windrow_sidecar.finetune.training.checkpoint import JobFolder
from windrow_sidecar.finetune.training.checkpoint_origin import Origin
from windrow_sidecar.finetune.training.evaluation import EvaluationPolicy
from windrow_sidecar.finetune.training.optimizer import AdapterOptimizer, Schedule
from windrow_sidecar.finetune.training.preference import PreferenceLoss

log = logging.getLogger(__name__)

# Tokens of a micro-batch where nobody waits for the device: a layer of an 8B model has to be long
# enough there to hide what queueing it costs Python, several milliseconds (H200).
MICRO_BATCH_TOKENS = {"cpu": 1024, "cuda": 4096}


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A FinetuneJob as a worker gets it: its spec, with name, UID and epoch.

    Attributes:
        outputs: what may be written; None: the worker is alone on a machine, under its user's
            rights.
        dataset_credentials: for its rows.
        output_credentials: for its destination.
        tracking_credentials: for the servers that get its figures.
        model_credentials: for its base model.
        access: what may be read.
        checkpoint: that the job has to go on from, as the operator knows it; "": none is known.
        begun: when its folder was first claimed, on the clock of that machine; None: not yet.
        engine: what is known of the slot's engine.
        rendered_for: the server whose requests its rows are rendered as; "": see `served_by`.
    """

    namespace: str
    name: str
    uid: str
    epoch: int
    spec: FinetuneJobSpec
    outputs: tuple[Path, ...] | None = None
    dataset_credentials: Credentials = NO_CREDENTIALS
    output_credentials: Credentials = NO_CREDENTIALS
    tracking_credentials: Credentials = NO_CREDENTIALS
    model_credentials: Credentials = NO_CREDENTIALS
    checkpoint: str = ""
    access: SourceAccess = UNCONFINED
    begun: datetime | None = None
    engine: EngineFacts = NOTHING_KNOWN
    rendered_for: str = ""

    @property
    def served_by(self) -> str:
        """The server whose requests rows are rendered as, where its folder does not say."""
        return self.rendered_for or self.spec.dataset.served_by or self.engine.chats or PLAIN

    def of_folder(self, folder: JobFolder) -> JobSpec:
        """Return it with what its folder, which is claimed, says of it.

        Raises:
            OSError, UserError: the folder does not.
        """
        insisted = self.spec.dataset.served_by is not None
        served_by = folder.served_by(self.served_by, insisted=insisted)
        return replace(self, begun=folder.begun, rendered_for=served_by)

    @property
    def destination(self) -> Path:
        """The directory that gets the adapter.

        Raises:
            UserError: the job may not write there.
        """
        place = self.spec.output.destination
        if self.outputs is None:
            return check_alone(place)
        named = Path(path_of(place))
        actual = check_within(named, self.outputs)
        # Who writes to the volume may have put a link where the job's own folder comes.
        check_within(named / OWN_FOLDER / self.uid / "checkpoints", self.outputs)
        return actual


def read_job(path: Path, output: str | None = None) -> JobSpec:
    """Read a job as the agent writes it, or a FinetuneJob manifest (YAML or JSON).

    Args:
        path: of the file.
        output: the destination, instead of that of the spec.

    Raises:
        UserError: the file cannot be read, or the spec in it cannot be honoured.
    """
    document = read_document(path, "Name a FinetuneJob manifest.")
    if (kind := document.get("kind", FINETUNE_JOB.kind)) != FINETUNE_JOB.kind:
        raise UserError(f"is a {kind}", field=str(path), remedy="Name a FinetuneJob manifest.")
    if not isinstance(document.get("spec"), dict):
        raise UserError("holds no spec", field=str(path), remedy="Name a FinetuneJob manifest.")
    if output is not None:
        stated = document["spec"].get("output")
        kept = stated if isinstance(stated, dict) else {}
        document["spec"]["output"] = {**kept, "destination": output}
    about = document.get("metadata") or document
    outputs, namespace = document.get("outputs"), str(about.get("namespace", "default"))
    return JobSpec(
        namespace=namespace,
        name=str(about.get("name", path.stem)),
        uid=folder_of(about, path),
        epoch=int(document.get("epoch", 1)),
        spec=parse_job_spec(document["spec"]),
        outputs=None if outputs is None else tuple(map(Path, outputs)),
        checkpoint=str(document.get("checkpoint") or ""),
        engine=EngineFacts.of_document(document.get("engine")),
        access=SourceAccess.of(document.get("access"), outputs or (), namespace),
    )


@dataclass(slots=True)
class TrainingSession:
    """A loaded job: its model with the adapter in it, and its tasklets."""

    job: JobSpec
    model: Any  # peft
    stream: TaskletStream
    longest_row: int  # tokens, of both answers where a row is a pair
    shared_weights: bool
    origin: Origin
    activation_budget: ActivationBudget  # of what its layers may keep
    device: ComputeDevice
    rows: DataSplit
    notes: tuple[str, ...] = ()  # what a user has to know of it, those of the rows included
    program_why: str = ""  # why its layers run by another program than was asked for
    packing: Packing = Packing(packed=False)  # noqa: RUF009 - is frozen

    def adapted(self) -> Any:  # noqa: ANN401 - peft is untyped
        """Return peft's model with all of the adapter, as it is now, to be saved."""
        return self.stream.adapted(self.model)

    def micro_batch_tokens(self, most: int) -> int:
        """Padded tokens of a micro-batch that may have at most so many: rows may be too few."""
        training = self.job.spec.training
        rows = self.longest_row * (training.micro_batch_size or training.batch_size)
        if self.stream.packed and self.packing.sizes is not None:
            rows = max(rows, self.packing.sizes.most)
        return min(most, rows)

    @property
    def packing_told(self) -> str:
        """Text on whether rows are packed, as they are now; "" where there is nothing to say."""
        if self.stream.packed == self.packing.packed:
            return self.packing.told
        return f"rows are {'' if self.stream.packed else 'not '}packed, as when the job began"

    @property
    def all_notes(self) -> tuple[str, ...]:
        """Notes, and how rows stand together: known once the job goes on from its checkpoint."""
        return (*self.notes, self.packing_told) if self.packing_told else self.notes


def rows_wanted(job: JobSpec, base: BaseModel) -> RowsWanted:
    """Return what another process needs to read the job's rows."""
    training = job.spec.training
    return RowsWanted(
        dataset=job.spec.dataset,
        tokenizer=base.folder or base.tokenizer.name_or_path,
        limits=ModelLimits.of(base.config, prefix=prefix_tokens(job.spec)),
        max_length=training.max_sequence_length,
        learn_all=training.loss == "all",
        seed=training.seed,
        credentials=job.dataset_credentials,
        access=job.access,
        begun=job.begun,
        served_by=job.served_by,
        engine=job.engine.chats,
        of_hub=base.of_hub,
    )


def read_examples(
    job: JobSpec,
    base: BaseModel,
    alive: Callable[[], None] = lambda: None,
    into: TokenFile | None = None,
) -> DataSplit:
    """Read, tokenize and split the rows of a job; `alive` is called at each.

    `into`: the file that takes their tokens (default: one that this process alone sees).

    Raises:
        UserError, Transient: see `read_dataset`.
    """
    training = job.spec.training
    tokenizer = RowTokenizer(
        base.tokenizer,
        max_length=training.max_sequence_length,
        learn_all=training.loss == "all",
        now=job.begun,
        served_by=job.served_by,
        engine=job.engine.chats,
    )
    limits = ModelLimits.of(base.config, prefix=prefix_tokens(job.spec))
    return read_dataset(
        job.spec.dataset,
        tokenizer,
        limits,
        seed=training.seed,
        alive=alive,
        credentials=job.dataset_credentials,
        access=job.access,
        into=into,
    )


@dataclass(frozen=True, slots=True)
class TaskletRuntime:
    """Environment of a job's tasklets: where they run, their largest size, what holds them up.

    Attributes:
        boundaries: where activations between layers live.
        limits: of micro-batches, asked before each group.
        sizing: of tasklets, asked before each.
        windows: whether `sizing` may cut rows: memory is counted for it.
        order: of the tasklets of a group.
        between: called between the modules of a layer that runs (see `suspension`).
        device: that the base model is on.
        units: of the device that the next tasklet computes on (see `DecoderStack`).
        program: that the layers run by, where it can run all of them.
        bound_us: how long decode may have to wait for what runs; 0: nobody waits.
    """

    boundaries: Boundaries
    limits: Callable[[], MicroLimits]
    sizing: Callable[[], TaskletSizing] = WholeRows
    windows: bool = False
    order: Order = layer_major
    between: Callable[..., None] | None = None
    device: ComputeDevice = field(default_factory=HostDevice)
    units: Callable[[], int] = lambda: 0
    program: ProgramName = "eager"
    bound_us: Callable[[], int] = lambda: 0


def open_session(
    job: JobSpec,
    base: BaseModel,
    runtime: TaskletRuntime,
    *,
    rows: DataSplit | None = None,
    alive: Callable[[], None] = lambda: None,
    sharding: Sharding | None = None,
) -> TrainingSession:
    """Put adapter, data and optimizer of a job together.

    Args:
        job: what to do.
        base: the frozen model; gets the adapter.
        runtime: where its tasklets run.
        rows: of the job, where they have been read already.
        alive: called at each row that is read.
        sharding: of a base that is cut over ranks, of which this process is one; each of them opens
            the session at the same time.

    Raises:
        UserError: rows, model or adapter cannot be honoured.
    """
    spec, training = job.spec, job.spec.training
    rows = rows or read_examples(job, base, alive)
    parts: AdapterParts | None = None
    if sharding is None:
        tuned = add_adapter(base.model, spec, base.in_turns, job.access)
    else:
        tuned, parts = sharding.add_adapter(base.model, spec, job.access)
    # A job that is on its way ends with an adapter that is worth having, loaded or not.
    limits = job.engine.adapters if base.shared else NO_LIMITS  # of this model's server alone
    if (unserved := not_served(tuned, spec, limits)) and not job.checkpoint:
        raise unserved
    stack = DecoderStack(base.model, base.in_turns, runtime.units)
    check_reach(tuned, stack)
    # Before layers are recorded: the adapter replaces their dropouts.
    head = Head(stack) if sharding is None else Head(stack, sharding.cross_entropy)
    model_parts = ModelParts(stack, head, Adapter(tuned))
    if parts is not None:
        parts.align_dropouts()
    not_packed = use_program(
        stack,
        runtime.program,
        adapter=ADAPTER,
        in_turns=base.frozen is not None,
        repacks=not base.shared,
        point=runtime.between,
    )
    not_graphs = ""
    if runtime.program == "graphs" and not not_packed:
        not_graphs = use_graphs(
            stack,
            runtime.device.captures(),
            mark=runtime.device.mark,
            point=runtime.between,
            units=runtime.units,
            bound_us=runtime.bound_us,
        )
    learns = trainable(tuned)
    if base.frozen is not None:
        check_turns(learns)
    lengths = lengths_of(rows.train)
    ranks = sharding.ranks.ranks if sharding is not None else 1
    budget = _activation_budget(job, base, stack, learns, lengths, runtime, rows.together, ranks)
    plan = BatchPlan(rows.train_rows, training.batch_size, training.seed)
    repeats = runtime.device.torch.type == "cuda" or runtime.program == "compiled"
    packing = packing_of(
        *(training, stack, rows, plan),
        prefix=tuned.active_peft_config.is_prompt_learning,
        tokens=MICRO_BATCH_TOKENS[runtime.device.torch.type],
        unasked=repeats and sharding is None,  # what refuses packing runs layers of this rank alone
        repeats=repeats,
    )
    not_compiled = ""
    if runtime.program == "compiled":
        turns = base.in_turns is not None
        not_compiled = use_compiled(stack, packing.shapes, in_turns=turns, alive=alive)
    total = plan.total_steps(epochs=training.epochs, max_steps=training.max_steps)
    schedule = Schedule(training.schedule, training.learning_rate, total, training.warmup_ratio)
    stream = (TaskletStream if parts is None else partial(ShardedStream, parts))(
        model_parts,
        AdapterOptimizer(learns, schedule, training.optimizer, parts),
        rows,
        plan,
        total_steps=total,
        boundaries=runtime.boundaries,
        limits=lambda: budget.before(_for_graphs(stack, runtime.limits())),
        sizing=runtime.sizing,
        order=runtime.order,
        seed=training.seed,
        evaluation_policy=EvaluationPolicy.of(training, packed=packing.packed),
        line_sizes=packing.sizes,
        keep_for=budget.keep_for,
        preference=PreferenceLoss.of(training),
    )
    if runtime.between is not None:
        # Layers that run packed or as graphs ask between their parts, and call no module.
        layers = stack.layers if stack.program in ("eager", "compiled") else ()
        between_modules(layers, stack.model.get_output_embeddings(), runtime.between)  # type: ignore[operator]
    origin = Origin.of(
        spec,
        base=base.fingerprint,
        rows=rows.digest,
        computed_in=base.dtype,
        template=_template_of(job, base),
        unlike_before=rows.unlike_before,
    )
    positions = ModelLimits.of(base.config).positions
    notes = (*base.notes, *rows.notes, *without_effect(spec, rows.train_rows, total, positions))
    if sharding is not None:
        notes = (f"the model is cut over {sharding.ranks.ranks} ranks", *notes)
    if unserved:
        notes = (*notes, unserved.problem)
    architectures = getattr(base.config, "architectures", None)
    if _template_of(job, base) and (why := own_rendering(spec.model.name, architectures)):
        notes = (*notes, f"{why}, and rows are rendered with the model's chat template")
    why = ""
    if not_packed:
        why = f"layers run eagerly, not packed: {not_packed}"
    elif not_graphs:
        why = f"layers run packed, not as graphs: {not_graphs}"
    elif not_compiled:
        why = not_compiled
    if why or stack.program != "eager":
        notes = (*notes, why or by_program(stack))
    longest = max(lengths) * rows.together
    return TrainingSession(
        *(job, tuned, stream, longest, base.shared, origin, budget, runtime.device, rows, notes),
        program_why=why,
        packing=packing,
    )


def by_program(stack: DecoderStack) -> str:
    """Return by which program layers run, where they were asked to, and what the driver takes."""
    if stack.graphs is None:
        return f"layers run {stack.program}"
    mib = stack.graphs.expected_bytes / 2**20
    return f"layers run as graphs, for which the driver may take {mib:.0f} MiB a shape and share"


def _for_graphs(stack: DecoderStack, limits: MicroLimits) -> MicroLimits:
    """Return limits with which the graphs of a micro-batch keep within the policy's bound."""
    most = 0 if stack.graphs is None else stack.graphs.most_tokens()
    return replace(limits, max_tokens=min(limits.max_tokens, most)) if most else limits


def _template_of(job: JobSpec, base: BaseModel) -> str:
    """Return a digest of the chat template that the job's rows are rendered with; "": none."""
    template = getattr(base.tokenizer, "chat_template", None)
    if job.spec.dataset.format not in ("chat", "sharegpt", "preference") or not template:
        return ""
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()


def _activation_budget(
    job: JobSpec,
    base: BaseModel,
    stack: DecoderStack,
    learns: Mapping[str, Tensor],
    lengths: Sequence[int],
    runtime: TaskletRuntime,
    together: int,
    ranks: int,
) -> ActivationBudget:
    """Let the stack's layers keep what the device has room for.

    Those of several ranks keep all: with different free memory ranks would recompute different
    layers, and wait for each other. On a host they share its memory.
    """
    planned: PlannedLayers | None = None
    if ranks == 1:
        planned = PlannedLayers(stack.layers, weights_stay=base.in_turns is None)
        stack.around_layer = InTurn(base.in_turns, planned) if base.in_turns else planned
    share = ranks if runtime.device.torch.type == "cpu" else 1
    needs = JobMemory(
        max(lengths),
        sum(parameter.nbytes for parameter in learns.values()),
        own_boundaries=isinstance(runtime.boundaries, TorchBoundaries),
        windows=runtime.windows,
        prefix=prefix_tokens(job.spec),
        shortest=min(lengths),
        together=together,
    )
    return ActivationBudget(
        stack,
        planned,
        needs,
        least=base.frozen is not None,
        free_bytes=lambda: max(0, runtime.device.free_bytes() // share + _bytes_of_graphs(stack)),
        release_caches=runtime.device.release_caches,
    )


def _bytes_of_graphs(stack: DecoderStack) -> int:
    """Return what graphs have of lent memory, less what the driver is still to take for them.

    That memory is the next group's, by graphs or otherwise.
    """
    if (graphs := stack.graphs) is None or graphs.refused:
        return 0 if graphs is None else graphs.backed_bytes
    return graphs.backed_bytes - max(0, graphs.expected_bytes - graphs.driver_bytes)


def without_effect(
    spec: FinetuneJobSpec, rows: int, steps: int, positions: int | None
) -> Iterator[str]:
    """Say which fields do not do what they seem to, for so many rows, steps and positions."""
    training, model = spec.training, spec.model
    if training.batch_size > rows:
        yield (
            f"spec.training.batchSize is {training.batch_size}, above the rows to train on "
            f"({rows}): a step takes all of them"
        )
    if (training.eval_every_steps or 0) > steps:
        never = ", and spec.training.earlyStop never acts" if training.early_stop else ""
        yield (
            f"spec.training.evalEverySteps is {training.eval_every_steps}: no evaluation comes "
            f"between the {steps} steps{never}"
        )
    if steps == 1 and float(training.warmup_ratio) > 0:
        yield (
            f"spec.training.warmupRatio is {training.warmup_ratio}: the only step belongs to the "
            "warm-up, which begins at a rate of 0, so nothing is learnt; write 0, or more steps"
        )
    if positions is not None and training.max_sequence_length > positions:
        yield (
            f"spec.training.maxSequenceLength is {training.max_sequence_length}, and the model has "
            f"{positions} positions: a row that is longer than these ends the job"
        )
    form = spec.dataset.format
    if spec.dataset.served_by is not None and form in ("text", "instruction"):
        yield f"spec.dataset.servedBy has no effect: rows of the format {form} have no turns"
    if model.revision != "main" and Path(model.name).is_dir():
        yield f"spec.model.revision is {model.revision}: the folder {model.name} has none"


def check_turns(learns: Iterable[str]) -> None:
    """Refuse trained biases of offloaded layers: each visit would load the old ones again.

    Args:
        learns: names of the parameters.

    Raises:
        UserError: biases are among them.
    """
    own = (name for name in learns if ".modules_to_save." not in name)  # copies, which stay
    if any(name.endswith("bias") for name in own):
        raise UserError(
            "layers take turns in memory, and their biases would be read again at each visit",
            field="spec.adapter.lora.bias",
            remedy="Write none, or use a machine whose memory holds the model.",
        )
