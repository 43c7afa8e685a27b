"""A worker process of benchmark.py that runs another program (a peer) on the same model.

The Python of the peer's environment (scripts/install_peers.sh) runs it by path, so it imports only
the standard library at the top, and none of our files.

    python -I bench/worker.py llama.cpp model.gguf --threads 2 --device cpu --length 512

llama.cpp@q8_0 and llama.cpp@q8_0/q4_0 (keys/values) set the types of its KV cache.

It reads and writes JSON lines. First {"ready": true, "version": …, "load_s": …}, where version
includes the precision; then for each {"prompt": [ids], "n_new": N, "batch": B} (B equal rows,
greedy, EOS ignored):

    {"ids": the first row's N, "ttft_s": from the call to the first token,
     "step_s": mean of the later ones, null if N is 1, "peak_memory_bytes": …}

or for {"prompts": [[ids], …], "n_new": [N, …], "batch": B}, B at a time, with its own batching:

    {"ids": [each one's N], "total_s": …, "request_s": [of each],
     "first_s": [to the first token of each] or null, "peak_memory_bytes": …}

or {"error": "one line"}. It ends when its stdin does.
"""

import argparse
import atexit
import json
import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path


class Transformers:
    """transformers' generate(), eager, with default settings."""

    def __init__(self, args):
        import torch
        import transformers
        torch.set_num_threads(args.threads)
        self.torch = torch
        self.generate_options = {}
        self.compiled_shape = None
        self.model = self._load(transformers, args.path, getattr(torch, args.dtype), args.device)
        self.model.generation_config = transformers.GenerationConfig()   # no EOS, no penalties
        self.version = (f"transformers {transformers.__version__}, torch {torch.__version__}: "
                        f"{args.dtype} weights, activations and KV cache")

    def _load(self, transformers, path, dtype, device):
        auto = transformers.AutoModelForCausalLM
        if path.suffix == ".json":                 # config only: random weights
            config = transformers.LlamaConfig.from_json_file(path)
            with self.torch.device(device):
                model = auto.from_config(config, dtype=dtype)
        elif path.suffix == ".gguf":               # dequantized, like ours
            model = auto.from_pretrained(
                path.parent, dtype=dtype, gguf_file=path.name,
                quantization_config=transformers.GgufConfig(dequantize=True))
        else:
            model = auto.from_pretrained(path, dtype=dtype)
        return model.to(device).eval()

    def __call__(self, prompt, n_new, batch):
        times = []

        class Clock:                               # generate() calls it for prompt and tokens
            def put(self, value):
                times.append(time.perf_counter())

            def end(self):
                pass

        shape = (len(prompt), n_new, batch)
        tokens = self.torch.tensor([prompt] * batch, device=self.model.device)
        n_runs = 1
        if self.generate_options and self.compiled_shape != shape:
            n_runs = 3                             # compile, record, measure
        for _ in range(n_runs):
            times.clear()
            start = time.perf_counter()
            out = self.model.generate(
                tokens, attention_mask=self.torch.ones_like(tokens), max_new_tokens=n_new,
                do_sample=False, pad_token_id=0, streamer=Clock(), **self.generate_options)
        self.compiled_shape = shape
        first, last = times[1], times[-1]
        return dict(ids=out[0, len(prompt):].tolist(), ttft_s=first - start,
                    step_s=(last - first) / (n_new - 1) if n_new > 1 else None)

    def serve(self, prompts, n_new, batch):
        """As in its documentation: left-padded batches, each until its longest answer ends."""
        ids = []
        request_s = []
        begin = time.perf_counter()
        for i in range(0, len(prompts), batch):
            start = time.perf_counter()
            ids += self._generate_padded(prompts[i:i + batch], n_new[i:i + batch])
            seconds = time.perf_counter() - start
            request_s += [seconds] * len(prompts[i:i + batch])
        return dict(ids=ids, total_s=time.perf_counter() - begin, request_s=request_s, first_s=None)

    def _generate_padded(self, prompts, n_new):
        """-> the requested number of new tokens per row."""
        width = max(map(len, prompts))
        padding = [[0] * (width - len(prompt)) for prompt in prompts]
        tokens = self.torch.tensor([pad + prompt for pad, prompt in zip(padding, prompts)])
        mask = self.torch.tensor([pad + [1] * len(prompt) for pad, prompt in zip(padding, prompts)])
        out = self.model.generate(
            tokens.to(self.model.device), attention_mask=mask.to(self.model.device),
            max_new_tokens=max(n_new), do_sample=False, pad_token_id=0, **self.generate_options)
        return [row[:n] for row, n in zip(out[:, width:].tolist(), n_new)]


