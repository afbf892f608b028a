"""Say how OpenMP's threads wait for each other where processes share cores.

Read when torch is loaded. Threads that wait sleep, for another process may have their core: a team
that spins without end beside decode brought its p99 step from 10 to 100 ms. But not at once: waking
a thread costs some 40 us, and a layer has dozens of parallel regions. GNU's libgomp takes the
number of turns of its loop; a thousand are about 20 us on an EPYC.
"""

from __future__ import annotations

from typing import Final

# Attention of 6 requests of 1,024 tokens on 2 cores: 2.5 ms, and 11 without turns.
DECODE: Final = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}
# A worker has several threads only on cores that are its own, or idle; and as `SCHED_IDLE` it gives
# a core up at once. A layer forward and backward on two cores of an EPYC, tokens a ms: 47 and 34
# without turns, 61 and 44 with 1,000, 65 and 47 with 10,000 (37 and 27 on one core).
WORKER: Final = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "10000"}
