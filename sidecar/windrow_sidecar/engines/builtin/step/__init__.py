"""One decode step for a batch of requests: on cores one by one, on a GPU as a graph."""