class CompiledTransformers(Transformers):
    """With a static cache, for which generate() compiles the decode step.

    On a CPU this needs the switch that transformers' tests use.
    """

    def __init__(self, args):
        super().__init__(args)
        from transformers import CompileConfig
        config = CompileConfig()
        config._compile_all_devices = True
        self.generate_options = dict(cache_implementation="static", compile_config=config)


class LlamaCpp:
    """llama-server, built for this CPU, timed by its own clock.

    prompt_ms ends with the first token; predicted_ms covers the n_new - 1 steps after it (0.001 for
    one token). A batch uses as many slots; changing the number restarts the server.
    """

    COMPUTES = {"none": "BF16 weights, activations rounded to bfloat16 for their products",
                "int8": "Q8_0 weights, activations quantized to 8 bits in blocks of 32",
                "int4-g32": "Q4_0 weights, activations quantized to 8 bits in blocks of 32"}
    NAME = "llama.cpp"
    OPTIONS = ("--no-kv-unified", "--cache-ram", 0, "--fit", "off",
               "--load-mode", "none")              # none: no page faults
    CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")

    def __init__(self, args):
        if args.device == "cuda":
            raise ValueError("scripts/install_peers.sh builds it for the CPU only")
        self.args = args
        self.binary = Path(sys.prefix, "bin/llama-server")
        if not self.binary.exists():
            raise ImportError("no llama-server")
        self.log = tempfile.TemporaryFile("w+", errors="replace")
        self.process = None
        self._start(1)
        package = Path(sys.prefix, f"built-{self.NAME}").read_text().splitlines()[0]
        self.version = (f"{self.NAME} of {package} ({self._features()}): "
                        f"{self.COMPUTES[args.weights]}, {self._cache()} KV cache")

    def _cache(self):
        """Describe the precision of the KV cache."""
        keys, values = self.args.cache_types
        if keys != values:
            return f"{keys} (keys) and {values} (values)"
        return "float16" if keys == "f16" else keys

    def _features(self):
        """The instructions that it was built for, as it prints them."""
        command = self.binary, "--verbosity", "4", "--model", os.devnull, "--port", "0"
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True,
                                stderr=subprocess.STDOUT).stdout
        return " ".join(re.findall(r"(\w+) = 1", output))

    def _start(self, n_slots):
        """(Re)start the server with n_slots slots of args.length positions each."""
        if self.process:
            self.process.kill()
            self.process.wait()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [
            self.binary, "--model", self.args.path, "--host", "127.0.0.1", "--port", port,
            "--threads", self.args.threads, "--threads-batch", self.args.threads,
            "--parallel", n_slots, "--ctx-size", self.args.length * n_slots, *self.OPTIONS]
        keys, values = self.args.cache_types
        if (keys, values) != DEFAULT_CACHE_TYPES:  # quantized values need its flash attention
            command += ["--cache-type-k", keys, "--cache-type-v", values, "--flash-attn", "on"]
        self.process = subprocess.Popen([str(part) for part in command], stdout=self.log,
                                        stderr=subprocess.STDOUT)
        atexit.register(self.process.kill)
        self.n_slots = n_slots
        self.address = f"http://127.0.0.1:{port}"
        while not self._is_ready():
            if self.process.poll() is not None:
                self.log.seek(0)
                errors = re.findall(r" E (.*)", self.log.read())
                raise ValueError(errors[0] if errors else "llama-server ended")
            time.sleep(0.05)

    def _is_ready(self):
        with suppress(OSError):                    # not listening yet, or 503 while it loads
            return self._open("/health").status == 200
        return False

    def _open(self, path, body=None):
        request = urllib.request.Request(
            self.address + path, json.dumps(body).encode() if body else None,
            {"Content-Type": "application/json"})
        return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request)

    def _complete(self, prompt, n_new):
        """-> ids, seconds to the first token and after it (server clock), total seconds (ours)."""
        start = time.perf_counter()
        with self._open("/completion", dict(
                prompt=prompt, n_predict=n_new, temperature=0, top_k=1, samplers=["top_k"],
                ignore_eos=True, cache_prompt=False, return_tokens=True)) as response:
            out = json.load(response)
        seconds = time.perf_counter() - start
        timings = out["timings"]
        if timings["predicted_n"] != n_new or timings["prompt_n"] != len(prompt):
            raise ValueError(f"{timings['prompt_n']} + {timings['predicted_n']} tokens instead of "
                             f"{len(prompt)} + {n_new}: is --length too small?")
        decode_s = timings["predicted_ms"] / 1e3
        return out.get("tokens", []), timings["prompt_ms"] / 1e3, decode_s, seconds

    def __call__(self, prompt, n_new, batch):
        if batch > 1:
            raise ValueError("batch 1 only")
        if self.n_slots != 1:
            self._start(1)
        ids, ttft_s, decode_s, _ = self._complete(prompt, n_new)
        return dict(ids=ids, ttft_s=ttft_s, step_s=decode_s / (n_new - 1) if n_new > 1 else None)

    def serve(self, prompts, n_new, batch):
        """The server schedules its slots; requests wait here for a free one."""
        if self.n_slots != batch:
            self._start(batch)
        begin = time.perf_counter()
        with ThreadPoolExecutor(batch) as pool:
            answers = list(pool.map(self._complete, prompts, n_new))
        total_s = time.perf_counter() - begin
        return dict(ids=[ids for ids, *_ in answers], total_s=total_s,
                    request_s=[seconds for *_, seconds in answers],
                    first_s=[seconds - decode_s for *_, decode_s, seconds in answers])

    def peak_bytes(self):
        """Peak memory of the server process."""
        return resident_peak(self.process.pid)


