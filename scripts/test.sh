#!/usr/bin/env bash
# Installs what the tests need into .venv and runs a tier of them (tests/tiers.py says which tests that
# is). Other arguments go to pytest:
#   bash scripts/test.sh                  # the quick tier: 3 minutes on 2 cores
#   bash scripts/test.sh --all            # and slow tests until 15 minutes are over
#   bash scripts/test.sh --exhaustive     # everything, in shards
#   bash scripts/test.sh --all -k sampling
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh requirements-dev.txt gemma
.venv/bin/ruff check .
if [[ " $* " == *" --all "* ]]; then .venv/bin/python scripts/dev/audit.py; fi
export OMP_NUM_THREADS=1                         # two processes of one thread each: tiny models want no more
export OMP_WAIT_POLICY=passive                   # those that do have two wait for each other asleep
exec .venv/bin/python tests/tiers.py "$@"
