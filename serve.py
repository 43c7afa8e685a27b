"""Serve a model as OpenAI's API has it: the command; the room is server/.

    python serve.py --compile --checkpoint_path org/name --port 8000
"""

import sys

if __name__ == "__main__":
    from kernels.quick_import import need_torch
    need_torch()
    from server.main import main
    sys.exit(main())
