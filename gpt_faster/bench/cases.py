"""Run all engines and peers on a workload, interleaved -> rows of the result.

It knows no flags, and nothing of how engines and peers work.

    rows, bandwidths = run_workload(cases, tokenizers, workload, repetitions=5, device=device)
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

import tp
from generate import figures, log, peak_memory, weight_bytes
from gpt_faster.bench import engines
from gpt_faster.bench.agreement import tokens_agree
from gpt_faster.bench.engines import DRAFTING, PUBLISHED_ACCEPTANCE, Engine, split_cache
from gpt_faster.bench.machine import read_bandwidth
from gpt_faster.bench.tables import is_peer
from gpt_faster.bench.weights import Weights, load_weights
from gpt_faster.bench.workloads import Workload
from gpt_faster.decoding.ranks import sent_bytes
from gpt_faster.devices import free_memory, reset_peak_memory

CONVERTING_PEERS = ("openvino", "onnxruntime")     # may hold float16 weights as float32
PAUSE = 0.5                                        # seconds between runs, to let clocks settle
N_WARM_UP = 16                                     # max new tokens of the warm-up round
FIGURES = ("tok_s", "tok_s_runs", "tok_s_min", "tok_s_max", "tok_s_per_request", "ttft_ms",
           "itl_ms", "itl_p99_ms", "peak_memory_bytes", "compile_s", "achieved_gb_s",
           "bandwidth_fraction", "compared")


@dataclass(frozen=True, eq=False)
class BenchmarkCase:
    """An engine or a peer with a model's weights."""

    weights: Weights
    engine: str
    temperature: float = 0.0
    start_peer: Callable | None = None             # () -> peers.Peer
    error: str | None = None                       # why it cannot run

    @property
    def is_drafting(self) -> bool:
        return not self.start_peer and split_cache(self.engine)[0] in DRAFTING

    @property
    def has_other_bytes(self) -> bool:
        """Whether another program stores the weights, so our sizes do not apply."""
        is_quantized = self.weights.quantization != "none"
        return self.engine in CONVERTING_PEERS or is_peer(self.engine) and is_quantized


def build_cases(source, schemes_of_engines: list[tuple[str, str]], peer_starters: dict,
                dtype: torch.dtype, device: torch.device, temperature: float) -> list:
    """Cases for all engines and peers of one model; each scheme's weights are loaded once.

    schemes_of_engines: (engine, scheme) in the order of the rows; peer_starters: name -> a function
    of Weights that starts the peer.
    """
    schemes = dict.fromkeys(scheme for _, scheme in schemes_of_engines)
    weights_of = {}
    for scheme in schemes:
        drafters = tuple(split_cache(engine)[0] for engine, of in schemes_of_engines
                         if of == scheme and split_cache(engine)[0] in PUBLISHED_ACCEPTANCE)
        weights_of[scheme] = load_weights(source, scheme, dtype, device, drafters)
    plain_weights_of = dict(weights_of)            # layouts for plain PyTorch matmuls
    for name, scheme in schemes_of_engines:
        engine, _ = split_cache(name)
        if engine == "torch_compile" and (scheme != "none" or device.type == "cuda"):
            plain_weights_of[scheme] = load_weights(source, scheme, dtype, device, engine=engine)
    cases = []
    for name, scheme in schemes_of_engines:
        engine, _ = split_cache(name)
        weights = (plain_weights_of if engine == "torch_compile" else weights_of)[scheme]
        error = weights.error
        if engine == "cuda_graph" and device.type != "cuda":
            error = "needs an NVIDIA GPU"
        cases.append(BenchmarkCase(weights, name, temperature, error=error))
    for peer, start in peer_starters.items():
        plain_weights_only = peer.startswith(("transformers", "vllm"))
        for scheme, weights in weights_of.items():
            if scheme == "none" or not plain_weights_only:
                starter = _bind(start, weights)
                cases.append(BenchmarkCase(weights, peer, start_peer=starter, error=weights.error))
    return cases


def _bind(start: Callable, weights: Weights) -> Callable:
    return lambda: start(weights)


class Round(NamedTuple):
    """One timed run of a workload."""

    tok_s: float                                   # all rows: new tokens, or prompt tokens
    tok_s_per_request: float
    ttft_s: float | None
    bandwidth_gb_s: float                          # weight reads; 0 if not meaningful
    token_gaps_s: list[float]                      # inter-token latencies


