"""Perplexity of a text, and lm-eval's tasks: gpt_faster/cli/evaluate.py.

    python eval.py -m org/name --perplexity wiki.txt
    python eval.py -m org/name --compile --tasks hellaswag winogrande
"""

import sys

if __name__ == "__main__":
    from gpt_faster.cli.fast_start import need_torch
    need_torch()
    from gpt_faster.cli.evaluate import main
    sys.exit(main())
