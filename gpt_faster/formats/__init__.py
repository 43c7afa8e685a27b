"""Checkpoints of others: files, families' names and configs, quantized weights, LoRA."""
