"""A GPU: Triton, the captured graph."""
