"""One decoder layer at a time, forward and backward."""
