"""Requests over HTTP: the front process, and what goes between it and the engine."""
