"""Python reads it at its start where this folder is in PYTHONPATH: see `kernels_on_host`."""

from importlib.util import find_spec

import kernels_on_host

kernels_on_host.install()
if find_spec("sglang"):
    # Its allocator's kernels choose pages.
    kernels_on_host.interpret("sglang.kernels.ops.memory.")
