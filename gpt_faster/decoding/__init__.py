"""Decoding beyond the core's loop: engines, the scheduler, request samplers, grammars, drafters."""
