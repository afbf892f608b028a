"""A Llama-family model over shared weights."""
