"""Write the pages of docs/ that are made from the code: docs/metrics.md.

`--check` writes nothing and ends 1 when a page is stale.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from windrow.metrics import (
    OPERATOR_METRICS,
    SIDECAR_METRICS,
    Metric,
    MetricType,
)

ROOT = Path(__file__).resolve().parent.parent
METRICS_HEAD = """# Metrics

Made from `api/windrow/metrics.py` by `tools/generate_docs.py`: change it there.

The operator serves its metrics on port 9464 (`/metrics`, `/healthz`, `/readyz`). A sidecar serves
those of its pod's slots where its pod's annotation `windrow.dev/metrics-port` says, on the pod's
address: the policy's `spec.sidecar.metricsPort`, else the chart's `sidecar.metricsPort`. Without
either it takes any free port of 127.0.0.1 and writes it to `metrics.port` in the run directory.
With `metrics.podMonitor` the chart tells the Prometheus operator about both.

What to rely on:

- `namespace` and `slot` name a HarvestSlot, `job_namespace` and `job_name` a FinetuneJob. Scrape
  with `honorLabels`, so that Prometheus leaves them as they are.
- The parts of a label `part`, `state` or `move` add up: `sum` over them means something.
- Quantiles, shares and rates are computed in Prometheus: latencies are histograms. Those that end
  in `_ratio` put each step in relation (to the objective, to the prediction), so slots with
  different objectives can be summed: `histogram_quantile(0.99, sum by (le)
  (rate(windrow_decode_tpot_objective_ratio_bucket[5m])))` above 1 says that the fleet breaks its
  promise.
- Labels of what a slot is (model, policy, device) stand on `windrow_slot_info` alone; join them
  with `* on (namespace, slot) group_left (model, policy) windrow_slot_info`.
- Counters start at 0 with their process, as everywhere in Prometheus: use `rate` and `increase`.
- Buckets are classic ones: Python's client does not serve native histograms.
- Calls that the operator's watches make (list and watch by kopf) are not in
  `windrow_operator_api_requests_total`.
"""


def metrics_markdown() -> str:
    """Return docs/metrics.md."""
    return "\n".join(
        [
            METRICS_HEAD,
            *_table("Sidecar: a slot, its engine and its jobs", SIDECAR_METRICS),
            *_table("Operator", OPERATOR_METRICS),
        ]
    )


def _table(title: str, metrics: tuple[Metric, ...]) -> list[str]:
    rows = [
        f"| `{metric.name}` | {metric.type} | {metric.unit or '-'} "
        f"| {', '.join(metric.labels) or '-'} | {_meaning(metric)} |"
        for metric in metrics
    ]
    head = ["| name | type | unit | labels | meaning |", "|---|---|---|---|---|"]
    return [f"## {title}", "", *head, *rows, ""]


def _meaning(metric: Metric) -> str:
    if metric.type is not MetricType.HISTOGRAM:
        return metric.help
    return f"{metric.help} Buckets: {', '.join(f'{bound:g}' for bound in metric.buckets)}."


def generated() -> dict[Path, str]:
    """Return the wanted content of every page that this tool writes."""
    return {ROOT / "docs" / "metrics.md": metrics_markdown()}


def main() -> int:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say which pages are stale")
    check = parser.parse_args().check
    stale = [
        (path, text)
        for path, text in generated().items()
        if not path.exists() or path.read_text() != text
    ]
    for path, text in stale:
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        print(f"{'stale' if check else 'wrote'}: {path.relative_to(ROOT)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
