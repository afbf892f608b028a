"""Keys and values of running requests, in pages of the arena's chunks."""
