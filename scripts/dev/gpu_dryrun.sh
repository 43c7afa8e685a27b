#!/usr/bin/env bash
# Run scripts/dev/gpu_dryrun.py (the CUDA path without a GPU) in a separate environment with torch's CUDA
# wheel (4.8 GB). Needs gcc and nm, no GPU:
#   bash scripts/dev/gpu_dryrun.sh [--only steps --sm 90]
set -euo pipefail
cd "$(dirname "$0")/../.."
python=.venv-cuda/bin/python
if [ ! -f .venv-cuda/complete ]; then
  echo "Creating .venv-cuda with torch's CUDA wheel" >&2
  python3 -m venv .venv-cuda
  version=$(sed -n 's/^torch==//p' requirements.txt)
  "$python" -m pip install --quiet --disable-pip-version-check "torch===$version" \
    $(grep -v '^torch==' requirements.txt)
  touch .venv-cuda/complete
fi
exec "$python" -W ignore scripts/dev/gpu_dryrun.py "$@"
