"""How a job's state survives."""
