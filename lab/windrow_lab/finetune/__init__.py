"""FinetuneJobs on this machine without a cluster."""
