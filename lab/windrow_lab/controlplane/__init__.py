"""A Kubernetes API server for one run, and its certificates."""
