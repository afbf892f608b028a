"""Frozen layers and a job's own state that leave device memory, and come back."""
