"""A model that memory does not hold: our window of frozen layers beside accelerate's disk offload.

A random Llama four times larger than the memory that may hold layers, in fp32, LoRA of rank 8 on
all linears, one batch in micro-batches of three sizes. accelerate reads each module's weights from
disk when they are used, three times a micro-batch; its layers are checkpointed, since otherwise its
graph would hold the whole model. Ours carries all micro-batches through each visit of a layer, so
that the next layer comes meanwhile. Both run in a control group with room for libraries, working
set and a window, pages of files included, so layers do come from the disk.

Beside them, with room for all, two that hold every layer in memory: ours, and a plain peft loop.
They are the most that computing allows, so accelerate's distance from them is the most that
anything could gain over it; the goal of ten times is out of reach where that is less.

DeepSpeed is no arm. 0.19.8 installs beside torch 2.15, and its ZeRO-3 trains this model with peft
on its CPU accelerator. But there "offloaded to the CPU" is where weights are anyway: nothing leaves
memory. It is killed at 1 GiB, where ours and accelerate run, and runs from 1.25 GiB on with the
whole model resident (5 to 14 tokens a second with other work beside it). Its offload to disk
(ZeRO-Infinity, which wants libaio's headers too) fails in the first backward, with and without
checkpointed layers: "param 124 already assigned swap buffer id 4".
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.confined import confined, forget_cached
from benchmarks.harness import ROOT, Baseline, Result, arguments, environment, middle, write

TIGHT = ("windrow", "accelerate")
# The last two hold every layer in memory: ours, and a plain loop over peft.
ENGINES = (*TIGHT, "resident", "peft")
# One layer: 4 x 768^2 + 3 x 768 x 2112 weights, 28 MiB in fp32. On two cores its transfer takes
# about four forwards of 8 tokens, as on an H200 (PCIe 5) it takes four of 2,048.
LAYERS, IN_MEMORY, BATCH, WIDTH = 16, 4, 16, 8
# Of a micro-batch.
ROWS = (1, 4, 16)
CONFIG = {
    "hidden_size": 768,
    "intermediate_size": 2112,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "vocab_size": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
GOAL = 10.0
# A step by its number, which returns the loss; what has been moved.
Arm = tuple[Callable[[int], float], Callable[[], dict[str, float]]]
# The least at which accelerate ran: it was killed at 896 MiB. Ours runs at 768 MiB just as fast.
LIMIT_BYTES = 1 << 30


def resident_bytes(what: str) -> int:
    """Of this process: VmRSS, now, or VmHWM, at most so far (mapped files count while resident)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {what}")


