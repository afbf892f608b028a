"""The frozen base model, and one decoder layer of it at a time, forward and backward."""
