"""English text for benchmarks, calibration and perplexity, without downloads.

    ids = tokenizer.encode(english_text())
"""

import pydoc_data.topics


def english_text(held_out: bool = False) -> str:
    """Python's own documentation. held_out: its last fifth, for perplexity; else the rest, for
    calibration."""
    text = "\n".join(pydoc_data.topics.topics.values())
    cut = len(text) * 4 // 5
    return text[cut:] if held_out else text[:cut]
