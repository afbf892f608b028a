"""TRL's own loss and gradients of a few pairs, in float64; a process, since TRL imports much.

Args: beta, and folders. Each has `model` (the base and its tokenizer), `rows.jsonl`, and `adapter`:
its configuration and parameters. Each gets `trl.json` (ids of prompt and answers, the loss) and
`trl.safetensors` (gradients).
"""

import json
import sys
from pathlib import Path

import torch
from datasets import load_dataset
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer
from trl.kernels import chunked_logprob

from windrow_sidecar.testing.rounding import in_float64


def widen(function: type[torch.autograd.Function]) -> None:
    """Let a function's backward compute in float64: the mode of its caller does not reach it."""
    narrow = function.backward

    def backward(ctx, *gradients):
        with in_float64():
            return narrow(ctx, *gradients)

    function.backward = staticmethod(backward)


def main(folder: Path, beta: float) -> None:
    rows = load_dataset(
        "json",
        data_files=str(folder / "rows.jsonl"),
        split="train",
        cache_dir=str(folder / "cache"),
    )
    with in_float64():
        trainer = DPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64),
            args=DPOConfig(
                output_dir=str(folder / "trl"),
                beta=beta,
                per_device_train_batch_size=len(rows),
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                report_to=[],
            ),
            train_dataset=rows,
            processing_class=AutoTokenizer.from_pretrained(folder / "model"),
            peft_config=LoraConfig.from_pretrained(folder / "adapter"),
        )
        model = trainer.model
        held = load_file(folder / "adapter" / "parameters.safetensors")
        learns = {name: p for name, p in model.named_parameters() if p.requires_grad}
        with torch.no_grad():
            for name, parameter in learns.items():
                parameter.data = held[name]
        batch = trainer.data_collator(list(trainer.train_dataset))
        loss = trainer.compute_loss(model.train(), batch)
        loss.backward()
    save_file({name: p.grad for name, p in learns.items()}, folder / "trl.safetensors")
    ids = [
        [row["prompt_ids"] + row[which] for which in ("chosen_ids", "rejected_ids")]
        for row in trainer.train_dataset
    ]
    (folder / "trl.json").write_text(json.dumps({"ids": ids, "loss": float(loss.detach())}))


if __name__ == "__main__":
    widen(chunked_logprob.ChunkedLogProbFunction)
    for argument in sys.argv[2:]:
        main(Path(argument), float(sys.argv[1]))
