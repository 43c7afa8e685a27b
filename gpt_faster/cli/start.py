"""What generate.py and quantize.py do where this room is beside them: the whole commands."""

from gpt_faster.cli.fast_start import import_torch, need_torch


def generate() -> int:
    """generate.py -> its exit status."""
    import_torch()
    from gpt_faster.cli.session import main
    return main()


def quantize() -> int:
    """quantize.py -> its exit status."""
    need_torch()
    from gpt_faster.cli.quantizing import main
    return main()