class IkLlamaCpp(LlamaCpp):
    """ik_llama.cpp's server, which does not tell the ids of its tokens."""

    NAME = "ik_llama.cpp"
    OPTIONS = "--cache-ram", 0, "--no-mmap", "--log-disable"   # it would write ./llama.log


class RepackedIkLlamaCpp(IkLlamaCpp):
    """The same with its weights rearranged for this CPU when they are loaded."""

    OPTIONS = *IkLlamaCpp.OPTIONS, "--run-time-repack"


class StepEngine:
    """Base class for engines with continuous batching.

    Subclasses implement add(i, prompt, n_new), step() -> {i: new ids}, and is_busy().
    """

    def __call__(self, prompt, n_new, batch):
        ids, starts, first, end = self._run([prompt] * batch, [n_new] * batch, batch)
        step_s = (max(end) - max(first)) / (n_new - 1) if n_new > 1 else None
        return dict(ids=ids[0], ttft_s=max(first) - starts[0], step_s=step_s)

    def serve(self, prompts, n_new, batch):
        """Keep `batch` prompts in the engine: add the next when one is complete."""
        ids, starts, first, end = self._run(prompts, n_new, batch)
        return dict(ids=ids, total_s=max(end) - starts[0],
                    request_s=[b - a for a, b in zip(starts, end)],
                    first_s=[b - a for a, b in zip(starts, first)])

    def _run(self, prompts, n_new, n_slots):
        """-> for each prompt: new ids, and the times of its start, first token and end."""
        ids = [[] for _ in prompts]
        starts = []
        first = [None] * len(prompts)
        end = [None] * len(prompts)
        active = set()
        while len(starts) < len(prompts) or active:
            while len(starts) < len(prompts) and len(active) < n_slots:
                i = len(starts)
                active.add(i)
                starts.append(time.perf_counter())
                self.add(i, prompts[i], n_new[i])
            new_ids = self.step()
            now = time.perf_counter()
            for i, more in new_ids.items():
                ids[i] += more
                first[i] = first[i] or now
                if len(ids[i]) == n_new[i]:
                    end[i] = now
                    active.remove(i)
            if active and not self.is_busy():
                raise ValueError("fewer tokens than requested: is --length too small?")
        return ids, starts, first, end


