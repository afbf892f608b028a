"""The sidecar's slow loop: job control, reports to the operator, metrics. Never in decode's way."""
