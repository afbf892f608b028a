"""Adapters that are trained, by peft."""