class OpenVINO(StepEngine):
    """OpenVINO GenAI's continuous batching, which LLMPipeline also uses, with default settings.

    Except: no prefix caching, and whole prompts in one step, as in LLMPipeline, which is faster.
    """

    STEP_TOKENS = 8192
    WEIGHTS = {"none": "float16 weights", "int8": "int8 weights, a scale for each output",
               "int4": "int4 weights in groups of {}, int8 embedding and head"}

    def __init__(self, args):
        import numpy
        import openvino
        import openvino_genai as genai
        self.numpy = numpy
        self.openvino = openvino
        self.genai = genai
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = max(args.length, self.STEP_TOKENS)
        self.pipeline = genai.ContinuousBatchingPipeline(
            args.path, scheduler, "CPU", {"INFERENCE_NUM_THREADS": args.threads})
        self.handles = {}
        self.version = f"OpenVINO GenAI {genai.__version__}: {self._computes(args.weights)}"

    def _computes(self, weights):
        """Describe the precision. Activations are quantized only on CPUs with VNNI."""
        core = self.openvino.Core()
        kind, _, groupsize = weights.partition("-g")
        activations = core.get_property("CPU", "INFERENCE_PRECISION_HINT").get_type_name()
        group = core.get_property("CPU", "DYNAMIC_QUANTIZATION_GROUP_SIZE")
        if weights != "none" and group and "vnni" in Path("/proc/cpuinfo").read_text():
            activations = f"{activations}, quantized to 8 bits in groups of {group}"
        cache = core.get_property("CPU", "KV_CACHE_PRECISION").get_type_name()
        stored = self.WEIGHTS[kind].format(groupsize)
        return f"{stored}, activations {activations}, {cache} KV cache"

    def add(self, i, prompt, n_new):
        config = self.genai.GenerationConfig(max_new_tokens=n_new, ignore_eos=True, do_sample=False)
        tokens = self.openvino.Tensor(self.numpy.array([prompt], self.numpy.int64))
        self.handles[i] = self.pipeline.add_request(i, tokens, config)

    def step(self):
        self.pipeline.step()
        new_ids = {}
        for i, handle in list(self.handles.items()):
            while handle.can_read():
                output, = handle.read().values()
                new_ids[i] = new_ids.get(i, []) + output.generated_ids
            if handle.get_status() != self.genai.GenerationStatus.RUNNING:
                del self.handles[i]
        return new_ids

    def is_busy(self):
        return self.pipeline.has_non_finished_requests()


class ONNXRuntime:
    """ONNX Runtime GenAI's generator. Its continuous batching needs a GPU."""

    COMPUTES = {
        "none": "float32 weights and activations",
        "int8": "int8 weights in blocks of 32, activations quantized to 8 bits, float32 embedding",
        "int4": "int4 weights in blocks of {} (head int8, embedding int8 where it is the head, "
                "else float32), activations quantized to 8 bits"}

    def __init__(self, args):
        import onnxruntime_genai as genai
        genai.disable_telemetry_events()
        self.genai = genai
        config = genai.Config(str(args.path))
        session = dict(intra_op_num_threads=args.threads)
        config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
        self.model = genai.Model(config)
        kind, _, groupsize = args.weights.partition("-g")
        self.version = (f"ONNX Runtime GenAI {genai.__version__}: "
                        f"{self.COMPUTES[kind].format(groupsize)}, float32 KV cache")

    def __call__(self, prompt, n_new, batch):
        start = time.perf_counter()
        length = len(prompt) + n_new
        params = self.genai.GeneratorParams(self.model)
        params.set_search_options(max_length=length, min_length=length, do_sample=False,
                                  batch_size=batch)
        generator = self.genai.Generator(self.model, params)
        generator.append_tokens([prompt] * batch if batch > 1 else prompt)
        ids = []
        times = []
        for _ in range(n_new):
            generator.generate_next_token()
            ids.append(int(generator.get_next_tokens()[0]))
            times.append(time.perf_counter())
        return dict(ids=ids, ttft_s=times[0] - start,
                    step_s=(times[-1] - times[0]) / (n_new - 1) if n_new > 1 else None)


class VLLM(StepEngine):
    """vLLM's engine in this process, with default settings except no prefix caching."""

    CACHE_GIB = 2

    def __init__(self, args):
        os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1",
                          VLLM_CPU_KVCACHE_SPACE=str(self.CACHE_GIB),
                          VLLM_CPU_OMP_THREADS_BIND="nobind")      # threads: OMP_NUM_THREADS
        import vllm
        self.SamplingParams = vllm.SamplingParams
        self.engine = vllm.LLM(
            model=str(args.path), dtype=args.dtype, max_model_len=args.length,
            enable_prefix_caching=False, skip_tokenizer_init=True).llm_engine
        self.version = f"vLLM {vllm.__version__}: {args.dtype} weights, activations and KV cache"
        self.n_read = {}

    def add(self, i, prompt, n_new):
        sampling_params = self.SamplingParams(temperature=0, max_tokens=n_new, ignore_eos=True,
                                              detokenize=False)
        self.n_read[str(i)] = 0
        self.engine.add_request(str(i), dict(prompt_token_ids=prompt), sampling_params)

    def step(self):
        new_ids = {}
        for output in self.engine.step():
            ids = output.outputs[0].token_ids
            new_ids[int(output.request_id)] = list(ids[self.n_read[output.request_id]:])
            self.n_read[output.request_id] = len(ids)
        return new_ids

    def is_busy(self):
        return self.engine.has_unfinished_requests()


