"""Additions to the core: layers, file formats, fast kernels, the full commands, a server."""
