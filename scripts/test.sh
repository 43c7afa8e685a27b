#!/usr/bin/env bash
# Installs what the tests need into .venv and runs the quick tier, or with --all everything, after a scan
# for known vulnerabilities. Other arguments go to pytest:
#   bash scripts/test.sh
#   bash scripts/test.sh --all -k sampling
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh requirements-dev.txt gemma
.venv/bin/ruff check .
if [[ " $* " == *" --all "* ]]; then .venv/bin/python scripts/audit.py; fi
export OMP_NUM_THREADS=1                         # two processes of one thread each: tiny models want no more
export OMP_WAIT_POLICY=passive                   # those that do have two wait for each other asleep
.venv/bin/python -m pytest -n 2 --dist worksteal "$@"
