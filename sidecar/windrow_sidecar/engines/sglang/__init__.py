"""Harvesting under SGLang: a plugin of the unmodified server, found by its entry point."""
