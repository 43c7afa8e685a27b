#!/usr/bin/env bash
# Run tests with the C++ kernels as on a 64-bit ARM CPU: cross-compiled, and run by qemu, while Python and
# torch run on this CPU. Says whether the kernels are right there; qemu's speed says nothing of an ARM CPU's.
#   bash scripts/dev/arm64.sh --all --kernels tests/test_cpu_ops.py        # arguments of pytest
#   ARM64=armv8-a bash scripts/dev/arm64.sh …                 # of a CPU without dot products
# Needs gcc and, of Debian: apt-get install clang-19 g++-aarch64-linux-gnu qemu-user
# Each process's memory is one mapping that qemu shares at the same addresses (scripts/dev/arm64/arena.c), so
# the structs' pointers hold there; a call of the library becomes a request (library.c, server.cpp).
set -euo pipefail
cd "$(dirname "$0")/../.."
parts=$PWD/scripts/dev/arm64
version=$(cat "$parts"/* scripts/dev/arm64.sh | sha256sum | head -c 12)    # a library's name depends on its compiler's
home=$PWD/.cache/arm64/${ARM64:-native}-$version

die() { printf '%s\n' "error: $*" >&2; exit 2; }

for tool in gcc qemu-aarch64 clang++-19 aarch64-linux-gnu-g++; do
  command -v $tool > /dev/null || die "no $tool: apt-get install clang-19 g++-aarch64-linux-gnu qemu-user"
done
[ -x .venv/bin/python ] || die "no .venv: bash scripts/setup.sh requirements-dev.txt"
mkdir -p "$home"
gcc -O2 -fno-builtin -shared -fPIC -o "$home/arena.so" "$parts/arena.c"

# What native.py takes for the compiler: clang for ARM, without OpenMP as Apple's. "native" is the CPU that is
# asked for. A library becomes one that contains a program for ARM.
cat > "$home/clang++" <<END
#!/usr/bin/env bash
set -euo pipefail
unset LD_PRELOAD
[[ " \$* " == *" -fopenmp "* ]] && exit 1
options=() out= source=
while [ \$# -gt 0 ]; do
  case \$1 in
    -o) out=\$2; shift ;;
    -shared | -fPIC) ;;
    -march=native) options+=("-march=\${ARM64:-armv8.2-a+dotprod+i8mm+bf16}") ;;
    *.cpp) source=\$1 ;;
    *) options+=("\$1") ;;
  esac
  shift
done
arm() { clang++-19 --target=aarch64-linux-gnu "\${options[@]}" "\$@"; }
[ -n "\$source" ] || { arm; exit; }
arm -static -pthread -I "\$(dirname "\$source")" -I "$parts" "-DKERNELS=\"\$source\"" -o "\$out.arm64" "$parts/server.cpp"
gcc -O2 -shared -fPIC "-DPROGRAM=\"\$out.arm64\"" -o "\$out" "$parts/library.c"
rm "\$out.arm64"
END
chmod +x "$home/clang++"
export CXX=$home/clang++ GPT_FASTER_CACHE=$home PYTHONMALLOC=malloc LD_PRELOAD=$home/arena.so
exec .venv/bin/python -m pytest --timeout 3000 "$@"