class CaseRun:
    """A case on one workload: its runner, rounds and error."""

    def __init__(self, case: BenchmarkCase, workload: Workload, tokenizer):
        self.case = case
        self.workload = workload
        self.tokenizer = tokenizer
        self.error = case.error
        self.runner = None                         # an Engine or a Peer
        self.tokens: list[list[int]] = []          # of an engine's last run
        self.rounds: list[Round] = []
        self.peak_bytes: int | None = 0
        self.prompts: list[list[int]] = []         # one per row or request
        self.max_new_tokens: list[int] = []
        if self.error is None:
            cfg = case.weights.model.cfg
            self.prompts, self.max_new_tokens = workload.requests(tokenizer, cfg)

    @contextmanager
    def errors_to_row(self) -> Iterator[None]:
        """Record out of memory and other failures of a case in its row."""
        try:
            yield
        except (RuntimeError, ValueError, OSError, AssertionError) as e:
            if tp.world() > 1 and not isinstance(e, ValueError):   # other ranks would hang
                raise
            line = (str(e).strip() or type(e).__name__).splitlines()[0][:160]
            if isinstance(e, torch.OutOfMemoryError) or "allocate memory" in str(e):
                line = f"out of memory: {line}"
            self.error = line
            self.runner = None
            log(f"{self.case.engine}: {self.error}")

    def prepare(self) -> None:
        """Start the peer, or build and compile the engine."""
        case = self.case
        weights = case.weights
        log(f"Preparing {weights.name} {weights.quantization} {case.engine} {self.workload}")
        if case.start_peer:
            self.runner = case.start_peer()
            return
        model = weights.model
        n_bytes = self.workload.memory_bytes(model.cfg, model.dtype, case.engine != "recompute")
        n_bytes += engines.compiled_layout_bytes(case.engine, model)
        free = free_memory(model.freq.device)
        if n_bytes > free:                         # a CPU would swap or be killed
            raise torch.OutOfMemoryError(
                f"about {n_bytes / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free")
        self.runner = Engine(case.engine, model, self.prompts, self.workload, self.tokenizer,
                             case.temperature, weights.drafters.get(case.engine))

    def run_round(self, n_new: int) -> Round:
        """Run the workload once with at most n_new new tokens per row."""
        device = self.case.weights.model.freq.device
        before = reset_peak_memory(device)
        result = self._serve(n_new) if self.workload.n_requests else self._generate(n_new)
        if not self.case.start_peer:
            grown = peak_memory(device) - before
            fixed = weight_bytes(self.case.weights.model)[0] + self.runner.cache_bytes()
            self.peak_bytes = max(self.peak_bytes, fixed + grown)
        return result

    def _serve(self, n_new: int) -> Round:
        max_new_tokens = [min(n, n_new) for n in self.max_new_tokens]
        answer = self.runner.serve(self.prompts, max_new_tokens, self.workload.batch_size)
        if self.case.start_peer:
            self.peak_bytes = answer["peak_memory_bytes"]
        else:
            self.tokens = answer["ids"]
        first_s = answer["first_s"]
        speeds = [n / s for n, s in zip(max_new_tokens, answer["request_s"])]
        return Round(tok_s=sum(max_new_tokens) / answer["total_s"],
                     tok_s_per_request=statistics.median(speeds),
                     ttft_s=statistics.median(first_s) if first_s else None,
                     bandwidth_gb_s=0.0, token_gaps_s=[])

    def _generate(self, n_new: int) -> Round:
        batch_size = self.workload.batch_size
        if self.case.start_peer:
            answer = self.runner(self.prompts[0], n_new, batch_size)
            gaps = [answer["step_s"]] * (n_new - 1)
            times = [0.0, answer["ttft_s"]]
            times += [answer["ttft_s"] + (i + 1) * gap for i, gap in enumerate(gaps)]
            self.peak_bytes = answer["peak_memory_bytes"]
        else:
            self.tokens, times = self.runner.run(self.prompts, n_new)
            gaps = [b - a for a, b in zip(times[1:], times[2:])]
        read_bytes = weight_bytes(self.case.weights.model)[1]
        if self.case.is_drafting:                  # a step yields several tokens
            read_bytes = 0
        speeds = figures(times, self.workload.n_prompt * batch_size,
                         [n_new] * batch_size, read_bytes)
        tok_s = speeds["decode_tok_s_total"] or speeds["prefill_tok_s"]
        return Round(tok_s, tok_s / batch_size, speeds["ttft_s"], speeds["bandwidth_gb_s"] or 0.0,
                     gaps)

    def row(self, runs: list["CaseRun"], bandwidths: list[float], check_tokens: bool) -> dict:
        """A row of the result. bandwidths: GB/s of each round."""
        weights = self.case.weights
        workload = self.workload
        model_bytes = None
        if weights.model and not self.case.has_other_bytes:
            model_bytes = weight_bytes(weights.model)[0]
        row = dict(
            model=weights.name, parameters=weights.n_parameters, engine=self.case.engine,
            quantization=weights.quantization, dtype=str(weights.dtype)[6:],
            model_bytes=model_bytes, ranks=tp.world(),
            sent_bytes=sent_bytes(weights.cfg, weights.dtype), test=str(workload),
            n_prompt=workload.n_prompt, n_new=workload.n_new if workload.n_new > 1 else 0,
            batch=workload.batch_size, version=getattr(self.runner, "version", None),
            error=self.error)
        row |= dict.fromkeys(FIGURES)
        if self.rounds and not self.error:
            row |= self._figures(bandwidths)
            if check_tokens and not self.case.start_peer:
                row["compared"] = tokens_agree(self, runs)
        return row

    def _figures(self, bandwidths: list[float]) -> dict:
        """The FIGURES that could be measured."""
        speeds = [r.tok_s for r in self.rounds]
        result = dict(
            tok_s=statistics.median(speeds), tok_s_runs=speeds, tok_s_min=min(speeds),
            tok_s_max=max(speeds), peak_memory_bytes=self.peak_bytes,
            tok_s_per_request=statistics.median(r.tok_s_per_request for r in self.rounds),
            compile_s=getattr(self.runner, "compile_s", None))
        ttfts = [r.ttft_s for r in self.rounds if r.ttft_s]
        if ttfts:
            result["ttft_ms"] = 1e3 * statistics.median(ttfts)
        gaps = sorted(gap for r in self.rounds for gap in r.token_gaps_s)
        if gaps:
            result["itl_ms"] = 1e3 * statistics.median(gaps)
        if gaps and not self.case.start_peer:      # peers report only the mean
            result["itl_p99_ms"] = 1e3 * gaps[len(gaps) * 99 // 100]
        reads = [r.bandwidth_gb_s for r in self.rounds]
        if any(reads) and not self.case.has_other_bytes:
            result["achieved_gb_s"] = statistics.median(reads)
            result["bandwidth_fraction"] = statistics.median(
                read / bandwidth for read, bandwidth in zip(reads, bandwidths))
        return result


def run_workload(cases: list[BenchmarkCase], tokenizers: dict, workload: Workload,
                 repetitions: int, device: torch.device,
                 check_tokens: bool = True) -> tuple[list[dict], list[float]]:
    """Run all cases, interleaved in random order -> rows, memory bandwidths in GB/s.

    tokenizers: by name of the weights. bandwidths: one from before the first round, then the median
    of each round.
    """
    torch._dynamo.reset()                          # drop graphs of earlier workloads
    runs = [CaseRun(case, workload, tokenizers[case.weights.name]) for case in cases]
    bandwidths = [read_bandwidth(device)]          # in case nothing runs
    for run in runs:
        if run.error is None:
            with run.errors_to_row():
                run.prepare()
    _run_round(runs, min(workload.n_new, N_WARM_UP), device, warm_up=True)
    for _ in range(repetitions):
        reads = _run_round(runs, workload.n_new, device)
        if reads:
            bandwidths.append(statistics.median(reads))
    rows = [run.row(runs, bandwidths[1:], check_tokens) for run in runs]
    for run in runs:
        if run.case.start_peer and run.runner:
            run.runner.close()
    return rows, bandwidths


def _run_round(runs: list[CaseRun], n_new: int, device: torch.device,
               warm_up: bool = False) -> list[float]:
    """Run all without an error, in random order -> memory bandwidths in GB/s before each.

    warm_up: record nothing.
    """
    bandwidths = []
    for run in random.sample(runs, len(runs)):
        if run.error is not None:
            continue
        if not warm_up:
            bandwidths.append(read_bandwidth(device))
        time.sleep(PAUSE)
        with run.errors_to_row():
            result = run.run_round(n_new)
            if not warm_up:
                run.rounds.append(result)
    return bandwidths