def batch(step: int, rows: int) -> torch.Tensor:
    """Ids of one batch, the same however it is cut: [micro-batches, rows, width]."""
    draw = torch.Generator().manual_seed(step)
    return torch.randint(3, 256, (BATCH // rows, rows, WIDTH), generator=draw)


def adapted(model: Any) -> Any:
    """LoRA as peft makes it."""
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch.manual_seed(0)
        return get_peft_model(model, LoraConfig(r=8, target_modules=LINEARS)).train()


def ours(folder: Path, rows: int, in_memory: int) -> Arm:
    """One step of our engine, and what its window has moved."""
    from transformers import AutoConfig

    from windrow_sidecar.finetune.activations.planned import PlannedLayers
    from windrow_sidecar.finetune.adapter.adapters import Adapter, trainable
    from windrow_sidecar.finetune.layers.around import InTurn
    from windrow_sidecar.finetune.layers.boundaries import TorchBoundaries
    from windrow_sidecar.finetune.layers.layerwise import DecoderStack
    from windrow_sidecar.finetune.layers.loss import Head
    from windrow_sidecar.finetune.layers.visit import Parts, Visit
    from windrow_sidecar.finetune.plan.grain import WholeRows
    from windrow_sidecar.finetune.plan.orders import layer_major, next_of
    from windrow_sidecar.finetune.residency.loading import load_windowed
    from windrow_sidecar.finetune.tasklets import MicroBatch
    from windrow_sidecar.finetune.training.data import Example

    config = AutoConfig.from_pretrained(folder)
    model, frozen = load_windowed(folder, config, room_bytes=1 << 50)
    frozen.resize(in_memory)
    planned = PlannedLayers(list(model.get_decoder().layers))  # type: ignore[operator]
    tuned = adapted(model)
    stack = DecoderStack(model, InTurn(frozen, planned))
    parts = Parts(stack, Head(stack), Adapter(tuned))
    parameters = list(trainable(tuned).values())
    adamw = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    # Boundaries only: at this width a second forward is cheaper than the memory of the graphs.
    planned.bytes_per_token = 0

    def step(number: int) -> float:
        every = [tuple(r.tolist()) for r in batch(number, rows).flatten(0, 1)]
        examples = [Example(ids, ids, "") for ids in every]
        labels = sum(len(ids) - 1 for ids in every)
        group = [
            MicroBatch(number, tuple(range(i, i + rows)), (WIDTH,) * rows)
            for i in range(0, BATCH, rows)
        ]
        visit = Visit(parts, group, examples, TorchBoundaries(), labels_in_batch=labels, seed=0)
        while (tasklet := next_of(layer_major, visit.frontier, WholeRows())) is not None:
            visit.run(tasklet)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        return visit.loss / labels

    def moved() -> dict[str, float]:
        return {"hidden": frozen.moved.hidden, "moved_bytes": float(frozen.moved.n_bytes)}

    return step, moved


def theirs(folder: Path, rows: int) -> Arm:
    """One step of peft over accelerate's disk offload."""
    from accelerate import init_empty_weights, load_checkpoint_in_model
    from transformers import AutoConfig, LlamaForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with init_empty_weights(include_buffers=False):
        model = LlamaForCausalLM(config)
    on_disk = {f"model.layers.{i}": "disk" for i in range(LAYERS)}
    here = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    offload = folder / "offload"
    load_checkpoint_in_model(
        model, folder, device_map={**on_disk, **here, "lm_head": "cpu"}, offload_folder=offload
    )
    model.requires_grad_(requires_grad=False)
    model.tie_weights()
    tuned = adapted(model)
    with torch.no_grad():  # peft leaves adapters beside weights that are on disk without values
        for name, parameter in tuned.named_parameters():
            if "lora_" in name:
                _settle(tuned, name, parameter)
    _offload(model.model.layers, offload)
    return _loop(tuned, rows), dict


def plain(folder: Path, rows: int) -> Arm:
    """One step of peft with every layer in memory."""
    from transformers import LlamaForCausalLM

    return _loop(adapted(LlamaForCausalLM.from_pretrained(folder)), rows), dict


def _loop(tuned: Any, rows: int) -> Callable[[int], float]:
    """Return a step as a training loop takes it, layers checkpointed."""
    tuned.gradient_checkpointing_enable({"use_reentrant": True})
    tuned.enable_input_require_grads()
    parameters = [p for p in tuned.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(parameters, lr=1e-4, fused=True)

    def step(number: int) -> float:
        total = 0.0
        for ids in batch(number, rows):
            loss = tuned(input_ids=ids, labels=ids, use_cache=False).loss * rows / BATCH
            loss.backward()
            total += float(loss.detach())
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        return total

    return step


def _settle(model: Any, name: str, parameter: torch.nn.Parameter) -> None:
    """Put an adapter's matrix into memory, as peft initialises it."""
    path, _, leaf = name.rpartition(".")
    made = torch.zeros(parameter.shape)
    if "lora_A" in name:
        torch.nn.init.kaiming_uniform_(made, a=5**0.5)
    setattr(model.get_submodule(path), leaf, torch.nn.Parameter(made))


def _offload(layers: Any, folder: Path) -> None:
    """Hang accelerate's hook on every module of the layers that has frozen weights of its own."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module
    from accelerate.utils import OffloadedWeightsLoader, PrefixedDataset

    weights = OffloadedWeightsLoader(save_folder=folder)
    for path, module in layers.named_modules():
        own = list(module.named_parameters(recurse=False))
        if not own or "lora_" in path:
            continue
        prefix = f"model.layers.{path}.".replace("base_layer.", "")
        hook = AlignDevicesHook(
            torch.device("cpu"), offload=True, weights_map=PrefixedDataset(weights, prefix)
        )
        add_hook_to_module(module, hook)


def run_here(engine: str, folder: Path, rows: int, steps: int) -> dict[str, float]:
    """Measure in this process: a first step warms up and does not count."""
    import accelerate.hooks  # noqa: F401 - so that both have the same libraries in memory
    import peft  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    torch.mm(torch.ones(512, 512), torch.ones(512, 512))
    before = resident_bytes("VmRSS")
    in_memory = IN_MEMORY if engine == "windrow" else LAYERS
    made = {"accelerate": theirs, "peft": plain}.get(engine)
    step, facts = made(folder, rows) if made else ours(folder, rows, in_memory)
    gc.collect()
    first = step(0)
    times = []
    for number in range(1, steps + 1):
        begun = time.monotonic()
        step(number)
        times.append(time.monotonic() - begun)
    tokens = BATCH * WIDTH
    peak = resident_bytes("VmHWM") - before
    return {"tokens_per_s": tokens / middle(times)[0], "peak": peak, "loss": first, **facts()}


def run_apart(engine: str, folder: Path, rows: int, steps: int) -> dict[str, float]:
    """The same in a process of its own, with memory for `LIMIT_BYTES` where it is to be tight."""
    command = [sys.executable, "-m", "benchmarks.offload", "--engine", engine]
    command += ["--folder", str(folder), "--rows", str(rows), "--steps", str(steps)]
    environ = {**os.environ, "OMP_WAIT_POLICY": "passive", "TQDM_DISABLE": "1"}
    with ExitStack() as stack:
        prefix = []
        if engine in TIGHT:
            prefix = stack.enter_context(confined(LIMIT_BYTES))
            forget_cached(folder)
        done = subprocess.run(
            [*prefix, *command], cwd=ROOT, env=environ, check=True, stdout=subprocess.PIPE
        )
    ran: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(f"  {engine}, micro-batches of {rows * WIDTH} tokens: {ran}", flush=True)
    return ran


def compare(folder: Path, rows: int, repeats: int, steps: int) -> list[Result]:
    """All in turns."""
    ran: dict[str, list[dict[str, float]]] = {engine: [] for engine in ENGINES}
    for _ in range(repeats):
        for engine, runs in ran.items():
            runs.append(run_apart(engine, folder, rows, steps))
    losses = [runs[0]["loss"] for runs in ran.values()]
    if max(losses) - min(losses) > 1e-3:
        raise RuntimeError(f"the first losses differ: {losses}")
    speed = {e: middle([r["tokens_per_s"] for r in runs]) for e, runs in ran.items()}
    mib = {e: max(r["peak"] for r in runs) / 2**20 for e, runs in ran.items()}
    hidden = middle([r["hidden"] for r in ran["windrow"]])
    ours, offloaded, most = (speed[e][0] for e in ("windrow", "accelerate", "peft"))
    of = f"micro-batches of {rows * WIDTH} tokens"
    return [
        Result(
            f"tokens a second against accelerate, {of}",
            ours / offloaded,
            "x",
            "higher",
            GOAL,
            baseline=Baseline("a plain peft loop, every layer in memory", most / offloaded),
        ),
        Result(
            f"tokens a second, {of}",
            ours,
            "tokens/s",
            "higher",
            spread=speed["windrow"][1],
            baseline=Baseline("accelerate", offloaded),
        ),
        Result(
            f"share of the rate with every layer in memory, {of}",
            ours / speed["resident"][0],
            "share",
            "higher",
            baseline=Baseline("tokens a second with every layer in memory", speed["resident"][0]),
        ),
        Result(
            f"peak resident memory beyond the libraries, {of}",
            mib["windrow"],
            "MiB",
            "lower",
            goal=mib["accelerate"],
            baseline=Baseline("accelerate", mib["accelerate"]),
        ),
        Result(
            f"transfers hidden behind computing, {of}",
            hidden[0],
            "share",
            "higher",
            spread=hidden[1],
        ),
    ]


def save_model(folder: Path) -> None:
    """Write the checkpoint."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(num_hidden_layers=LAYERS, tie_word_embeddings=False, **CONFIG)
    LlamaForCausalLM(config).save_pretrained(folder)


def main() -> None:
    """Run all, or one of them for the other process."""
    parser = arguments(__doc__)
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.engine:
        print(json.dumps(run_here(asked.engine, asked.folder, asked.rows, asked.steps)))
        return
    env = environment()
    with tempfile.TemporaryDirectory() as name:
        save_model(Path(name))
        results = []
        for rows in ROWS[:1] if asked.quick else ROWS:
            results += compare(Path(name), rows, *((1, 1) if asked.quick else (3, 2)))
    write("offload", results, env, asked.json)


if __name__ == "__main__":
    main()
