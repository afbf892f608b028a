"""Stages of what SGLang has to show on a GPU (`benchmarks.sglang_gpu`)."""
