"""Measure a model: the perplexity of a text, and EleutherAI's lm-eval tasks.

Given text is scored with the model's forward, new text comes from a generate.Batch: no decoding
loop, sampling or file format here. lm-eval is needed for --tasks only.

    python eval.py -m org/name --perplexity wiki.txt
    python eval.py -m org/name --compile --tasks hellaswag winogrande
"""

import contextlib
import difflib
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from generate import (
    NotFinite,
    bucket,
    check_ids,
    dtype_name,
    log,
    number,
    pick_device,
    split_stops,
    weight_bytes,
)
from gpt_faster.cli import batch
from gpt_faster.cli.common import guarded
from gpt_faster.cli.flags import (
    add_activation_bits,
    add_adapter,
    add_kv_cache,
    add_no_bos,
    add_quantize,
)
from gpt_faster.cli.parser import Help, Parser
from gpt_faster.decoding.engines import build_steps
from gpt_faster.decoding.ranks import as_rank
from gpt_faster.decoding.samplers import build_sampler
from gpt_faster.decoding.scheduler import Generation, RowsBatch
from gpt_faster.devices import pick_dtype, pick_engine
from gpt_faster.formats.quantize_on_load import multiplies_fp4, quantize_as_requested
from gpt_faster.kernels.cpu import native
from gpt_faster.loading import load, open_model
from gpt_faster.text.chat_template import render
from gpt_faster.text.english import english_text
from gpt_faster.text.tokenizer_files import window_prefix
from model import Transformer
from quantize import schemes
from sampling import SamplingParams
from tp import local_device

MAX_LOGITS = 1 << 26                               # logits in memory: 256 MB of fp32
CHUNK = 256                                        # max positions of a row in one call


# ---- Scoring ------------------------------------------------------------------------------------

def progress(total: int) -> Callable[[int], None]:
    """-> a function to call with the number of newly done items; logs every ten seconds."""
    done, last = 0, time.perf_counter()

    def report(n):
        nonlocal done, last
        done += n
        if time.perf_counter() > last + 10:
            last = time.perf_counter()
            log(f"{done} of {total}")
    return report


def allocate_cache(model: Transformer, n: int, most: int, length: int, compiled: bool) -> int:
    """Allocate a cache for n rows, if compiled rounded up to a power of two -> its rows."""
    B = bucket(n, most, 1) if compiled else n
    if (model.max_batch_size, model.max_seq_length) != (B, length):
        model.setup_cache(B, length, CHUNK)
    return B


