#!/usr/bin/env bash
# Install the test dependencies into .venv and run a tier of tests (see tests/tiers.py). Other arguments
# go to pytest:
#   bash scripts/test.sh                  # the quick tier: 4 to 5 minutes on 2 cores
#   bash scripts/test.sh --all            # plus slow tests, up to 15 minutes
#   bash scripts/test.sh --exhaustive     # everything, in shards
#   bash scripts/test.sh --all -k sampling
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh requirements-dev.txt gemma
.venv/bin/ruff check .
if [[ " $* " == *" --all "* ]]; then .venv/bin/python scripts/dev/audit.py; fi
export OMP_NUM_THREADS=1                         # two processes with one thread each: models are tiny
export OMP_WAIT_POLICY=passive                   # threads of multi-threaded tests sleep while waiting
exec .venv/bin/python tests/tiers.py "$@"
