"""The peers of benchmark.py: other programs on the same model, each in a process of its own.

They live in an environment of their own, .venv-peers (scripts/install_peers.sh), so a worker is
this file run by that environment's Python, and imports nothing at the top that is not the standard
library's. It knows none of our files. Peer starts a worker and talks to it; gguf_twin writes for
llama.cpp the model that we run.

    python -I peers.py llama.cpp model.gguf --threads 2 --device cpu --length 512

A worker speaks JSON, a line each. First {"ready": true, "version": …, "load_s": …}; then for each
{"prompt": [ids], "n_new": N, "batch": B}, all rows alike, greedy, N tokens whatever they are:

    {"ids": the first row's N, "ttft_s": from the call to the first token,
     "step_s": mean of the later ones, null if N is 1, "peak_memory_bytes": …}

or for {"prompts": [[ids], …], "n_new": [N, …], "batch": B}, in batches of B as they come:

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
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

# ---- The worker ---------------------------------------------------------------------------------


class Transformers:
    """transformers' own generate(), eager: its documentation's defaults."""

    def __init__(self, args):
        import torch
        import transformers
        self.torch, self.how, self.warm = torch, {}, None
        torch.set_num_threads(args.threads)
        path, gguf, dtype = args.path, {}, getattr(torch, args.dtype)
        auto = transformers.AutoModelForCausalLM
        if path.suffix == ".json":                 # a shape alone: random weights
            with torch.device(args.device):
                model = auto.from_config(transformers.LlamaConfig.from_json_file(path), dtype=dtype)
        else:
            if path.suffix == ".gguf":             # as plain weights: what we run
                config = transformers.GgufConfig(dequantize=True)
                path, gguf = path.parent, dict(gguf_file=path.name, quantization_config=config)
            model = auto.from_pretrained(path, dtype=dtype, **gguf)
        self.model = model.to(args.device).eval()
        self.model.generation_config = transformers.GenerationConfig()   # no EOS, no penalties
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"

    def __call__(self, prompt, n_new, batch):
        times, shape = [], (len(prompt), n_new, batch)

        class Clock:                               # generate() hands it the prompt, then each token
            def put(self, value):
                times.append(time.perf_counter())

            def end(self):
                pass

        prompt = self.torch.tensor([prompt] * batch, device=self.model.device)
        for _ in range(3 if self.how and self.warm != shape else 1):   # compile, record, measure
            times.clear()
            start = time.perf_counter()
            out = self.model.generate(
                prompt, attention_mask=self.torch.ones_like(prompt), max_new_tokens=n_new,
                do_sample=False, pad_token_id=0, streamer=Clock(), **self.how)
        self.warm = shape
        _, first, *_, last = *times, times[-1]
        return dict(ids=out[0, prompt.shape[1]:].tolist(), ttft_s=first - start,
                    step_s=(last - first) / (n_new - 1) if n_new > 1 else None)

    def serve(self, prompts, n_new, batch):
        """As its documentation does: padded on the left, until the longest answer of a batch."""
        said, seconds, begin = [], [], time.perf_counter()
        for first in range(0, len(prompts), batch):
            some, news = prompts[first:first + batch], n_new[first:first + batch]
            width, start = max(map(len, some)), time.perf_counter()
            ids = self.torch.tensor([[0] * (width - len(p)) + p for p in some])
            mask = self.torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in some])
            out = self.model.generate(ids.to(self.model.device), max_new_tokens=max(news),
                                      attention_mask=mask.to(self.model.device), do_sample=False,
                                      pad_token_id=0, **self.how)[:, width:].tolist()
            said += [row[:n] for row, n in zip(out, news)]
            seconds += [time.perf_counter() - start] * len(some)
        return dict(ids=said, total_s=time.perf_counter() - begin, request_s=seconds, first_s=None)


class Compiled(Transformers):
    """The same with a static cache, whose decode step generate() compiles by itself on a GPU.

    On a CPU it does so only by the switch that transformers' own tests use.
    """

    def __init__(self, args):
        super().__init__(args)
        from transformers import CompileConfig
        compiled = CompileConfig()
        compiled._compile_all_devices = True
        self.how = dict(cache_implementation="static", compile_config=compiled)


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
        p = x.CommonParams()
        p.model.path = str(args.path)
        p.cpuparams.n_threads = p.cpuparams_batch.n_threads = args.threads
        p.n_ctx, p.n_parallel, p.cache_ram_mib, p.verbosity = args.length, 1, 0, 1
        p.n_gpu_layers, p.fit_params = 999 if args.device == "cuda" else 0, False
        p.load_mode = x.llama_load_mode.LLAMA_LOAD_MODE_NONE   # read at once: no page faults later
        self.server = x.Server(p)
        built = " ".join(re.findall(r"(\w+) = 1", x.get_system_info()))
        self.version = f"llama.cpp (xllamacpp {x.__version__}: {built})"

    def __call__(self, prompt, n_new, batch):
        if batch > 1:
            raise ValueError("batch 1 only")
        body = dict(prompt=prompt, n_predict=n_new, temperature=0, top_k=1, samplers=["top_k"],
                    ignore_eos=True, cache_prompt=False, return_tokens=True)
        request = urllib.request.Request(
            self.server.listening_address + "/completion", json.dumps(body).encode(),
            {"Content-Type": "application/json"})
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as f:
            out = json.load(f)
        t = out["timings"]
        if t["predicted_n"] != n_new or t["prompt_n"] != len(prompt):
            raise ValueError(f"{t['prompt_n']} + {t['predicted_n']} tokens instead of "
                             f"{len(prompt)} + {n_new}: is the length enough?")
        return dict(ids=out["tokens"], ttft_s=t["prompt_ms"] / 1e3,
                    step_s=t["predicted_ms"] / 1e3 / (n_new - 1) if n_new > 1 else None)


class VLLM:
    """vLLM's LLM.generate. Never run by us: no machine of ours could install it."""

    def __init__(self, args):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"     # so that its memory is this process'
        import vllm
        self.params, self.version = vllm.SamplingParams, f"vllm {vllm.__version__}"
        self.model = vllm.LLM(model=str(args.path), dtype=args.dtype, max_model_len=args.length,
                              enable_prefix_caching=False)

    def timed(self, prompt, n_new, batch):
        how = self.params(temperature=0, max_tokens=n_new, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        out = self.model.generate([dict(prompt_token_ids=prompt)] * batch, how, use_tqdm=False)
        return list(out[0].outputs[0].token_ids), time.perf_counter() - start

    def __call__(self, prompt, n_new, batch):
        ids, ttft_s = self.timed(prompt, 1, batch)
        if n_new == 1:
            return dict(ids=ids, ttft_s=ttft_s, step_s=None)
        ids, whole_s = self.timed(prompt, n_new, batch)
        return dict(ids=ids, ttft_s=ttft_s, step_s=(whole_s - ttft_s) / (n_new - 1))


PEERS = {"transformers": Transformers, "transformers-compile": Compiled, "llama.cpp": LlamaCpp,
         "vllm": VLLM}
NAMES = tuple(PEERS)


def one_line(e: Exception) -> str:
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


def work(argv=None) -> None:
    """Load a peer, answer requests until stdin ends."""
    p = argparse.ArgumentParser(description="A peer of benchmark.py: JSON lines in and out.")
    p.add_argument("name", choices=NAMES)
    p.add_argument("path", type=Path,
                   help="a Hugging Face directory, a GGUF, or the config.json of a random Llama")
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    p.add_argument("--dtype", default="bfloat16", help="of transformers' and vLLM's weights")
    p.add_argument("--length", type=int, default=2048, help="positions to allocate")
    args = p.parse_args(argv)
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
            asked = json.loads(line)
            if "prompts" in asked and not hasattr(peer, "serve"):
                raise ValueError("takes one prompt at a time, here")
            said = peer.serve(**asked) if "prompts" in asked else peer(**asked)
            answer(**said, peak_memory_bytes=peak_bytes(args.device))
        except Exception as e:
            answer(error=f"{args.name}: {one_line(e)}")


# ---- The side of benchmark.py -------------------------------------------------------------------


class Peer:
    """A worker, loaded and waiting. ValueError says in one line what it lacks.

    threads: what the worker may use; length: positions, prompt and new tokens together.
    """

    def __init__(self, name: str, path, *, threads: int, device: str, dtype: str, length: int):
        python = Path(__file__).parent.parent / ".venv-peers/bin/python"
        command = [str(python if python.exists() else sys.executable), "-I", __file__, name,
                   str(path), "--threads", threads, "--device", device, "--dtype", dtype,
                   "--length", length]             # -I: else our files hide packages of their names
        self.name, self.stderr = name, tempfile.TemporaryFile("w+", errors="replace")
        self.process = subprocess.Popen(
            [str(part) for part in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self.stderr, text=True, start_new_session=True,
            env=dict(os.environ, OMP_NUM_THREADS=str(threads), HF_HUB_OFFLINE="1"))
        atexit.register(self.close)
        try:
            ready = self._answer()
        except RuntimeError as e:
            self.close()
            raise ValueError(f"peer {e}") from None
        self.version, self.load_s = ready["version"], ready["load_s"]

    def _answer(self) -> dict:
        line = self.process.stdout.readline()
        if not line:                               # it died: its last words
            self.close()
            self.stderr.seek(0)
            words = (self.stderr.read().strip().splitlines() or ["no message"])[-1][:200]
            raise RuntimeError(f"{self.name} ended ({self.process.returncode}): {words}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def __call__(self, prompt_ids: list[int], n_new: int, batch: int = 1) -> dict:
        """-> ids, ttft_s, step_s, peak_memory_bytes, as above. RuntimeError says why not."""
        return self._ask(prompt=list(prompt_ids), n_new=n_new, batch=batch)

    def serve(self, prompts: list[list[int]], n_new: list[int], batch: int) -> dict:
        """-> ids, total_s, request_s, first_s, peak_memory_bytes, as above. RuntimeError too."""
        return self._ask(prompts=prompts, n_new=n_new, batch=batch)

    def _ask(self, **request) -> dict:
        with suppress(OSError, ValueError):        # a closed pipe: the answer says why
            print(json.dumps(request), file=self.process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        """End the worker and all that it started, in the middle of a request too."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        atexit.unregister(self.close)


# ---- Their copies of our model ------------------------------------------------------------------

def hf_twin(cfg, path: Path) -> Path:
    """Write the config.json of a known shape for transformers, which makes random weights of it.

    ValueError where it is not a plain Llama.
    """
    fields = dict(
        model_type="llama", hidden_size=cfg.dim, num_hidden_layers=cfg.n_layer,
        num_attention_heads=cfg.n_head, num_key_value_heads=cfg.n_kv_head, head_dim=cfg.head_dim,
        intermediate_size=cfg.ffn_dim, vocab_size=cfg.vocab_size, rms_norm_eps=cfg.norm_eps,
        max_position_embeddings=cfg.context, tie_word_embeddings=cfg.tied,
        rope_theta=_plain(cfg, "transformers").rope[0].theta)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(fields))
    return path


def _plain(cfg, peer: str):
    """cfg, if it is a plain Llama's, else ValueError."""
    plain = type(cfg)(cfg.dim, cfg.n_layer, cfg.n_head, cfg.n_kv_head, cfg.head_dim, cfg.ffn_dim,
                      cfg.vocab_size, cfg.context, cfg.norm_eps, tied=cfg.tied, rope=cfg.rope)
    if cfg != plain or len(cfg.rope) > 1 or cfg.rope[0].kind not in ("default", "llama3"):
        raise ValueError(f"{peer}: --random of a plain Llama only (llama3's stretched RoPE, which "
                         "costs nothing, is left out)")
    return cfg


def gguf_twin(checkpoint, path: Path, kind: str) -> Path:
    """Write the model that we run for llama.cpp, as kind BF16, Q8_0 or Q4_0; a file there is kept.

    From a GGUF: its metadata and matrices, these dequantized and quantized again. From a known
    shape with random weights: the architecture llama with random weights of its own. Vectors,
    routers and position embeddings are float32; in Q4_0 the embedding and the head are Q8_0, as
    ours are int8. A few megabytes at a time. ValueError where llama.cpp cannot have the model.
    """
    import gguf
    import numpy as np
    path, source, cfg = Path(path), Path(checkpoint.path), checkpoint.cfg
    if path.exists():
        return path
    types, kinds = gguf.GGMLQuantizationType, ("BF16", "Q8_0", "Q4_0")
    if kind not in kinds:
        raise ValueError(f"llama.cpp: no kind {kind} of GGUF (known: {', '.join(kinds)})")
    if source.suffix == ".gguf":
        reader = gguf.GGUFReader(source)
        tensors = {t.name: (tuple(int(n) for n in t.shape[::-1]), _rows_of(t, gguf))
                   for t in reader.tensors}
        arch = reader.fields["general.architecture"].contents()
        fields = [(f.name, f.contents(), f.types[0], f.types[-1]) for f in reader.fields.values()]
        if any(name == "split.count" and value > 1 for name, value, *_ in fields):
            raise ValueError(f"llama.cpp: {source.name} is split: a GGUF in one file is needed")
    elif all(t.read_rows is None for t in checkpoint.tensors.values()):
        arch, fields, tensors = "llama", _llama_fields(cfg, gguf), _random_llama(cfg, np)
    else:
        raise ValueError("llama.cpp: it reads GGUF files: a .gguf or --random is needed")

    def its_type(name, shape):
        if len(shape) < 2 or not name.endswith("weight") or re.search("norm|_inp|^pos", name):
            return types.F32
        wide = kind == "Q4_0" and re.match(r"(token_embd|output)\.", name)
        mine = types["Q8_0" if wide else kind]
        return mine if shape[-1] % gguf.GGML_QUANT_SIZES[mine][0] == 0 else types.BF16

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    writer = gguf.GGUFWriter(partial, arch)
    for name, value, outer, inner in fields:
        mine = name.startswith("GGUF.") or name in (
            "general.architecture", "general.file_type", "general.alignment")
        if not mine and value != []:               # gguf writes no empty list
            sub_type = inner if outer == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, value, outer, sub_type)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
    sizes = {}
    for name, (shape, _) in tensors.items():
        n_block, n_bytes = gguf.GGML_QUANT_SIZES[its_type(name, shape)]
        sizes[name] = int(np.prod(shape)) // n_block * n_bytes
        writer.add_tensor_info(name, shape, np.dtype(np.float32), sizes[name],
                               its_type(name, shape))
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        file, = writer.fout
        writer.write_padding(file, file.tell())
        for name, (shape, rows) in tensors.items():
            n_row, row = int(np.prod(shape[:-1])), shape[-1]
            step = max(1, (1 << 22) // row)
            for a in range(0, n_row, step):
                part = np.ascontiguousarray(rows(a, min(a + step, n_row)), np.float32)
                gguf.quantize(part, its_type(name, shape)).tofile(file)
            writer.write_padding(file, sizes[name])
        writer.close()
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _rows_of(tensor, gguf):
    """(a, b) -> float32 rows of a GGUF's tensor, all axes but the last one flattened."""
    data = tensor.data.reshape(-1, tensor.data.shape[-1])
    return lambda a, b: gguf.dequantize(data[a:b], tensor.tensor_type)


def _llama_fields(cfg, gguf):
    """Metadata of a plain Llama with a vocabulary of nothing. ValueError if cfg is not one."""
    cfg = _plain(cfg, "llama.cpp")
    whole, real, text, array = (gguf.GGUFValueType[t]
                                for t in ("UINT32", "FLOAT32", "STRING", "ARRAY"))
    numbers = {
        "block_count": cfg.n_layer, "context_length": cfg.context, "embedding_length": cfg.dim,
        "feed_forward_length": cfg.ffn_dim, "vocab_size": cfg.vocab_size,
        "attention.head_count": cfg.n_head, "attention.head_count_kv": cfg.n_kv_head,
        "attention.key_length": cfg.head_dim, "attention.value_length": cfg.head_dim,
        "rope.dimension_count": cfg.head_dim}
    special = ["<unk>", "<s>", "</s>"] + [f"<0x{i:02X}>" for i in range(256)]
    tokens = (special + [f"t{i}" for i in range(cfg.vocab_size)])[:cfg.vocab_size]
    kinds = ([2, 3, 3] + [6] * 256 + [1] * cfg.vocab_size)[:cfg.vocab_size]    # byte 6, normal 1
    return [*((f"llama.{key}", value, whole, None) for key, value in numbers.items()),
            ("llama.attention.layer_norm_rms_epsilon", cfg.norm_eps, real, None),
            ("llama.rope.freq_base", cfg.rope[0].theta, real, None),
            ("tokenizer.ggml.model", "llama", text, None),
            ("tokenizer.ggml.tokens", tokens, array, text),
            ("tokenizer.ggml.scores", [0.0] * cfg.vocab_size, array, real),
            ("tokenizer.ggml.token_type", kinds, array, gguf.GGUFValueType.INT32)]


def _random_llama(cfg, np):
    """name -> shape, rows(a, b): normal, as small as an initialization; norms are ones."""
    random = np.random.default_rng(0)
    query, key, block = cfg.n_head * cfg.head_dim, cfg.n_kv_head * cfg.head_dim, {
        "attn_norm": (cfg.dim,), "ffn_norm": (cfg.dim,)}
    block |= {"attn_q": (query, cfg.dim), "attn_k": (key, cfg.dim), "attn_v": (key, cfg.dim),
              "attn_output": (cfg.dim, query), "ffn_gate": (cfg.ffn_dim, cfg.dim),
              "ffn_up": (cfg.ffn_dim, cfg.dim), "ffn_down": (cfg.dim, cfg.ffn_dim)}
    shapes = {"token_embd": (cfg.vocab_size, cfg.dim), "output_norm": (cfg.dim,)}
    if not cfg.tied:
        shapes["output"] = (cfg.vocab_size, cfg.dim)
    for i in range(cfg.n_layer):
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}

    def rows_of(shape):
        if len(shape) == 1:
            return lambda a, b: np.ones(shape)
        return lambda a, b: random.standard_normal((b - a, shape[1]), np.float32) * 0.02
    return {f"{name}.weight": (shape, rows_of(shape)) for name, shape in shapes.items()}


if __name__ == "__main__":
    work()
