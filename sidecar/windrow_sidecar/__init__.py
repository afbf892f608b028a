"""One GPU: its memory, its compute, the latency of decode, and the finetune worker beside it."""
