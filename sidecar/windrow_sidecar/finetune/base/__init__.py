"""The frozen base model: its parts, its weights, where they come from."""
