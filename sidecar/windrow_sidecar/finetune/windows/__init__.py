"""How a layer runs on some tokens of a row at a time, and learns as if it had run on all."""
