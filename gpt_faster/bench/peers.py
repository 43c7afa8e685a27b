"""Start the programs that benchmark.py compares with, each in a process, and talk to them.

The process is worker.py, which documents the protocol, or our own generate.py.

    answer = Peer("llama.cpp", path, threads=2, device="cpu", dtype="bfloat16", length=512)(ids, 64)
"""

import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from generate import log
from gpt_faster.bench import exports
from gpt_faster.bench.machine import ROOT
from gpt_faster.bench.weights import Weights
from gpt_faster.bench.worker import split_cache_types
from quantize import scheme_named

WORKER = Path(__file__).with_name("worker.py")
EXPORTS = ROOT / "checkpoints/twins"               # exported models
GGUF_FORMATS = {"none": "BF16", "int8": "Q8_0", "int4-g32": "Q4_0"}       # the closest format


def environment(name: str) -> Path:
    """The peer's virtual environment (scripts/install_peers.sh), else ours."""
    for directory in (f".venv-peers-{name.partition('-')[0]}", ".venv-peers"):
        path = WORKER.parents[2] / directory
        if (path / "bin/python").exists():
            return path
    return Path(sys.prefix)


class Peer:
    """A running worker process with the model loaded. ValueError, in one line, if it fails.

    name: as in worker.py; length: prompt plus new tokens; weights: quantization of the model at
    path.
    """

    def __init__(self, name: str, path, *, threads: int, device: str, dtype: str, length: int,
                 weights: str = "none"):
        self.name = name
        self.stderr = tempfile.TemporaryFile("w+", errors="replace")
        # -I: keep files next to the worker from shadowing packages.
        program, _ = split_cache_types(name)
        command = [environment(program) / "bin/python", "-I", WORKER, name, path,
                   "--threads", threads, "--device", device, "--dtype", dtype, "--length", length,
                   "--weights", weights]
        self.process = subprocess.Popen(
            [str(part) for part in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self.stderr, text=True, start_new_session=True,
            env=dict(os.environ, OMP_NUM_THREADS=str(threads), HF_HUB_OFFLINE="1"))
        atexit.register(self.close)
        try:
            ready = self._read_answer()
        except RuntimeError as e:
            self.close()
            raise ValueError(f"peer {e}") from None
        self.version = ready["version"]
        self.load_s = ready["load_s"]

    def _read_answer(self) -> dict:
        line = self.process.stdout.readline()
        if not line:                               # it died: show its last line
            self.close()
            self.stderr.seek(0)
            message = (self.stderr.read().strip().splitlines() or ["no message"])[-1][:200]
            raise RuntimeError(f"{self.name} ended ({self.process.returncode}): {message}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def __call__(self, prompt_ids: list[int], n_new: int, batch: int = 1) -> dict:
        """-> ids, ttft_s, step_s, peak_memory_bytes, as in worker.py. RuntimeError if it fails."""
        return self._request(prompt=list(prompt_ids), n_new=n_new, batch=batch)

    def serve(self, prompts: list[list[int]], n_new: list[int], batch: int) -> dict:
        """-> ids, total_s, request_s, first_s, peak_memory_bytes. RuntimeError if it fails."""
        return self._request(prompts=prompts, n_new=n_new, batch=batch)

    def _request(self, **request) -> dict:
        with suppress(OSError, ValueError):        # a closed pipe: _read_answer() reports it
            print(json.dumps(request), file=self.process.stdin, flush=True)
        return self._read_answer()

    def close(self) -> None:
        """Kill the worker and its children."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        atexit.unregister(self.close)


class GenerateCommand:
    """Runs generate.py in a process per run, to check that its speed agrees with ours."""

    def __init__(self, argv: list[str]):
        self.command = [sys.executable, str(ROOT / "generate.py"), *argv, "--compile", "--json",
                        "--ignore_eos", "--temperature", "0"]

    def __call__(self, prompt_ids: list[int], n_new: int, batch: int) -> dict:
        command = [*self.command, "--prompt", str(len(prompt_ids)), "--max_new_tokens", str(n_new),
                   "--batch_size", str(batch)]
        process = subprocess.run(command, capture_output=True, text=True)
        if process.returncode:
            raise RuntimeError(process.stderr.strip().splitlines()[-1])
        answer = json.loads(process.stdout.splitlines()[0])
        speed = answer["decode_tok_s"]
        return dict(answer, step_s=1 / speed if speed else None, ids=answer["new_ids"])

    def serve(self, *_):
        raise ValueError("takes one prompt at a time")

    def close(self) -> None:
        pass


def peer_starter(name: str, source, shape: str | None, device: torch.device,
                 length: int) -> Callable:
    """-> a function that starts the peer with Weights, or raises ValueError.

    shape: name of the random model that `source` is; None: files.
    """
    def start(weights: Weights) -> Peer | GenerateCommand:
        dtype = str(weights.dtype)[6:]
        if name == "generate.py":
            argv = ["--random", shape] if shape else ["-m", str(source.path)]
            if weights.scheme != "none":
                scheme = scheme_named(weights.scheme)
                argv += ["--quantize", scheme.name.partition("-")[0]]
                if scheme.groupsize:
                    argv += ["--groupsize", str(scheme.groupsize)]
            return GenerateCommand([*argv, "--device", str(device), "--dtype", dtype])
        path = peer_path(split_cache_types(name)[0], source, shape, weights)
        return Peer(name, path, threads=torch.get_num_threads(), device=device.type, dtype=dtype,
                    length=length, weights=weights.quantization)
    return start


def peer_path(name: str, source, shape: str | None, weights: Weights) -> Path:
    """The model in a format that the peer reads, exported if needed. ValueError if impossible."""
    path = source.path
    if "llama.cpp" in name:
        gguf_format = GGUF_FORMATS.get(weights.quantization)
        if not gguf_format or weights.dtype != torch.bfloat16:
            raise ValueError(f"no GGUF format is equivalent to {weights.quantization} weights in "
                             f"{str(weights.dtype)[6:]}")
        export = EXPORTS / f"{export_name(source, shape)}.{gguf_format}.gguf"
        return exports.export_gguf(source, export, gguf_format)
    if shape and name.startswith("transformers"):
        return exports.export_hf_config(source.cfg, EXPORTS / f"{shape}.json")
    if name in CONVERTERS:
        return convert(name, source, shape, weights)
    if name == "vllm":
        return hf_directory(source, shape, weights.dtype)
    if shape:
        raise ValueError("does not support --random")
    if path.suffix in (".safetensors", ".json", ".bin"):
        return path.parent
    if path.suffix != ".gguf" and not path.is_dir():
        raise ValueError("reads Hugging Face directories and GGUF files")
    return path


def export_name(source, shape: str | None) -> str:
    """File name prefix of this model's exports."""
    path = source.path
    return shape or (path.stem if path.suffix == ".gguf" else path.parent.name)


def hf_directory(source, shape: str | None, dtype: torch.dtype) -> Path:
    """The model's Hugging Face directory, exported if needed."""
    if not shape and source.path.suffix in (".safetensors", ".json", ".bin"):
        return source.path.parent
    name = f"{export_name(source, shape)}.{str(dtype)[6:]}.hf"
    return exports.export_hf(source, EXPORTS / name, dtype)


def openvino_command(model: Path, export: Path, kind: str, groupsize: str) -> list:
    """NNCF weight compression without calibration data."""
    options = ["--weight-format", "fp16" if kind == "none" else kind]
    if kind == "int4":
        options += ["--group-size", groupsize, "--ratio", "1.0"]
    return ["-m", "optimum.commands.optimum_cli", "export", "openvino", "--task",
            "text-generation-with-past", "--model", model, *options, export]


def onnxruntime_command(model: Path, export: Path, kind: str, groupsize: str) -> list:
    """Like ours: logits of the last token only; with int4 an int8 head."""
    options = ["prune_lm_head=true"]
    if kind == "int4":
        options += [f"block_size={groupsize}", "algo_config=rtn",
                    "matmul_mixed_precision=last_matmul:int8"]
    return ["-m", "onnxruntime_genai.models.builder", "--execution_provider", "cpu",
            "--precision", "fp32" if kind == "none" else kind, "--input", model,
            "--output", export, "--cache_dir", f"{export}.cache", "--extra_options", *options]


CONVERTERS = {"openvino": openvino_command, "onnxruntime": onnxruntime_command}


def convert(name: str, source, shape: str | None, weights: Weights) -> Path:
    """Convert the model with the peer's converter, unless the directory exists.

    ValueError, with the last line of its stderr, if it fails.
    """
    kind, _, groupsize = weights.quantization.partition("-g")
    if kind not in ("none", "int8", "int4"):
        raise ValueError(f"{name}: no equivalent of {weights.quantization} weights")
    if not environment(name).name.endswith(name):
        raise ValueError(f"{name} is not installed: run scripts/install_peers.sh")
    model = hf_directory(source, shape, weights.dtype)
    export = EXPORTS / f"{model.name.removesuffix('.hf')}.{weights.quantization}.{name}"
    if export.exists():
        return export
    log(f"Converting {model.name} to {export.name}")
    partial = Path(f"{export}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    argv = CONVERTERS[name](model, partial, kind, groupsize)
    process = subprocess.run([environment(name) / "bin/python", *argv], text=True,
                             capture_output=True, env=dict(os.environ, HF_HUB_OFFLINE="1"))
    shutil.rmtree(f"{partial}.cache", ignore_errors=True)
    if process.returncode:
        reason = (process.stderr.strip().splitlines() or ["no message"])[-1][:200]
        raise ValueError(f"{name} cannot convert the model: {reason}")
    os.replace(partial, export)
    return export
