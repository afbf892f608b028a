"""Finetuning in the process of the built-in engine: one thread, which decode lends the device."""
