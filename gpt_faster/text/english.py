"""English text that every Python has: for timing, calibrating and measuring.

    ids = tokenizer.encode(english_text())
"""

import pydoc_data.topics


def english_text(held_out: bool = False) -> str:
    """Text that every machine has: Python's own documentation. held_out: its last fifth, which
    perplexity is measured on; else the rest, which quantization is calibrated on."""
    text = "\n".join(pydoc_data.topics.topics.values())
    cut = len(text) * 4 // 5
    return text[cut:] if held_out else text[:cut]
