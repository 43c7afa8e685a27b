#!/usr/bin/env bash
# Run the tests of the CPU kernels with GCC's sanitizers: address and undefined behaviour, then thread.
# Stops at the first error. Other arguments go to pytest:
#   bash scripts/dev/sanitize.sh                       # both
#   bash scripts/dev/sanitize.sh thread -k attention   # one of them
#
# A wrapper script in .cache/sanitize adds the compiler options. For thread, sanitize_threads.cpp replaces
# OpenMP's runtime, whose synchronization the sanitizer cannot see.
set -euo pipefail
cd "$(dirname "$0")/../.."

die() { printf 'error: %s\n' "$*" >&2; exit 2; }

kinds=(address thread)
case ${1:-} in address | thread | -* | "") ;; *) die "unknown sanitizer $1: expected address or thread" ;; esac
command -v g++ > /dev/null || die "no g++: apt-get install g++"
[ -x .venv/bin/pytest ] || die "no pytest in .venv: bash scripts/setup.sh requirements-dev.txt"
if [[ ${1:-} == address || ${1:-} == thread ]]; then kinds=("$1"); shift; fi
tests=(tests/test_cpu_ops.py tests/test_cpu_cache.py tests/test_delta.py tests/test_short_conv.py tests/test_latent.py)
here=$PWD/.cache/sanitize
export OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive GPT_FASTER_CACHE=$here
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
export TSAN_OPTIONS=ignore_noninstrumented_modules=1:halt_on_error=1

# Tests start the compiler, which must run without LD_PRELOAD.
start='import os, sys, pytest; del os.environ["LD_PRELOAD"]; sys.exit(pytest.main(sys.argv[1:]))'

for kind in "${kinds[@]}"; do
  options="-fsanitize=address,undefined -fno-sanitize-recover=all"
  run=(env "LD_PRELOAD=$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libstdc++.so)")
  if [[ $kind == thread ]]; then
    options="-fsanitize=thread -Wl,-Bsymbolic $PWD/scripts/dev/sanitize_threads.cpp"
    run=(setarch -R env "LD_PRELOAD=$(g++ -print-file-name=libtsan.so)")    # no ASLR, for TSan
  fi
  mkdir -p "$here/$kind"
  chmod 700 "$here"
  printf '#!/bin/sh\nexec g++ -g %s "$@"\n' "$options" > "$here/$kind/g++"
  chmod 700 "$here/$kind/g++"
  echo "== $kind" >&2
  CXX=$here/$kind/g++ "${run[@]}" .venv/bin/python -c "$start" --all -s -p no:cacheprovider -p no:xdist \
    "${tests[@]}" "$@"
done
