"""Decides, step by step, what the worker may do. Knows neither torch nor CUDA."""