@torch.inference_mode()
def score(model: Transformer, rows: list[tuple[list[int], int]], batch_size: int = 1,
          compiled: bool = False) -> list[list[tuple[float, bool]]]:
    """Score the last n < len(ids) tokens of each row (ids, n), each given all before it.

    -> n pairs per row: the token's log-probability (natural, fp32), and whether it is the argmax.
    Rows that differ only in their last token (multiple choice) are computed once. Rows are padded
    on the right and run through the KV cache in chunks, which bounds the memory for logits;
    compiled: use few shapes. Resizes the model's cache.
    """
    cfg, device = model.cfg, model.freq.device
    length = min(cfg.context, max((len(ids) for ids, _ in rows), default=0))
    length = bucket(length, cfg.context) if compiled else length
    groups, results = {}, [[] for _ in rows]
    for i, (ids, _) in enumerate(rows):
        groups.setdefault(tuple(ids[:-1]), []).append(i)
    groups = sorted(groups.values(), key=lambda group: -len(rows[group[0]][0]))    # longest first
    report = progress(len(groups))
    for part in (groups[first:first + batch_size] for first in range(0, len(groups), batch_size)):
        B = allocate_cache(model, len(part), batch_size, length, compiled)
        A = max(map(len, part))                   # alternatives of the last token
        ends = [len(rows[group[0]][0]) - 1 for group in part]              # without the last token
        begins = [end - max(rows[i][1] for i in group) for group, end in zip(part, ends)]
        known = torch.zeros(B, A, length + 1, dtype=torch.int64)
        for b, group in enumerate(part):
            for a, i in enumerate(group):
                known[b, a, :len(rows[i][0])] = torch.tensor(rows[i][0])
        known = known.to(device)                                           # [B, A, S + 1]
        chunk = max(16, min(CHUNK, 1 << (MAX_LOGITS // (B * cfg.vocab_size)).bit_length() - 1))
        for at in range(0, max(ends), chunk):
            T = min(chunk, bucket(max(ends) - at, length - at, 32) if compiled else max(ends) - at)
            low = [max(at, begin) for begin in begins]
            counts = [min(at + T, end) - n for n, end in zip(low, ends)]   # scored, if above 0
            m = max(1, *counts)
            m = bucket(m, T, 8) if compiled else m
            keep = torch.tensor(low + [at] * (B - len(low)))[:, None] - at + torch.arange(m)
            keep = keep.clamp(max=T - 1).to(device)                        # [B, m]
            pos, n_key = torch.arange(at, at + T, device=device), bucket(at + T, length)
            logits = model(known[:, 0, at:at + T], pos, keep, n_key)       # [B, m, V]
            target = known[:, :, at + 1:at + T + 1].gather(2, keep[:, None].expand(-1, A, -1)).mT
            logprobs = (logits.gather(2, target) - logits.logsumexp(-1, keepdim=True)).tolist()
            best = (logits.argmax(-1, keepdim=True) == target).tolist()    # [B, m, A]
            for b, group in enumerate(part):
                for a, i in enumerate(group):
                    if not all(math.isfinite(logprobs[b][j][a]) for j in range(counts[b])):
                        raise NotFinite(f"row {i}", model.dtype)
                    results[i] += [(logprobs[b][j][a], best[b][j][a]) for j in range(counts[b])]
        report(len(part))
    return [pairs[len(pairs) - n:] for pairs, (_, n) in zip(results, rows)]


def windows(ids: list[int], window: int, stride: int,
            prefix: list[int] = ()) -> list[tuple[list[int], int]]:
    """Rows for `score`: windows `stride` apart; each scores the tokens after the previous window.

    prefix: what `ids` and every row begin with: the beginning token of models that were trained
    with one. In later windows it takes the place of their first tokens, which are not scored.

        a B C D                    window 4, stride 2; upper case: scored
            c d E F                with prefix a: a d E F
                e f G H                               a f G H
                    g h I                                 a h I
    """
    n_given = max(1, len(prefix))                  # the first token has no context
    rows, done = [], n_given
    for begin in range(0, len(ids), stride):
        end = min(begin + window, len(ids))
        n_scored = min(end - done, end - begin - n_given)
        rows.append(([*prefix, *ids[begin + len(prefix):end]], max(0, n_scored)))
        done = end
        if end == len(ids):
            return rows


# ---- lm-eval ------------------------------------------------------------------------------------

class LMEvalModel:
    """lm-eval's model interface; `run_tasks` combines it with lm-eval's TemplateLM.

    Encodes, truncates and scores text like lm-eval's HFLM, so that results are comparable.
    """

    eot_token_id = prefix_token_id = tokenizer_name = None     # TemplateLM has properties

    def __init__(self, model, source, tokenizer, steps, compiled, batch_size, max_length):
        super().__init__()
        self.model, self.tokenizer, self.steps, self.compiled = model, tokenizer, steps, compiled
        self.batch_size, self.max_length = batch_size, max_length
        self.tokenizer_name = source.path.name
        self.eos_ids, self.ignored = source.eos_ids, set()
        eos = tokenizer.encode(tokenizer.names.get("eos_token") or "", bos=False)
        self.eot_token_id = eos[0] if len(eos) == 1 else [*self.eos_ids, 0][0]
        self.prefix_token_id = self.eot_token_id if tokenizer.bos_id is None else tokenizer.bos_id

    def tok_encode(self, string, add_special_tokens=None, **_):
        ids, prefix = self.tokenizer.encode(string, bos=False), self.tokenizer.prefix
        bos = self.tokenizer.add_bos and add_special_tokens is not False
        has_prefix = ids[:len(prefix)] == prefix   # by the chat template
        return [*prefix, *ids] if bos and not has_prefix else ids

    def apply_chat_template(self, history, add_generation_prompt=True):
        """Without a generation prompt the last message is the start of the answer."""
        if not add_generation_prompt:
            return self.apply_chat_template(history[:-1]) + history[-1]["content"]
        try:
            return render(self.tokenizer, history)
        except ValueError:                         # like HFLM: the template may reject system
            others = [message for message in history if message["role"] != "system"]
            if others == history:
                raise
            return render(self.tokenizer, others)

    def _loglikelihood_tokens(self, requests, disable_tqdm=False):
        rows = []
        for texts, context, continuation in requests:
            if not continuation:                   # its probability would be 1
                raise ValueError(f"the answer {texts[1]!r} has no token of its own: the last one "
                                 f"of {texts[0][-20:]!r} spans both")
            if len(continuation) > self.max_length:
                raise ValueError(f"an answer of {len(continuation)} tokens exceeds the context of "
                                 f"{self.max_length}")
            rows.append(((context + continuation)[-self.max_length - 1:], len(continuation)))
        scores = score(self.model, rows, self.batch_size, self.compiled)
        return [(math.fsum(p for p, _ in row), all(best for _, best in row)) for row in scores]

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
        windows, request_of_window = [], []
        for i, request in enumerate(requests):
            for window in get_rolling_token_windows(self.tok_encode(request.args[0]),
                                                    self.prefix_token_id, self.max_length, 1):
                windows.append((None, *make_disjoint_window(window)))
                request_of_window.append(i)
        totals = [0.0] * len(requests)
        for i, (logprobs, _) in zip(request_of_window, self._loglikelihood_tokens(windows)):
            totals[i] += logprobs
        return totals

    def generate_until(self, requests, disable_tqdm=False):
        """Prompts with the same arguments run together in slots, the longest first."""
        from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
        model, tokenizer, groups, longest = self.model, self.tokenizer, {}, 0
        for i, request in enumerate(requests):
            gen_kwargs = normalize_gen_kwargs(request.args[1], 256)
            room = self.max_length - gen_kwargs["max_gen_toks"]
            if room < 1:
                raise ValueError(f"{gen_kwargs['max_gen_toks']} new tokens leave no room for a "
                                 f"prompt in a context of {self.max_length}")
            ids = self.tok_encode(request.args[0])[-room:] or [self.prefix_token_id]
            key = json.dumps(gen_kwargs, sort_keys=True, default=str)
            groups.setdefault(key, []).append((i, ids, gen_kwargs))
            longest = max(longest, len(ids) + gen_kwargs["max_gen_toks"])
        length, answers = bucket(longest, self.max_length), [None] * len(requests)
        report = progress(len(requests))
        for group in groups.values():
            B = min(self.batch_size, len(group))
            if (model.max_batch_size, model.max_seq_length) != (B, length):
                model.setup_cache(B, length, CHUNK)
            params, stops, eos_ids = self.sampling(gen_kwargs := group[0][2])
            limit = gen_kwargs["max_gen_toks"]
            work = [Generation(tokenizer, ids, eos_ids, stops, limit, user_data=i)
                    for i, ids, _ in sorted(group, key=lambda item: -len(item[1]))]
            slots = RowsBatch(model, build_sampler(model, [params] * B), self.steps)
            for done, _ in batch.serve(slots, work):       # decode without the prompt, like HFLM
                ids = [token for token in done.ids if token not in eos_ids]
                text = postprocess_generated_text(tokenizer.decode(ids), stops, None)
                answers[done.user_data] = text
                report(1)
        return answers

    def sampling(self, gen_kwargs: dict) -> tuple[SamplingParams, list[str], set[int]]:
        """A task's arguments -> sampling parameters, stop strings, EOS ids."""
        names = ("top_k", "top_p", "min_p", "repetition_penalty")
        ignored = gen_kwargs.keys() - {*names, "temperature", "do_sample", "until", "max_gen_toks"}
        if ignored - self.ignored:
            self.ignored |= ignored
            log(f"note: ignored task arguments: {', '.join(sorted(ignored))}")
        params = SamplingParams(
            gen_kwargs.get("temperature", 1.0) if gen_kwargs["do_sample"] else 0.0,
            **{name: gen_kwargs[name] for name in names if gen_kwargs.get(name) is not None})
        stops, special = split_stops(self.tokenizer, [*filter(None, gen_kwargs["until"])])
        return params, stops, special.union(self.eos_ids)


@contextlib.contextmanager
def wrap_errors():
    """Redirect lm-eval's output to stderr, and raise its errors as one line."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (OSError, ValueError, ImportError) as e:
        raise ValueError(f"lm-eval: {' '.join(str(e).split())}") from e


def load_tasks(args):
    """Load tasks and their data -> lm-eval's TaskManager. ImportError or ValueError."""
    try:
        import lm_eval.tasks
    except ImportError as e:
        raise ImportError(f"--tasks needs lm-eval: pip install lm-eval ({e})") from None
    if args.include_path and not args.include_path.is_dir():
        raise ValueError(f"--include_path {args.include_path}: no such directory")
    with wrap_errors():
        manager = lm_eval.tasks.TaskManager(include_path=args.include_path)
        unknown = [n for n in args.tasks if not (manager.match_tasks([n]) or Path(n).is_file())]
        if not unknown:
            names = [name for n in args.tasks for name in manager.match_tasks([n]) or [n]]
            loaded = manager.load(names)
            manager.load = lambda names: loaded    # cached, and before the weights load
            return manager
    suggestions = [m for n in unknown for m in difflib.get_close_matches(n, manager.all_tasks, 1)]
    raise ValueError(f"no such task: {', '.join(unknown)}"
                     + (f" (did you mean {', '.join(suggestions)}?)" if suggestions else ""))


def run_tasks(args, manager, *model_args) -> tuple[dict, str]:
    """-> lm-eval's results, and its table."""
    import lm_eval
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import make_table
    adapter = type("GptFaster", (LMEvalModel, TemplateLM), {})(*model_args)
    with wrap_errors():
        results = lm_eval.simple_evaluate(
            adapter, tasks=args.tasks, task_manager=manager, num_fewshot=args.num_fewshot,
            limit=args.limit, apply_chat_template=args.apply_chat_template, log_samples=False)
    parts = [part for part in ("results", "groups") if results.get(part)]
    summary = {key: results[key] for key in (*parts, "versions", "n-shot", "n-samples")}
    return summary, "\n".join(make_table(results, part) for part in parts)


# ---- Perplexity ---------------------------------------------------------------------------------

def read_text(name: str, tokenizer, n_vocab: int, limit: int | None = None) -> list[int]:
    """A file's token ids; pydoc: Python's documentation. ValueError or OSError if unusable."""
    if name == "pydoc" and not Path(name).exists():
        text = english_text(held_out=True)
    else:
        try:
            text = Path(name).read_text(encoding="utf-8")
        except UnicodeDecodeError as e:
            raise ValueError(f"{name}: not UTF-8 text: {e.reason} at byte {e.start}") from None
    ids = tokenizer.encode(text)[:limit]
    if len(ids) < 2:
        raise ValueError(f"{name}: perplexity needs at least 2 tokens, this text has {len(ids)}")
    check_ids(ids, n_vocab)
    return ids


def perplexity(model, rows, batch_size: int = 1, compiled: bool = False) -> dict:
    """exp of the mean negative log-likelihood of all scored tokens."""
    logps = [p for row in score(model, rows, batch_size, compiled) for p, _ in row]
    nats = -math.fsum(logps) / len(logps)
    if nats > 700:                                 # exp would overflow fp64
        raise ValueError(f"perplexity overflows: {nats:.0f} nats per token")
    return dict(perplexity=math.exp(nats), tokens=len(logps), nats_per_token=nats)


# ---- Command line -------------------------------------------------------------------------------

def build_parser() -> Parser:
    p = Parser(description="Perplexity of a text, or lm-eval tasks. The result goes to stdout.",
               formatter_class=Help)
    add = p.add_argument_group("model").add_argument
    add("--checkpoint_path", "--model", "-m", metavar="PATH_OR_NAME",
        help="same as for generate.py")
    add_adapter(add)
    add_activation_bits(add)
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps, xpu")
    add("--dtype", default="auto", choices=["auto", "bfloat16", "float16", "float32"],
        type=dtype_name,
        help="auto: as in generate.py, but float32 without --compile on a CPU without bfloat16")
    add_quantize(add)
    add_kv_cache(add)
    add("--compile", action="store_true", help="compile decoding, and on a CPU also scoring")
    add("--max_seq_length", type=number(int, 2),
        help="context length; default: the model's, for perplexity at most 1024")
    add("--batch_size", type=number(int, 1), default=8, help="rows computed in parallel")
    group = p.add_argument_group("what to measure, one of")
    add = group.add_mutually_exclusive_group(required=True).add_argument
    add("--perplexity", metavar="FILE",
        help="a text file; pydoc: the last fifth of Python's documentation")
    add("--tasks", nargs="+", metavar="TASK", help="lm-eval task names, patterns or .yaml files")
    group.add_argument("--limit", type=number(int, 1),
                       help="max tokens of the text, or examples per task")
    group.add_argument("--json", action="store_true", help="print one JSON object")
    add = p.add_argument_group("perplexity").add_argument
    add("--stride", type=number(int, 1),
        help="distance between windows of --max_seq_length tokens; default: half of it")
    add_no_bos(add)
    add = p.add_argument_group("tasks").add_argument
    add("--num_fewshot", type=number(int, 0),
        help="few-shot examples in the prompt; default: the task's")
    add("--apply_chat_template", action="store_true", help="format prompts with the chat template")
    add("--include_path", type=Path, metavar="DIR",
        help="a directory of additional tasks (.yaml files)")
    return p


def run(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    device = pick_device(local_device(args.device))
    native.set_activation_bits(args.activation_bits)
    engine = pick_engine(device, None, args.compile)
    source, tokenizer = open_model(args.checkpoint_path, adapter=args.adapter)
    cfg = source.cfg
    dtype = pick_dtype(args.dtype, device, cfg, many_rows=engine != "compile")
    length = args.max_seq_length or (min(cfg.context, 1024) if args.perplexity else cfg.context)
    if length > cfg.context:
        raise ValueError(f"--max_seq_length {length} exceeds the model's context of {cfg.context}")
    stride = args.stride or length // 2
    if stride > length:
        raise ValueError(f"--stride {stride} exceeds the window of {length} tokens "
                         "(--max_seq_length): some tokens would not be scored")
    if args.no_bos and args.tasks:
        raise ValueError("--no_bos requires --perplexity: lm-eval tasks are encoded as by lm-eval")
    if args.apply_chat_template and not tokenizer.chat_template:
        raise ValueError(f"{source.path.name} has no chat template")
    if args.kv_cache:
        args.kv_cache.check(cfg)
    if args.tasks:
        manager = load_tasks(args)
    else:
        ids = read_text(args.perplexity, tokenizer, cfg.vocab_size, args.limit)
        prefix = window_prefix(tokenizer, length, args.no_bos)
    source = quantize_as_requested(source, args.quantize, args.groupsize, args.quantize_head,
                                   device, multiplies_fp4(engine, device))
    model = load(source, dtype, device, engine)
    model.kv_cache = args.kv_cache
    log(f"Engine: {engine}")
    steps = build_steps(model, engine, compile_prefill=True)
    compiled = engine == "compile" and device.type == "cpu"    # on a GPU forward is not compiled
    start = time.perf_counter()
    if args.tasks:
        result, text = run_tasks(args, manager, model, source, tokenizer, steps, compiled,
                                 args.batch_size, length)
    else:
        rows = windows(ids, length, stride, prefix)
        result = perplexity(model, rows, args.batch_size, compiled)
        result |= dict(window=length, stride=stride, bos_in_each_window=bool(prefix))
        text = (f"perplexity {result['perplexity']:.3f} over {result['tokens']} tokens "
                f"({result['nats_per_token']:.4f} nats per token; window {length}, "
                f"stride {stride})")
    seconds = time.perf_counter() - start
    log(f"{seconds:.1f} seconds")
    result |= dict(model=source.path.name, dtype=str(dtype)[6:], device=str(device),
                   seconds=seconds, model_bytes=weight_bytes(model)[0],
                   quantization=schemes(source)[0],
                   kv_cache=args.kv_cache and str(args.kv_cache))
    print(json.dumps(result, default=str) if args.json else text, flush=True)
    return 0


def main() -> int:
    return guarded(as_rank(run))
