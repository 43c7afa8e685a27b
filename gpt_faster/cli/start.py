"""Entry points that generate.py and quantize.py call when the gpt_faster package is present."""

from gpt_faster.cli.fast_start import import_torch, need_torch


def generate() -> int:
    """Run generate.py's command -> exit status."""
    import_torch()
    from gpt_faster.cli.session import main
    return main()


def quantize() -> int:
    """Run quantize.py's command -> exit status."""
    need_torch()
    from gpt_faster.cli.quantizing import main
    return main()
