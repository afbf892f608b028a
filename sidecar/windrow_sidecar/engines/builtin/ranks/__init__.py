"""The built-in engine over several ranks: one process for each part of the model."""
