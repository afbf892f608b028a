"""Finetuning in the process of an engine: one thread, which decode lends the device."""
