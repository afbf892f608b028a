"""Layers whose weights are read from files while others compute."""
