"""Builds the hollow GPU: three small libraries in place of CUDA's, made by gcc where they lack.

    environment(75)                                # what a process needs to believe in a T4
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHE = HERE.parent.parent / ".cache/hollow"


class Missing(Exception):
    """What it is built of."""


def environment(sm: int) -> dict[str, str]:
    """os.environ and what makes a process see one GPU of this compute capability, times ten.

    Everything that Inductor could keep on disk is off: what is compiled here is for no GPU.
    """
    folder = build()
    libraries = [str(folder), os.environ.get("LD_LIBRARY_PATH", "")]
    preload = [str(folder / "libruntime.so"), str(folder / "libblas.so")]
    return os.environ | {
        "HOLLOW_SM": str(sm), "LD_LIBRARY_PATH": ":".join(filter(None, libraries)),
        "LD_PRELOAD": " ".join(preload), "CUDA_MODULE_LOADING": "LAZY",
        "TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}


def build() -> Path:
    """The folder with libruntime.so, libblas.so and libcuda.so.1, for this torch."""
    site = Path(subprocess.run([sys.executable, "-c", "import torch; print(torch.__path__[0])"],
                               capture_output=True, text=True, check=True).stdout.strip())
    headers = next(site.parent.glob("triton/backends/*/include/cuda_runtime_api.h"), None)
    if headers is None:
        raise Missing("this Python has no CUDA wheel of torch: run bash scripts/dev/gpu_dryrun.sh")
    for tool in ("gcc", "nm"):
        if shutil.which(tool) is None:
            raise Missing(f"no {tool}: install a C compiler, as apt-get install gcc does")
    sources = {name: (HERE / name).read_text() for name in ("runtime.c", "driver.c", "blas.c")}
    sources["blas.c"] += missing_from(sources["blas.c"], site / "lib/libtorch_cuda.so")
    key = hashlib.sha256("".join([str(site), *sources.values()]).encode()).hexdigest()[:16]
    folder = CACHE / key
    if folder.exists():
        return folder
    partial = folder.with_suffix(".partial")
    partial.mkdir(parents=True, exist_ok=True)
    for name, library in zip(sources, ("libruntime.so", "libcuda.so.1", "libblas.so")):
        (partial / name).write_text(sources[name])
        subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-O1", "-I", headers.parent,
                        partial / name, "-o", partial / library], check=True)
    partial.rename(folder)
    return folder


def missing_from(source: str, library: Path) -> str:
    """C for each cuBLAS function that the library links with and the source lacks."""
    lines = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True,
                           text=True, check=True).stdout.splitlines()
    names = {line.split()[-1].split("@")[0] for line in lines}
    names = sorted(n for n in names if n.startswith("cublas") and f" {n}(" not in source)
    return "\n" + "\n".join(f"int {name}() {{ return 0; }}" for name in names)
