"""One base model cut over several ranks, and the adapter that is trained on its shards."""
