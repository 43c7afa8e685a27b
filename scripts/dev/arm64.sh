#!/usr/bin/env bash
# Run tests as on a 64-bit ARM CPU: the C++ is cross-compiled, Python and torch run under qemu's user
# mode. Says whether results are right there; qemu's speed says nothing of an ARM CPU's.
#   bash scripts/dev/arm64.sh tests/test_cpu_ops.py -q        # arguments of pytest
#   ARM64=armv8-a bash scripts/dev/arm64.sh …                 # of a CPU without dot products
# Needs Debian as root (apt-get install clang-19 g++-aarch64-linux-gnu qemu-user) and PyPI; the environment,
# 1.5 GB, stays in .venv-arm64. Its torch is 2.10: later ones for ARM need CUDA's libraries.
set -euo pipefail
cd "$(dirname "$0")/../.."
home=$PWD/.venv-arm64
torch=2.10.0
debian="libc6 libgcc-s1 libstdc++6 libgomp1 libexpat1 zlib1g libssl3 libffi8 libbz2-1.0 liblzma5 libsqlite3-0
  libuuid1 libcrypt1 libncursesw6 libtinfo6 libreadline8 python3.11 python3.11-minimal libpython3.11-minimal
  libpython3.11-stdlib"

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 2; }

for tool in qemu-aarch64 clang++-19 aarch64-linux-gnu-g++; do
  command -v $tool > /dev/null || die "no $tool: apt-get install clang-19 g++-aarch64-linux-gnu qemu-user"
done
[ -x .venv/bin/python ] || die "no .venv: bash scripts/setup.sh requirements-dev.txt"

# The packages of Debian and PyPI are unpacked, not installed: nothing of the host changes.
if [ ! -e "$home/complete" ]; then
  say "Creating $home (5 minutes)"
  rm -rf "$home"/*
  mkdir -p "$home"/{bin,debian,site,debs,wheels}
  dpkg --print-foreign-architectures | grep -q arm64 || { dpkg --add-architecture arm64; apt-get update -qq; }
  (cd "$home/debs" && apt-get download -qq $(printf '%s:arm64 ' $debian)) 2> /dev/null \
    || die "apt-get could not download the packages of arm64"
  for file in "$home"/debs/*.deb; do dpkg -x "$file" "$home/debian"; done
  # pip resolves for another platform from wheels alone.
  pip() { .venv/bin/python -m pip download --quiet --disable-pip-version-check -d "$home/wheels" \
    --only-binary=:all: --python-version 3.11 --implementation cp --abi cp311 --abi abi3 --abi none \
    --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 "$@"; }
  pip --no-deps torch==$torch
  pip numpy filelock typing-extensions sympy networkx jinja2 fsspec pytest-timeout hypothesis jsonschema \
    $(grep -hE '^(safetensors|tokenizers|sentencepiece|huggingface_hub|gguf|transformers|pytest)==' requirements*.txt)
  for file in "$home"/wheels/*.whl; do .venv/bin/python -m zipfile -e "$file" "$home/site"; done
  rm -rf "$home/debs" "$home/wheels"
  cat > "$home/bin/python" <<END
#!/bin/sh
PYTHONPATH=$home/site exec qemu-aarch64 -L $home/debian $home/debian/usr/bin/python3.11 "\$@"
END
  chmod +x "$home/bin/python"
  # A child process is an emulated Python too.
  echo "import sys; sys.executable = '$home/bin/python'" > "$home/site/sitecustomize.py"
  touch "$home/complete"
fi

# clang for ARM, without OpenMP as Apple's. "native" is the CPU that is asked for.
cat > "$home/bin/clang++" <<'END'
#!/bin/bash
[[ " $* " == *" -fopenmp "* ]] && exit 1
exec clang++-19 --target=aarch64-linux-gnu "${@/-march=native/-march=${ARM64:-armv8.2-a+dotprod+i8mm+bf16}}"
END
chmod +x "$home/bin/clang++"
export CXX=$home/bin/clang++ GPT_FASTER_CACHE=$home/cache/${ARM64:-native} OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive PYTHONDONTWRITEBYTECODE=1
exec "$home/bin/python" -m pytest --timeout 3000 "$@"
