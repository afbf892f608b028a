"""The worker that only talks (`job_worker`), which answers credentials with their digest."""

from support.job_worker import main

if __name__ == "__main__":
    raise SystemExit(main("telling"))
