"""A peer of benchmark.py in a process of its own: another program on the same model.

It is run by path, by the Python of .venv-peers (scripts/install_peers.sh), so it imports nothing at
the top that is not the standard library's, and none of our files.

    python -I bench/worker.py llama.cpp model.gguf --threads 2 --device cpu --length 512

It speaks JSON, a line each. First {"ready": true, "version": …, "load_s": …}; then for each
{"prompt": [ids], "n_new": N, "batch": B}, all rows alike, greedy, N tokens whatever they are:

    {"ids": the first row's N, "ttft_s": from the call to the first token,
     "step_s": mean of the later ones, null if N is 1, "peak_memory_bytes": …}

or for {"prompts": [[ids], …], "n_new": [N, …], "batch": B}, in batches of B as they come:

    {"ids": [each one's N], "total_s": …, "request_s": [of each],
     "first_s": [to the first token of each] or null, "peak_memory_bytes": …}

or {"error": "one line"}. It ends when its stdin does.
"""

import argparse
import json
import os
import re
import resource
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path


class Transformers:
    """transformers' own generate(), eager: its documentation's defaults."""

    def __init__(self, args):
        import torch
        import transformers
        torch.set_num_threads(args.threads)
        self.torch = torch
        self.generate_options = {}
        self.compiled_shape = None
        self.model = self._load(transformers, args.path, getattr(torch, args.dtype), args.device)
        self.model.generation_config = transformers.GenerationConfig()   # no EOS, no penalties
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"

    def _load(self, transformers, path, dtype, device):
        auto = transformers.AutoModelForCausalLM
        if path.suffix == ".json":                 # a shape alone: random weights
            config = transformers.LlamaConfig.from_json_file(path)
            with self.torch.device(device):
                model = auto.from_config(config, dtype=dtype)
        elif path.suffix == ".gguf":               # as plain weights: what we run
            model = auto.from_pretrained(
                path.parent, dtype=dtype, gguf_file=path.name,
                quantization_config=transformers.GgufConfig(dequantize=True))
        else:
            model = auto.from_pretrained(path, dtype=dtype)
        return model.to(device).eval()

    def __call__(self, prompt, n_new, batch):
        times = []

        class Clock:                               # generate() hands it the prompt, then each token
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
        """As its documentation does: padded on the left, until the longest answer of a batch."""
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
        """-> each row's new tokens, as many as it asked for."""
        width = max(map(len, prompts))
        padding = [[0] * (width - len(prompt)) for prompt in prompts]
        tokens = self.torch.tensor([pad + prompt for pad, prompt in zip(padding, prompts)])
        mask = self.torch.tensor([pad + [1] * len(prompt) for pad, prompt in zip(padding, prompts)])
        out = self.model.generate(
            tokens.to(self.model.device), attention_mask=mask.to(self.model.device),
            max_new_tokens=max(n_new), do_sample=False, pad_token_id=0, **self.generate_options)
        return [row[:n] for row, n in zip(out[:, width:].tolist(), n_new)]


class CompiledTransformers(Transformers):
    """The same with a static cache, whose decode step generate() compiles by itself on a GPU.

    On a CPU it does so only by the switch that transformers' own tests use.
    """

    def __init__(self, args):
        super().__init__(args)
        from transformers import CompileConfig
        config = CompileConfig()
        config._compile_all_devices = True
        self.generate_options = dict(cache_implementation="static", compile_config=config)


class LlamaCpp:
    """llama.cpp's own server, by the wheel xllamacpp, and the server's own clock.

    Its prompt_ms ends with the first token, its predicted_ms begins there (n_new - 1 steps: it is
    0.001 for one token). The version names the instructions it was built for: the wheel knows AVX2
    and nothing newer. Keys and values are float16, its default.
    """

    def __init__(self, args):
        import xllamacpp as x
        gpu = x.ggml_backend_dev_type.GGML_BACKEND_DEVICE_TYPE_GPU
        if args.device == "cuda" and not any(d["type"] == gpu for d in x.get_device_info()):
            raise ValueError("this xllamacpp was built without CUDA")
        params = x.CommonParams()
        params.model.path = str(args.path)
        params.cpuparams.n_threads = args.threads
        params.cpuparams_batch.n_threads = args.threads
        params.n_ctx = args.length
        params.n_parallel = 1
        params.cache_ram_mib = 0
        params.verbosity = 1
        params.n_gpu_layers = 999 if args.device == "cuda" else 0
        params.fit_params = False
        params.load_mode = x.llama_load_mode.LLAMA_LOAD_MODE_NONE  # read at once: no page faults
        self.server = x.Server(params)
        features = " ".join(re.findall(r"(\w+) = 1", x.get_system_info()))
        self.version = f"llama.cpp (xllamacpp {x.__version__}: {features})"

    def __call__(self, prompt, n_new, batch):
        if batch > 1:
            raise ValueError("batch 1 only")
        out = self._post("/completion", dict(
            prompt=prompt, n_predict=n_new, temperature=0, top_k=1, samplers=["top_k"],
            ignore_eos=True, cache_prompt=False, return_tokens=True))
        timings = out["timings"]
        if timings["predicted_n"] != n_new or timings["prompt_n"] != len(prompt):
            raise ValueError(f"{timings['prompt_n']} + {timings['predicted_n']} tokens instead of "
                             f"{len(prompt)} + {n_new}: is the length enough?")
        decode_s = timings["predicted_ms"] / 1e3
        return dict(ids=out["tokens"], ttft_s=timings["prompt_ms"] / 1e3,
                    step_s=decode_s / (n_new - 1) if n_new > 1 else None)

    def _post(self, path, body):
        request = urllib.request.Request(
            self.server.listening_address + path, json.dumps(body).encode(),
            {"Content-Type": "application/json"})
        no_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with no_proxy.open(request) as response:
            return json.load(response)


