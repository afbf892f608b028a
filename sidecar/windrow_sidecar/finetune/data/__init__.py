"""Rows: where they are read from, and the tokens that they become."""
