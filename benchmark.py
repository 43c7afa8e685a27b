"""Benchmark the engines and other programs (peers): gpt_faster/bench/.

    python benchmark.py -m org/name -p 512 -n 200 --engines kv_cache,compile,int8 --peers llama.cpp
"""

import sys

if __name__ == "__main__":
    from gpt_faster.cli.fast_start import need_torch
    need_torch()
    from gpt_faster.bench.main import main
    sys.exit(main())
