"""Basis of every room: processes, cores, ports, and the executables that are built once."""
