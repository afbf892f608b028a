"""Report which LoRA adapters SGLang's scheduler has on its device, and which requests wait for.

As its own metrics read them (`SchedulerMetricsMixin.update_lora_metrics`): the pool of the LoRA
manager has the adapters by their ids, the manager the names of these. Everything is read, nothing
held: where a name of SGLang's has changed, nothing is reported, and once that is logged.
"""

from __future__ import annotations

import logging
from typing import Any

from windrow.proto import agent_pb2

_log = logging.getLogger(__name__)


def adapter_limits(args: Any) -> agent_pb2.AdapterLimits:  # noqa: ANN401 - SGLang's ServerArgs
    """Return a server's limits on adapters, as its command line has them.

    Its memory pool refuses a larger rank, and targets that were not named
    (`srt/lora/mem_pool.py`).
    """
    if not args.enable_lora:
        return agent_pb2.AdapterLimits(off=True)
    if args.lora_paths:  # they widen both
        return agent_pb2.AdapterLimits()
    named = sorted(args.lora_target_modules or ())
    targets = [] if "all" in named else named
    return agent_pb2.AdapterLimits(rank=args.max_lora_rank or 0, targets=targets)


class SchedulerAdapters:
    """The adapters of a scheduler. Called on a thread beside the scheduler's.

    Args:
        scheduler: SGLang's.
        model: the name of the base model, as requests write it before the colon.
    """

    def __init__(self, scheduler: Any, model: str) -> None:  # noqa: ANN401
        self._scheduler, self._model = scheduler, model
        self._told = False

    def read(self) -> agent_pb2.ServedAdapters | None:
        """Return them; None: they cannot be read."""
        try:
            return self._read()
        except (AttributeError, KeyError, TypeError, RuntimeError) as error:
            # RuntimeError: of a collection that the scheduler changed meanwhile.
            if not self._told and not isinstance(error, RuntimeError):
                self._told = True
                _log.warning("windrow: adapters are not reported: %r", error)
            return None

    def _read(self) -> agent_pb2.ServedAdapters:
        manager = self._scheduler.tp_worker.model_runner.lora_manager
        names = {uid: str(ref.lora_name) for uid, ref in dict(manager.lora_refs).items()}
        pool = manager.memory_pool
        waiting = {getattr(each, "lora_id", None) for each in [*self._scheduler.waiting_queue]}
        return agent_pb2.ServedAdapters(
            most_on_device=int(pool.max_loras_per_batch),
            on_device=self._named([*pool.uid_to_buffer_id], names),
            waited_for=self._named(waiting, names),
        )

    def _named(self, uids: Any, names: dict[str, str]) -> list[str]:  # noqa: ANN401
        # None is the base model's own place in the pool; an id without a name was just unloaded.
        return sorted(f"{self._model}:{names[uid]}" for uid in uids if uid in names)
