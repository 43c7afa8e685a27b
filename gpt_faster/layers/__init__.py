"""Layers that a Llama does not have: attention variants, recurrent mixers, norms, experts."""
