"""Makes `models/windrow-tiny`: a byte-level Llama of 3.6 M parameters that has read some prose.

The text is `pydoc_data.topics`, which every Python carries. The same seed, thread count and library
versions give the same weights. About seven minutes on one
core that has AVX-512 BF16, twice that without `--bf16`.

    python tools/make_tiny_model.py --bf16 --out models/windrow-tiny
"""

from __future__ import annotations

import argparse
import importlib
import math
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

SPECIALS = ("<|pad|>", "<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>")
VOCABULARY = 264  # 256 bytes, the specials, and two spare rows: a multiple of 8

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True)
class Recipe:
    """Recipe by which the model is trained."""

    steps: int
    batch: int
    sequence: int
    peak_rate: float
    seed: int
    bf16: bool  # autocast: half the time where the CPU has AVX-512 BF16 or AMX

    def rate(self, step: int) -> float:
        """Learning rate: linear warm-up over 3% of the steps, then a cosine down to 5%."""
        warm = max(1, self.steps * 3 // 100)
        if step < warm:
            return self.peak_rate * (step + 1) / warm
        done = (step - warm) / max(1, self.steps - warm)
        return self.peak_rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))


def byte_alphabet() -> dict[str, int]:
    """Map the printable stand-in that byte-level tokenizers use for a byte to that byte's value."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_ins = {byte: chr(byte) for byte in printable}
    hidden = (byte for byte in range(256) if byte not in stand_ins)
    stand_ins.update({byte: chr(256 + i) for i, byte in enumerate(hidden)})
    return {stand_ins[byte]: byte for byte in range(256)}


def make_tokenizer(context: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose ids 0..255 are the bytes, followed by the special tokens.

    It puts no BOS before a text, and chats alone begin with one: the model reads windows from
    anywhere in its prose, of which few begin where a topic does. Held-out bytes cost it 1.1336 nats
    without BOS and 1.1353 with it, from a topic's start 1.2750 and 1.2714.
    """
    tokenizer = Tokenizer(models.BPE(vocab=byte_alphabet(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    pad, bos, eos, *roles = SPECIALS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        additional_special_tokens=roles,
        chat_template=CHAT_TEMPLATE,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, context: int) -> LlamaForCausalLM:
    """Return the untrained model, fp32."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def prose(tokenizer: PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (train, held out) token ids; every twentieth topic is held out."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    parts: tuple[list[int], list[int]] = ([], [])
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    for i, name in enumerate(sorted(topics)):
        text = list(topics[name].encode())
        parts[i % 20 == 7].extend([bos, *text, eos])
    train, held_out = parts
    return torch.tensor(train), torch.tensor(held_out)


def windows(tokens: torch.Tensor, starts: list[int], length: int) -> torch.Tensor:
    """Return [len(starts), length] token ids."""
    return torch.stack([tokens[s : s + length] for s in starts])


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, tokens: torch.Tensor, length: int) -> float:
    """Return nats per byte over the whole of `tokens`, in windows of `length`."""
    model.eval()
    starts = list(range(0, len(tokens) - length, length))
    losses = [
        float(model(input_ids=part, labels=part).loss)
        for part in windows(tokens, starts, length).split(16)
    ]
    model.train()
    return sum(losses) / len(losses)


def train(
    model: LlamaForCausalLM, tokens: torch.Tensor, held_out: torch.Tensor, recipe: Recipe
) -> float:
    """Train in place, telling how it goes, and return the held-out loss."""
    draw = random.Random(recipe.seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.05)
    began = time.monotonic()
    for step in range(recipe.steps):
        starts = [draw.randrange(len(tokens) - recipe.sequence) for _ in range(recipe.batch)]
        batch = windows(tokens, starts, recipe.sequence)
        with torch.autocast("cpu", torch.bfloat16, enabled=recipe.bf16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 25 == 0 or step + 1 == recipe.steps:
            spent = time.monotonic() - began
            left = spent / (step + 1) * (recipe.steps - step - 1)
            sys.stdout.write(
                f"step {step + 1}/{recipe.steps}  loss {loss.item():.3f}  "
                f"{spent:.0f} s, {left:.0f} s to go\n"
            )
            sys.stdout.flush()
    return held_out_loss(model, held_out, recipe.sequence)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> int:
    """Write the checkpoint in bf16 and return its size in bytes."""
    model.to(torch.bfloat16).save_pretrained(out, safe_serialization=True)
    tokenizer.save_pretrained(out)
    return sum(path.stat().st_size for path in out.rglob("*") if path.is_file())


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("models/windrow-tiny"))
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step")
    parser.add_argument("--sequence", type=int, default=256, help="bytes of a sequence")
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--bf16", action="store_true", help="train under bf16 autocast")
    return parser.parse_args(arguments)


def main() -> None:
    """Train and save."""
    options = parse()
    disable_progress_bar()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    context = 32768
    tokenizer = make_tokenizer(context)
    model = make_model(tokenizer, context)
    learned, held_out = prose(tokenizer)
    parameters = sum(p.numel() for p in model.parameters())
    sys.stdout.write(
        f"{parameters:,} parameters, {len(learned):,} bytes to read, {len(held_out):,} held out\n"
    )
    recipe = Recipe(
        steps=options.steps,
        batch=options.batch,
        sequence=options.sequence,
        peak_rate=options.rate,
        seed=options.seed,
        bf16=options.bf16,
    )
    loss = train(model, learned, held_out, recipe)
    size = save(model, tokenizer, options.out)
    sys.stdout.write(
        f"held-out loss {loss:.3f} nats per byte; {size / 1e6:.1f} MB in {options.out}\n"
    )


if __name__ == "__main__":
    main()
