"""Partitions of the device: CPU sets on the host, SMs on a GPU."""
