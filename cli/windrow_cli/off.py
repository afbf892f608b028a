"""Turn the whole cluster off and on again: `windrow off`, `windrow on`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from windrow.errors import UserError
from windrow_cli.output import Context, Json, Kubeconfig, client, print_json, print_line

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from windrow.off import ClusterSwitch, SlotQuiet

Whole = Annotated[bool, typer.Option("--all", help="The whole cluster, whatever policies say.")]
OperatorNamespace = Annotated[
    str, typer.Option(help="Namespace of the operator, in which the switch is.")
]


def off(
    whole: Whole = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Print each slot's state until every one is off.")
    ] = False,
    within: Annotated[float, typer.Option(help="Seconds to wait at most.")] = 600.0,
    reason: Annotated[str, typer.Option(help="Why, for all who ask where a job is.")] = "",
    operator_namespace: OperatorNamespace = "windrow-system",
    as_json: Json = False,
    kubeconfig: Kubeconfig = None,
    context: Context = "",
) -> None:
    """Turn harvesting off: jobs write a checkpoint and wait. --wait alone changes nothing.

    Example: windrow off --all --wait --reason "latency incident"
    """
    if not (whole or wait):
        raise UserError(
            "this option or --wait is required",
            field="--all",
            remedy="Add --all for the whole cluster, or --wait to see whether it is off. For one "
            'policy: kubectl patch harvestpolicy NAME --type merge -p \'{"spec": {"mode": '
            '"off"}}\'.',
        )
    switch = _switch(kubeconfig, context, operator_namespace)
    if whole:
        news = switch.turn_off(reason)
        if not as_json:
            print_line("the cluster is turned off" if news else "the cluster is off already")
    quiet = switch.wait(within, None if as_json else _print) if wait else None
    if as_json:
        print_json({"off": True if whole else None, "quiet": quiet, "slots": switch.slots()})
    if quiet is False:
        raise TimeoutError(
            f"not every slot was proven off within {within:g} s: one that is not connected stops "
            "when the lease of its policy ends (kubectl exec POD -- touch /run/windrow/off stops "
            "it now)"
        )


def on(
    whole: Whole = False,
    operator_namespace: OperatorNamespace = "windrow-system",
    as_json: Json = False,
    kubeconfig: Kubeconfig = None,
    context: Context = "",
) -> None:
    """Let policies decide again after `windrow off --all`.

    Example: windrow on --all
    """
    if not whole:
        raise UserError(
            "this option is required", field="--all", remedy="Add --all: the whole cluster."
        )
    news = _switch(kubeconfig, context, operator_namespace).turn_on()
    if as_json:
        print_json({"on": True, "changed": news})
    else:
        print_line("policies decide again" if news else "the cluster was not turned off")


def _switch(kubeconfig: Path | None, context: str, namespace: str) -> ClusterSwitch:
    from windrow.off import ClusterSwitch

    return ClusterSwitch(client(kubeconfig, context), namespace)


def _print(slots: Iterable[SlotQuiet]) -> None:
    listed = list(slots)
    quiet = sum(slot.quiet for slot in listed)
    print_line(f"{quiet} of {len(listed)} slots are off")
    for slot in listed:
        print_line(f"  {slot.name}: {slot.state}")
