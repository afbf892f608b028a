"""One job from its spec to its adapter: how it is put together, run, and reported."""