class VLLM:
    """vLLM's LLM.generate. Never run by us: no machine of ours could install it."""

    def __init__(self, args):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"     # so that its memory is this process'
        import vllm
        self.SamplingParams = vllm.SamplingParams
        self.version = f"vllm {vllm.__version__}"
        self.model = vllm.LLM(model=str(args.path), dtype=args.dtype, max_model_len=args.length,
                              enable_prefix_caching=False)

    def _generate(self, prompt, n_new, batch):
        """-> the first row's new tokens, seconds."""
        sampling_params = self.SamplingParams(temperature=0, max_tokens=n_new, ignore_eos=True,
                                              detokenize=False)
        start = time.perf_counter()
        out = self.model.generate([dict(prompt_token_ids=prompt)] * batch, sampling_params,
                                  use_tqdm=False)
        return list(out[0].outputs[0].token_ids), time.perf_counter() - start

    def __call__(self, prompt, n_new, batch):
        ids, ttft_s = self._generate(prompt, 1, batch)
        if n_new == 1:
            return dict(ids=ids, ttft_s=ttft_s, step_s=None)
        ids, total_s = self._generate(prompt, n_new, batch)
        return dict(ids=ids, ttft_s=ttft_s, step_s=(total_s - ttft_s) / (n_new - 1))


PEERS = {"transformers": Transformers, "transformers-compile": CompiledTransformers,
         "llama.cpp": LlamaCpp, "vllm": VLLM}
PEER_NAMES = tuple(PEERS)


def one_line(e: Exception) -> str:
    """An error's first line, and the remedy where a package is missing."""
    line = (str(e).strip().splitlines() or [""])[0][:200] or type(e).__name__
    return f"{line}: run scripts/install_peers.sh" if isinstance(e, ImportError) else line


def peak_bytes(device: str) -> int | None:
    """This process' peak, or torch's on a GPU; None where another allocator uses the GPU."""
    if device == "cuda":
        torch = sys.modules.get("torch")
        return torch.cuda.max_memory_allocated() if torch else None
    with suppress(OSError):                        # Linux counts a parent's memory in ru_maxrss
        return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss      # macOS: bytes


def build_parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description="A peer of benchmark.py: JSON lines in and out.")
    p.add_argument("name", choices=PEER_NAMES)
    p.add_argument("path", type=Path,
                   help="a Hugging Face directory, a GGUF, or the config.json of a random Llama")
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    p.add_argument("--dtype", default="bfloat16", help="of transformers' and vLLM's weights")
    p.add_argument("--length", type=int, default=2048, help="positions to allocate")
    return p


def run(peer, request: dict) -> dict:
    """The answer to one request. ValueError where the peer cannot do it."""
    if "prompts" not in request:
        return peer(**request)
    if not hasattr(peer, "serve"):
        raise ValueError("takes one prompt at a time, here")
    return peer.serve(**request)


def main(argv=None) -> None:
    """Load a peer, answer requests until stdin ends."""
    args = build_parser().parse_args(argv)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)                                  # what libraries print is no answer

    def answer(**fields):
        print(json.dumps(fields), file=out, flush=True)

    try:
        start = time.perf_counter()
        peer = PEERS[args.name](args)
        answer(ready=True, version=peer.version, load_s=time.perf_counter() - start)
    except Exception as e:                         # theirs raise anything: the parent shows it
        answer(error=f"{args.name}: {one_line(e)}")
        return
    for line in sys.stdin:
        try:
            answer(**run(peer, json.loads(line)), peak_memory_bytes=peak_bytes(args.device))
        except Exception as e:
            answer(error=f"{args.name}: {one_line(e)}")


if __name__ == "__main__":
    main()
