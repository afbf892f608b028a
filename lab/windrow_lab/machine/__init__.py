"""What every room stands on: processes, cores, ports, and the executables that are built once."""
