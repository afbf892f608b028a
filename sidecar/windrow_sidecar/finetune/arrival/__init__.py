"""Bring finished adapters to where servers of the pod load them from."""
