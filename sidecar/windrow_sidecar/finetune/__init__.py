"""LoRA finetuning as a stream of tasklets."""
