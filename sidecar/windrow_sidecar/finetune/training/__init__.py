"""Optimizer, evaluation, figures and checkpoints of a job."""
