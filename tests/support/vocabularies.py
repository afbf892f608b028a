"""Tokenizers of the forms that models have: real ones, trained in a moment on a few lines."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

# Answers over whose border with the prompt pairs merge ("A: " + "Paris", ":" + "\n\n").
LINES = (
    "Q: what is the capital of France? A: Paris is the capital\n\n",
    "### Instruction:\nGreet Paris\n\n### Response:\n\nHello Paris, yes no (hi)::\n",
)
BOS, EOS = "<s>", "</s>"
_SPECIAL = ["<unk>", BOS, EOS, "<|user|>", "<|assistant|>"]


def letters() -> PreTrainedTokenizerFast:
    """Return one with a token a byte, ASCII's numbered as there; it puts nothing around a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ascii_ = {chr(byte): byte for byte in range(33, 127)} | {"Ġ": 32, "Ċ": 10}
    others = iter(sorted(set(range(256)) - set(ascii_.values())))
    vocabulary = {name: ascii_[name] if name in ascii_ else next(others) for name in alphabet}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS, EOS])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS)


def byte_pairs(*, bos: bool) -> PreTrainedTokenizerFast:
    """Return a byte-level one: GPT-2's form, or Llama 3's, which puts BOS before a text.

    Either leaves the blank before a word out of the word's offsets.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    _train(tokenizer, alphabet=pre_tokenizers.ByteLevel.alphabet(), size=330)
    trimming = processors.ByteLevel(trim_offsets=True)
    tokenizer.post_processor = (
        processors.Sequence([trimming, _around(f"{BOS} $A")]) if bos else trimming
    )
    return _fast(tokenizer)


def sentence_pieces(*, eos: bool) -> PreTrainedTokenizerFast:
    """Return one that writes blanks as ▁ and puts one and BOS before a text: Llama 2's form.

    `eos`: it puts EOS after a text as well.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    # SentencePiece learns no pair over a blank; what uses it cuts nowhere.
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    _train(tokenizer)
    tokenizer.pre_tokenizer = None
    tokenizer.post_processor = _around(f"{BOS} $A {EOS}" if eos else f"{BOS} $A")
    return _fast(tokenizer)


def _train(tokenizer: Tokenizer, *, alphabet: Sequence[str] = (), size: int = 120) -> None:
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=_SPECIAL,
        show_progress=False,
        initial_alphabet=list(alphabet),
    )
    tokenizer.train_from_iterator(LINES * 9, trainer)


def _around(single: str) -> processors.TemplateProcessing:
    numbers = [(name, _SPECIAL.index(name)) for name in (BOS, EOS) if name in single]
    return processors.TemplateProcessing(single=single, special_tokens=numbers)


def _fast(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, unk_token="<unk>"
    )
