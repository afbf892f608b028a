"""A whole cluster on this machine: what runs in it, what stays, what watches it."""
