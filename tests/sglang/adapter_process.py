"""Ask SGLang's loader what it makes of small adapters: JSON on stdout, in its environment.

`placed`: each weight has one of the buffers that adapters of these targets get.
"""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
RANK, HIDDEN, INNER, KEYS = 4, 16, 32, 8
# By module: outputs, inputs, its parent.
SHAPES = {
    "q_proj": (HIDDEN, HIDDEN, "self_attn"),
    "k_proj": (KEYS, HIDDEN, "self_attn"),
    "v_proj": (KEYS, HIDDEN, "self_attn"),
    "o_proj": (HIDDEN, HIDDEN, "self_attn"),
    "gate_proj": (INNER, HIDDEN, "mlp"),
    "up_proj": (INNER, HIDDEN, "mlp"),
    "down_proj": (HIDDEN, INNER, "mlp"),
}
TARGETS = (
    *("q_proj k_proj v_proj", "q_proj v_proj", "q_proj", "q_proj k_proj", "k_proj v_proj"),
    *("k_proj", "v_proj", "gate_proj", "gate_proj up_proj", "up_proj down_proj", "o_proj"),
)
LAYER = "base_model.model.model.layers.0"


def pair(name: str, outputs: int, inputs: int) -> dict[str, Any]:
    import torch

    return {
        f"{name}.lora_A.weight": torch.ones(RANK, inputs),
        f"{name}.lora_B.weight": torch.ones(outputs, RANK),
    }


def made_of(targets: list[str], tensors: dict[str, Any]) -> dict[str, Any]:
    from sglang.srt.lora.lora import LoRAAdapter
    from sglang.srt.lora.lora_config import LoRAConfig
    from sglang.srt.lora.utils import get_normalized_target_modules, get_target_module_name

    said = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": targets}
    model = SimpleNamespace(num_hidden_layers=1, architectures=["LlamaForCausalLM"])
    adapter = LoRAAdapter("one", LoRAConfig.from_dict(said), model, None, None)
    try:
        adapter.initialize_weights_from_tensors(tensors)
    except (KeyError, AssertionError, RuntimeError) as error:
        return {"error": str(error)}
    try:
        for name in adapter.layers[0].weights:
            get_target_module_name(name, get_normalized_target_modules(targets))
    except ValueError:
        return {"placed": False}
    return {"placed": True}


def main() -> None:
    found = {}
    for targets in TARGETS:
        names = targets.split()
        tensors: dict[str, Any] = {}
        for name in names:
            outputs, inputs, parent = SHAPES[name]
            tensors |= pair(f"{LAYER}.{parent}.{name}", outputs, inputs)
        found[targets] = made_of(names, tensors)
    projections = ["gate_proj", "up_proj", "down_proj"]
    experts = f"{LAYER}.mlp.experts"
    whole = pair(experts, HIDDEN, INNER) | pair(f"{experts}.base_layer", 2 * INNER, HIDDEN)
    found["experts as peft writes them"] = made_of(projections, whole)
    single: dict[str, Any] = {}
    for name in projections:
        outputs, inputs, _ = SHAPES[name]
        single |= pair(f"{experts}.0.{name}", outputs, inputs)
    found["experts one by one"] = made_of(projections, single)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
