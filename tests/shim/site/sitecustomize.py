"""Python reads it at its start where this folder is in PYTHONPATH: see `kernels_on_host`."""

import kernels_on_host

kernels_on_host.install()
