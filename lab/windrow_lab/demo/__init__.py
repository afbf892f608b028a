"""The whole system doing its job: `windrow demo`."""
