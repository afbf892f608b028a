"""A real Kubernetes node on this machine, and a cluster on it."""
