"""Time the engines beside each other and beside peers: the command; the room is bench/.

    python benchmark.py -m org/name -p 512 -n 200 --engines kv_cache,compile,int8 --peers llama.cpp
"""

import sys

if __name__ == "__main__":
    from kernels.quick_import import need_torch
    need_torch()
    from bench.main import main
    sys.exit(main())
