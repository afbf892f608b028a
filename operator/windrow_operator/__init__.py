"""Placement of jobs on GPUs, and reports to the user."""
