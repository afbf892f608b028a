"""Adapters that a server can load as they were trained."""

from __future__ import annotations

from collections.abc import Iterator

from windrow.conditions import Reason
from windrow.crd.adapter import LoraSpec
from windrow.crd.finetunejob import FinetuneJobSpec
from windrow.errors import UserError


def check_servable(spec: FinetuneJobSpec) -> None:
    """Refuse a new job whose adapter is to be loaded into a server that cannot honour it.

    A job that was accepted before goes on: its adapter is worth having, loaded or not.

    Raises:
        UserError: names the option.
    """
    if spec.output.deploy.enabled:
        for field, problem in unservable(spec):
            raise UserError(
                problem,
                field=f"spec.adapter.{field}",
                remedy="Choose another one, or leave out spec.output.deploy.",
                reason=Reason.INVALID_SPEC,
            )


def unservable(spec: FinetuneJobSpec) -> Iterator[tuple[str, str]]:
    """Yield the options of an adapter that servers do not honour, each with the reason.

    SGLang multiplies two matrices for each target by alpha / rank; it knows nothing else.
    """
    adapter, lora = spec.adapter, spec.adapter.settings
    if not isinstance(lora, LoraSpec):
        kind = {"ia3": "(IA)3", "prefix": "a prefix"}[adapter.type]
        yield "type", f"servers load LoRA adapters alone, and {adapter.type} is {kind}"
        return
    if lora.use_dora:
        yield "lora.useDora", "servers leave out what DoRA learns besides the two matrices"
    if lora.bias != "none":
        yield "lora.bias", "servers leave out biases that were trained"
    if lora.modules_to_save:
        yield "lora.modulesToSave", "servers leave out modules that were trained as a whole"
