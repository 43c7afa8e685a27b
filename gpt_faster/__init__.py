"""What is added to the core: layers, files, kernels, the whole commands, a server."""
