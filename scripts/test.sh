#!/usr/bin/env bash
# Installs what the tests need into .venv and runs the quick tier, or with --all everything. Other
# arguments go to pytest:
#   bash scripts/test.sh
#   bash scripts/test.sh --all -k sampling
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh requirements-dev.txt gemma
.venv/bin/ruff check .
.venv/bin/python -m pytest "$@"
