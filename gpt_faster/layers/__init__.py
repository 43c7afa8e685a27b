"""Layers that a Llama does not have."""
