"""Checkpoint formats: readers, per-family names and configs, quantized weights, LoRA."""
