"""Python face of the arena: KV chunks, lending and handing over."""
