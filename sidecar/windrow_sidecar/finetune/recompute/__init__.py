"""Tensors that a layer keeps of its forward, and those that backward computes again."""
