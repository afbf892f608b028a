"""The figures of a run, from its event logs."""
