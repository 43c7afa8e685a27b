#!/usr/bin/env bash
# Runs the tests of the C++ operations with GCC's sanitizers: addresses and undefined behaviour, then
# threads. The first fault ends the run, with where it is. Other arguments go to pytest:
#   bash scripts/dev/sanitize.sh                       # both
#   bash scripts/dev/sanitize.sh thread -k attention   # or one
#
# Each has a compiler of its own in .cache/sanitize, a script that adds its options. For threads the
# library brings sanitize_threads.cpp in place of OpenMP's, whose waiting the sanitizer cannot see.
set -euo pipefail
cd "$(dirname "$0")/../.."

die() { printf 'error: %s\n' "$*" >&2; exit 2; }

kinds=(address thread)
case ${1:-} in address | thread | -* | "") ;; *) die "no sanitizer $1: address, thread" ;; esac
command -v g++ > /dev/null || die "no g++: apt-get install g++"
[ -x .venv/bin/pytest ] || die "no pytest in .venv: bash scripts/setup.sh requirements-dev.txt"
if [[ ${1:-} == address || ${1:-} == thread ]]; then kinds=("$1"); shift; fi
tests=(tests/test_cpu_ops.py tests/test_delta.py tests/test_short_conv.py tests/test_latent.py)
here=$PWD/.cache/sanitize
export OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive GPT_FASTER_CACHE=$here
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
export TSAN_OPTIONS=ignore_noninstrumented_modules=1:halt_on_error=1

# The compiler, which a test starts, runs without what this process was started with.
start='import os, sys, pytest; del os.environ["LD_PRELOAD"]; sys.exit(pytest.main(sys.argv[1:]))'

for kind in "${kinds[@]}"; do
  options="-fsanitize=address,undefined -fno-sanitize-recover=all"
  run=(env "LD_PRELOAD=$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libstdc++.so)")
  if [[ $kind == thread ]]; then
    options="-fsanitize=thread -Wl,-Bsymbolic $PWD/scripts/dev/sanitize_threads.cpp"
    run=(setarch -R env "LD_PRELOAD=$(g++ -print-file-name=libtsan.so)")    # at addresses that it knows
  fi
  mkdir -p "$here/$kind"
  chmod 700 "$here"
  printf '#!/bin/sh\nexec g++ -g %s "$@"\n' "$options" > "$here/$kind/g++"
  chmod 700 "$here/$kind/g++"
  echo "== $kind" >&2
  CXX=$here/$kind/g++ "${run[@]}" .venv/bin/python -c "$start" --all -s -p no:cacheprovider -p no:xdist \
    "${tests[@]}" "$@"
done
