"""Turn everything off before the chart is removed: `python -m windrow_operator.uninstall`.

Without options it sets the cluster's switch and waits until every slot is proven off. `--clear`
removes the switch, after the operator is gone: another installation is not to begin turned off.
"""

from __future__ import annotations

import argparse
import sys

from windrow.client import WindrowClient
from windrow.errors import WindrowError
from windrow.off import ClusterSwitch


def main(arguments: list[str] | None = None) -> int:
    """Return 0 when it is done, 1 where a slot could not be proven off in time."""
    parser = argparse.ArgumentParser(prog="python -m windrow_operator.uninstall")
    parser.add_argument("--namespace", required=True, help="of the operator")
    parser.add_argument(
        "--namespace-scope", default="", metavar="A,B", help="that are served; default: all"
    )
    parser.add_argument("--within", type=float, default=300.0, metavar="S", help="[%(default)s]")
    parser.add_argument("--clear", action="store_true", help="remove the switch")
    parser.add_argument("--kubeconfig", help="default: as kubectl finds it, or that of the pod")
    args = parser.parse_args(arguments)
    try:
        served = filter(None, args.namespace_scope.split(","))
        switch = ClusterSwitch(WindrowClient(args.kubeconfig), args.namespace, served)
        if args.clear:
            switch.turn_on()
            return 0
        switch.turn_off("windrow is being uninstalled")
        quiet = switch.wait(
            args.within,
            lambda slots: print(*(f"{s.name}: {s.state}" for s in slots), sep="\n", flush=True),
        )
    except WindrowError as error:
        print(f"windrow: {error}", file=sys.stderr)
        return 1
    if not quiet:
        print(
            f"windrow: not every slot was proven off within {args.within:g} s, so nothing is "
            "removed. helm uninstall --no-hooks removes it anyway: a sidecar without an operator "
            "stops its jobs when the lease of its policy ends.",
            file=sys.stderr,
        )
    return 0 if quiet else 1


if __name__ == "__main__":
    sys.exit(main())
