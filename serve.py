"""Serve a model over an OpenAI-compatible HTTP API: gpt_faster/server/.

    python serve.py --compile --checkpoint_path org/name --port 8000
"""

import sys

if __name__ == "__main__":
    from gpt_faster.cli.fast_start import need_torch, quiet_interrupt
    need_torch()
    with quiet_interrupt():
        from gpt_faster.server.main import main
    sys.exit(main())
