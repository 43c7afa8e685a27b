#!/usr/bin/env bash
# Create the environment, download the default model, generate text. Arguments go to generate.py.
#   bash scripts/quickstart.sh --prompt "The capital of France is"
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
bash "$here/scripts/setup.sh" requirements.txt
if [ $# -eq 0 ]; then set -- --prompt "Once upon a time, in a small village by the sea,"; fi
"$here/.venv/bin/python" "$here/generate.py" --compile "$@"
echo "Next: source .venv/bin/activate; python generate.py --compile --prompt \"…\"" >&2
