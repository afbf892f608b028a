"""Record what one LoRA iteration allocates: every request of torch, in order, as a small file.

A Llama of the proportions of an 8B model (feed-forward 3.5 times the width, four query heads to a
KV head), an eighth as wide and 24 layers deep, with LoRA of rank 16 on all linear layers; batch 2 x
1,024 tokens, forward, backward and optimizer step in fp32 on the CPU, with torch's profiler. An
iteration before it warms up, so that the optimizer's state exists. At that width an activation is a
whole number of blocks of 2 MiB, as the 8B model's are in bf16; at half of it those of the
feed-forward are not, and what rounding them costs would be that of the small model.

The file: a line for each request, `+bytes` for the next allocation (counted from 0) and `-n` for
the end of allocation n. What was allocated before the iteration and ends in it is left out.

Example: python tools/record_allocations.py benchmarks/traces/lora-2x1024.txt
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

LAYERS, WIDTH, BATCH, LENGTH, RANK = 24, 512, 2, 1024, 16


def make_model() -> torch.nn.Module:
    """Random weights from a seed."""
    torch.manual_seed(17)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=WIDTH,
        intermediate_size=WIDTH * 7 // 2,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=2,
        use_cache=False,
    )
    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
    return get_peft_model(LlamaForCausalLM(config), lora)


def iterate(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step on random tokens."""
    tokens = torch.randint(2048, (BATCH, LENGTH))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def memory_events() -> list[dict[str, Any]]:
    """The profiler's words on the second iteration's memory; freed bytes are negative."""
    model = make_model()
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    iterate(model, optimizer)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        iterate(model, optimizer)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        run.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text(encoding="utf-8"))["traceEvents"]
    found = [e for e in events if e.get("name") == "[memory]"]
    return sorted(found, key=lambda e: (e["ts"], e["args"]["Ev Idx"]))


def numbered(events: Iterable[dict[str, Any]]) -> Iterator[str]:
    """The lines of the file."""
    living: dict[int, int] = {}
    count = 0
    for event in events:
        address, n_bytes = event["args"]["Addr"], event["args"]["Bytes"]
        if n_bytes > 0:
            living[address] = count
            count += 1
            yield f"+{n_bytes}"
        elif address in living:
            yield f"-{living.pop(address)}"


def main() -> None:
    """Record and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    file: Path = parser.parse_args().file
    lines = list(numbered(memory_events()))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n", encoding="ascii")
    print(f"{len(lines)} steps, {file.stat().st_size} bytes")


if __name__ == "__main__":
    main()
