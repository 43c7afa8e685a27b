"""Kernels for one device, each with a PyTorch reference."""
