#!/usr/bin/env bash
# Installs what the tests need into .venv and runs them. Arguments go to pytest:
#   bash scripts/test.sh -k sampling
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh requirements-dev.txt gemma
.venv/bin/ruff check .
.venv/bin/python -m pytest "$@"