PEERS = {"transformers": Transformers, "transformers-compile": CompiledTransformers,
         "llama.cpp": LlamaCpp,
         "ik_llama.cpp": IkLlamaCpp, "ik_llama.cpp-repacked": RepackedIkLlamaCpp,
         "openvino": OpenVINO, "onnxruntime": ONNXRuntime, "vllm": VLLM}
PEER_NAMES = tuple(PEERS)
DEFAULT_CACHE_TYPES = "f16", "f16"                 # llama.cpp's keys, values


def split_cache_types(name: str) -> tuple[str, tuple[str, str]]:
    """llama.cpp@q8_0/q4_0 -> llama.cpp, types of its keys and values. ValueError if unknown."""
    peer, at, text = name.partition("@")
    if not at:
        return peer, DEFAULT_CACHE_TYPES
    if peer != "llama.cpp":
        raise ValueError(f"peer '{name}': only llama.cpp takes a KV cache of another type")
    types = text.split("/")
    if len(types) > 2 or not set(types) <= set(LlamaCpp.CACHE_TYPES):
        raise ValueError(f"peer '{name}': expected one of {', '.join(LlamaCpp.CACHE_TYPES)} after "
                         "@, or keys/values, for example q8_0/q4_0")
    return peer, (types[0], types[-1])


def one_line(e: Exception) -> str:
    """An error's first line; for a missing package with the command that installs it."""
    line = (str(e).strip().splitlines() or [""])[0][:200] or type(e).__name__
    return f"{line}: run scripts/install_peers.sh" if isinstance(e, ImportError) else line


def peak_bytes(peer, device: str) -> int | None:
    """The peer's peak memory, on a GPU torch's; None if it does not use torch there."""
    if device == "cuda":
        torch = sys.modules.get("torch")
        return torch.cuda.max_memory_allocated() if torch else None
    return peer.peak_bytes() if hasattr(peer, "peak_bytes") else resident_peak("self")


def resident_peak(pid) -> int:
    """A process's peak resident memory; without /proc that of this process."""
    with suppress(OSError):                        # Linux: ru_maxrss includes the parent's
        return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss      # macOS: bytes


def build_parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description="A peer of benchmark.py: JSON lines in and out.")
    p.add_argument("name", help=f"one of {', '.join(PEER_NAMES)}, or llama.cpp@TYPE")
    p.add_argument("path", type=Path,
                   help="a Hugging Face directory, a GGUF, a config.json (random Llama weights), "
                        "or the peer's converted model")
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    p.add_argument("--dtype", default="bfloat16", help="dtype of transformers' and vLLM's weights")
    p.add_argument("--weights", default="none", help="the model's quantization: int8, int4-g32, …")
    p.add_argument("--length", type=int, default=2048, help="positions to allocate")
    return p


def run(peer, request: dict) -> dict:
    """Run one request -> its response. ValueError if the peer does not support it."""
    if "prompts" not in request:
        return peer(**request)
    if not hasattr(peer, "serve"):
        raise ValueError("takes one prompt at a time")
    return peer.serve(**request)


def main(argv=None) -> None:
    """Load a peer and answer requests until stdin closes."""
    args = build_parser().parse_args(argv)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)                                  # libraries may print to stdout

    def answer(**fields):
        print(json.dumps(fields), file=out, flush=True)

    try:
        start = time.perf_counter()
        name, args.cache_types = split_cache_types(args.name)
        peer = PEERS[name](args)
        answer(ready=True, version=peer.version, load_s=time.perf_counter() - start)
    except Exception as e:                         # any library error: the parent reports it
        answer(error=f"{args.name}: {one_line(e)}")
        return
    for line in sys.stdin:
        try:
            answer(**run(peer, json.loads(line)), peak_memory_bytes=peak_bytes(peer, args.device))
        except Exception as e:
            answer(error=f"{args.name}: {one_line(e)}")


if __name__ == "__main__":
    main()
