"""`windrow demo | up | down`: a whole cluster on this machine."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
import yaml
from rich.console import Console
from rich.table import Table

from windrow.errors import UserError
from windrow_cli.output import Json, print_json, print_line, spread

if TYPE_CHECKING:
    from windrow_lab.cluster.serving import Pods
    from windrow_lab.cluster.up import ClusterInfo
    from windrow_lab.machine.devices import Device
    from windrow_lab.realnode.node import NodeInfo

ENGINES = ("builtin", "sglang")
PodsOption = Annotated[
    int | None,
    typer.Option(help="Decode pods. Default: one on 2 or 3 cores, two from 4 on."),
]
Engine = Annotated[
    str,
    typer.Option(
        help="What decodes: builtin, or sglang: SGLang's own server from the environment that "
        "`make sglang` has made."
    ),
]


NODES = ("process", "real")
Node = Annotated[
    str,
    typer.Option(
        help="Where pods run: process, as processes; real, in containers of a kubelet that lives "
        "as long as the command (root; see `make node`)."
    ),
]


@dataclass(frozen=True)
class DemoOptions:
    """Options of a demo: fields of `windrow_lab.demo.run.DemoSettings`."""

    seconds: Annotated[float, typer.Option(help="How long requests arrive.")] = 60.0
    rate: Annotated[
        float | None,
        typer.Option(
            help="Load. 1.0: 3 requests a second for each pod. Default: 1.0, or less on a machine "
            "that decodes so slowly that the batch would pass 6 requests."
        ),
    ] = None
    trace: Annotated[
        Path | None, typer.Option(help="Play this trace (Azure's or BurstGPT's format) instead.")
    ] = None
    pods: PodsOption = None
    policy: Annotated[str, typer.Option(help="Who decides: windrow, harli, static, ...")] = (
        "windrow"
    )
    seed: Annotated[int, typer.Option(help="Of the load.")] = 7
    objective_ms: Annotated[
        float | None,
        typer.Option(
            "--objective", help="TPOT objective in ms. Default: by rule, from the profile."
        ),
    ] = None
    factor: Annotated[
        float, typer.Option(help="The objective by rule, in steps of decode alone.")
    ] = 2.0
    steps: Annotated[int | None, typer.Option(help="Of the job. Default: as many as fit.")] = None
    model: Annotated[Path | None, typer.Option(help="Another model directory.")] = None
    rows: Annotated[Path | None, typer.Option(help="Other rows, in chat format.")] = None
    tp: Annotated[
        int,
        typer.Option(
            help="Cut the model of each engine over so many ranks, which share the pod's cores: "
            "the report then gives no figures of speed."
        ),
    ] = 1


@dataclass(frozen=True)
class CompareOptions:
    """Options of a comparison (`--compare`)."""

    rounds: Annotated[
        int, typer.Option(help="With --compare: five or more; six can name a winner.")
    ] = 6
    segment: Annotated[
        float, typer.Option(help="With --compare: seconds that are counted of each turn.")
    ] = 8.0
    arms: Annotated[
        str,
        typer.Option(
            help="With --compare: only these ways of sharing, with commas. In decode's process, by "
            "name only: in-engine, flexllm fused, llmstation fused."
        ),
    ] = ""


@spread
def demo(
    options: DemoOptions,
    compared: CompareOptions,
    engine: Engine = "builtin",
    node: Node = "process",
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="The same load for every way of sharing, in rounds: see who wins."
        ),
    ] = False,
    out: Annotated[Path | None, typer.Option(help="New folder for logs, report, adapter.")] = None,
    as_json: Json = False,
) -> None:
    """Watch the whole system do its job: serving under load, a FinetuneJob harvested beside it.

    The summary is in OUT/summary.json as well, the report in OUT/report.html. With --json what
    happens meanwhile is shown on standard error.

    Example: windrow demo --seconds 60 --out out/demo

    Example: windrow demo --compare --rounds 6 --out out/compared (again, to go on where it ended)
    """
    # Imported late: plots, Kubernetes and the node take a second that `--help` need not wait for.
    from windrow_lab.compare import comparison_table
    from windrow_lab.compare import run as comparison
    from windrow_lab.demo import run as whole
    from windrow_lab.figures.report import adapter_path, rows_of

    console = Console(stderr=as_json)
    sglang = _sglang(engine)
    on_node = _node(node, console, compare=compare, sglang=sglang)
    if compare and sglang is not None:
        raise UserError(
            "the comparison runs on the built-in engine only",
            field="--compare",
            remedy="Leave out --engine, or --compare.",
        )
    if options.tp < 1 or (options.tp > 1 and (compare or sglang is not None)):
        raise UserError(
            f"{options.tp} ranks are for a demo of the built-in engine"
            if options.tp > 1
            else f"{options.tp} is not above zero",
            field="--tp",
            remedy="Leave out --engine and --compare, or --tp."
            if options.tp > 1
            else "Write 1 or more.",
        )
    settings = whole.DemoSettings(
        out=_new_folder(out, goes_on=comparison.PLAN if compare else ""),
        busy=compare,
        sglang=sglang,
        node=on_node,
        **vars(options),
    )
    if compare:
        names = tuple(name.strip() for name in compared.arms.split(",") if name.strip())
        how = comparison.CompareSettings(
            rounds=compared.rounds, window_s=compared.segment, arms=names
        )
        how.check()
        (summary,) = comparison.run(settings, how, console).values()
        comparison_table.check(summary)
    else:
        summary = whole.run(settings, console)
        console.print(_summary_table(rows_of(summary)))
    if as_json:
        print_json(summary)
    places = [("report", str(settings.out / "report.html")), ("logs", str(settings.out))]
    if not compare:
        places.insert(0, ("adapter", adapter_path(summary)))
    for what, path in places:  # each on one line, to be copied from
        console.print(f"{what:8}{path}", highlight=False, soft_wrap=True)


def _node(node: str, console: Console, *, compare: bool, sglang: Path | None) -> NodeInfo | None:
    """Return the real node that this process runs on; None: none is asked for.

    Where there is none yet, one is brought up, and this very command is run on it.
    """
    from windrow_lab.realnode import node as realnode

    if not _is_real(node, sglang):
        return None
    if compare:
        raise UserError(
            "on a real node the demo compares nothing",
            field="--node",
            remedy="Leave out --compare, or --node.",
        )
    if (there := realnode.NodeInfo.of_environment()) is not None:
        return there
    again = [sys.executable, *sys.argv]
    raise typer.Exit(realnode.run(again, console))


def _is_real(node: str, sglang: Path | None) -> bool:
    """Return whether `--node` asks for a real one; raises UserError when it cannot be had."""
    if node not in NODES:
        raise UserError(
            f"{node!r} is not a node", field="--node", remedy=f"Write {' or '.join(NODES)}."
        )
    if node == "real" and sglang is not None:
        raise UserError(
            "on a real node of this machine the built-in engine decodes",
            field="--node",
            remedy="Leave out --engine, or --node.",
        )
    return node == "real"


def _sglang(engine: str) -> Path | None:
    """Return the environment whose SGLang decodes; None: the built-in engine does."""
    from windrow_lab.machine.sglang import find_environment

    if engine not in ENGINES:
        raise UserError(
            f"{engine!r} is not an engine",
            field="--engine",
            remedy=f"Write {' or '.join(ENGINES)}.",
        )
    return find_environment() if engine == "sglang" else None


def _summary_table(rows: list[tuple[str, str]]) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for label, figure in rows:
        table.add_row(label, figure)
    return table


def _new_folder(out: Path | None, goes_on: str = "") -> Path:
    """Return an empty folder, or one that holds the file by which a broken-off run goes on."""
    folder = out or Path("out") / time.strftime("demo-%Y%m%d-%H%M%S")
    if goes_on and (folder / goes_on).exists():
        return folder.absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(
            f"{folder} is not an empty folder", field="--out", remedy="Name one that is new."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(
            f"{folder} cannot be written: {e}", field="--out", remedy="Name another folder."
        ) from e
    return folder.absolute()


@dataclass(frozen=True)
class _Up:
    """A cluster that `up` leaves running, as it tells of it.

    Attributes:
        info: of the cluster.
        pods: that are to decode on it.
        policy: file to submit first.
        job: file to submit then.
    """

    info: ClusterInfo
    pods: Pods
    policy: Path = Path("examples/harvestpolicy.yaml")
    job: Path = Path("examples/finetunejob.yaml")


def up(
    pods: PodsOption = None,
    engine: Engine = "builtin",
    node: Node = "process",
    model: Annotated[Path | None, typer.Option(help="Model that the pods serve.")] = None,
    as_json: Json = False,
) -> None:
    """Leave a cluster running: control plane, operator and decode pods, to try kubectl on.

    Run it where relative paths of jobs shall begin: local containers start in this directory. On a
    real node jobs name whole paths, and may write below this directory's `out`.

    Example: windrow up && windrow submit examples/finetunejob.yaml

    Example: windrow up --node real && windrow down (as root)
    """
    from windrow.client import WindrowClient
    from windrow_lab.cluster import serving
    from windrow_lab.demo.run import PODS_WITHIN, SGLANG_WITHIN
    from windrow_lab.machine import resources
    from windrow_lab.machine.devices import devices, usable_cores

    held = devices(usable_cores(), pods)
    sglang = _sglang(engine)
    real = _is_real(node, sglang)
    served = resources.find(resources.MODEL, option="--model", given=model)
    left = _up_on_a_node(held, served) if real else _up(held, served, sglang)
    client = WindrowClient(Path(left.info.kubeconfig))
    serving.create(client, left.pods)
    serving.await_ready(client, left.pods, PODS_WITHIN if sglang is None else SGLANG_WITHIN)
    if as_json:
        files = {"policy": str(left.policy), "job": str(left.job)}
        print_json({**asdict(left.info), "endpoints": left.pods.endpoints, **files})
        return
    info, decodes, endpoints = left.info, left.pods.decodes, left.pods.endpoints
    print_line(f"kubernetes {info.version} at {info.server}, {len(decodes)} decode pod(s)")
    for decode, endpoint in zip(decodes, endpoints, strict=True):
        print_line(f"{decode.name} answers at {endpoint}")
    print_line(f"logs: {info.log_dir}")
    program = "windrow" if shutil.which("windrow") else sys.argv[0]
    print_line("Try:")
    print_line(f"  {program} submit {left.policy}")
    print_line(f"  {program} submit {left.job}")
    print_line(f"  {program} top")
    asked = " ".join(f"--endpoint {endpoint}" for endpoint in endpoints)
    print_line(f"  {sys.executable} -m windrow_lab.load {asked} --seconds 120 --rate 0.5")
    print_line(f"For kubectl: export KUBECONFIG={info.kubeconfig}")
    print_line(f"End it with: {program} down")


def _up(held: Sequence[Device], model: Path, sglang: Path | None) -> _Up:
    from windrow_lab.cluster import serving
    from windrow_lab.cluster.local import ClusterSettings
    from windrow_lab.cluster.up import up as start
    from windrow_lab.machine.devices import bystanders

    plan = serving.plan_pods(held, _named_from_here(model), sglang=sglang, asks=True)
    info = start(ClusterSettings(cpus=bystanders(held)), console=Console(stderr=True))
    return _Up(info, plan)


def _up_on_a_node(held: Sequence[Device], model: Path) -> _Up:
    """Leave a real node running; its examples name whole paths and the node's directories."""
    from windrow.client import WindrowClient, read_manifest
    from windrow_lab.cluster import manifests, serving
    from windrow_lab.cluster.up import state_directory
    from windrow_lab.demo.run import PODS_WITHIN
    from windrow_lab.machine import resources
    from windrow_lab.realnode import pods as realpods
    from windrow_lab.realnode.up import up as start

    realpods.require_mounted(model, option="--model")
    out = Path.cwd() / "out"
    out.mkdir(exist_ok=True)
    plan = serving.plan_pods(
        held, model, shaped=lambda body: realpods.on_the_node(body, out, log_root=None)
    )
    policy = plan.shaped(read_manifest(resources.find(resources.POLICY, option="--policy")))
    job = manifests.finetune_job(
        read_manifest(resources.find(resources.JOB, option="--job")),
        model=model,
        rows=resources.find(resources.ROWS, option="--rows"),
        destination=out / "adapters" / "support-tone",
        steps=120,
    )
    info = start([decode.port for decode in plan.decodes], console=Console(stderr=True))
    client = WindrowClient(Path(info.kubeconfig))
    name = policy["metadata"]["name"]
    # Before the pods: what a sidecar mounts later has to be in the pod when it is made.
    serving.observe(client, plan, name, policy["spec"]["policy"], PODS_WITHIN)
    written = {}
    for kind, body in (("harvestpolicy", policy), ("finetunejob", job)):
        written[kind] = state_directory(os.environ) / f"{kind}.yaml"
        written[kind].write_text(yaml.safe_dump(body, sort_keys=False), encoding="utf-8")
    return _Up(info, plan, written["harvestpolicy"], written["finetunejob"])


def _named_from_here(model: Path) -> Path:
    """Return a model as jobs of this directory name it: what decode serves is known by its name."""
    here = Path.cwd()
    return model.relative_to(here) if model.is_relative_to(here) else model


def down(as_json: Json = False) -> None:
    """End the cluster that `windrow up` left running; its logs stay.

    Example: windrow down
    """
    from windrow_lab.cluster.up import down as end

    ended = end()
    if as_json:
        print_json(ended)
    elif ended is None:
        print_line("nothing was up")
    else:
        print_line(f"ended; logs: {ended.log_dir}")
