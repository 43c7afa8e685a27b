"""GPU: Triton kernels, CUDA graphs."""
