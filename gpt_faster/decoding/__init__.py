"""Decoding beyond the core's loop: engines, slots, requests' samplers, grammars, drafts."""
