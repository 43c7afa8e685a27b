"""Run by test_tp.py as several ranks: the checks that need them, each of a checkpoint.

    torchrun --standalone --nproc_per_node=2 tests/ranks.py CHECK:DIRECTORY …        # a family of tiny ones, say
"""

import itertools
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import generate  # noqa: E402
import tp  # noqa: E402
from gpt_faster import loading  # noqa: E402
from gpt_faster.bench.drafts import FixedAcceptanceDrafter  # noqa: E402
from gpt_faster.cli.common import guarded  # noqa: E402
from gpt_faster.decoding import draft_length, engines  # noqa: E402
from gpt_faster.decoding.draft_length import DraftLengthController  # noqa: E402
from gpt_faster.decoding.ranks import as_rank, from_rank_0, run_on_rank_0  # noqa: E402
from gpt_faster.decoding.samplers import build_sampler  # noqa: E402
from gpt_faster.formats.dflash import dflash_file, open_dflash  # noqa: E402
from gpt_faster.formats.eagle3 import open_eagle3  # noqa: E402
from gpt_faster.formats.load import load_model, read_checkpoint  # noqa: E402
from gpt_faster.formats.quantize_on_load import quantized  # noqa: E402
from gpt_faster.layers.quantized_cache import CacheFormat  # noqa: E402
from sampling import SamplingParams  # noqa: E402

FP32, FP64 = torch.float32, torch.float64


def prompts(n, batch=3, seed=1):
    return torch.randint(0, 160, (batch, n), generator=torch.Generator().manual_seed(seed))


def logits(model, tokens):
    model.setup_cache(0, n := tokens.shape[1])
    with torch.inference_mode():
        return model(tokens, torch.arange(n), logits_to_keep=n)


def close(part, whole):
    torch.testing.assert_close(part, whole, rtol=1e-4, atol=1e-4 * whole.std().item())


def same_tokens(source, rows, n_new=6, how=SamplingParams(temperature=0), engine="kv_cache", drafts=None):
    """generate() gives the same with this rank's part of the model as with the whole, although each
    rank's random numbers are its own: what rank 0 draws holds."""
    said = []
    for model in (load_model(source, FP32, "cpu"), loading.load_shard(source, FP32, "cpu", "compile")):
        steps = engines.build_steps(model, engine) if said else generate.Steps()
        draw = torch.Generator().manual_seed(1 + (tp.rank() if said else 0))
        model.setup_cache(len(rows), max(map(len, rows)) + n_new)
        sampler = build_sampler(model, [how] * len(rows), draw)
        batch = drafts(model, sampler) if said and drafts else generate.Batch(model, sampler, steps)
        said.append([t.tolist() for t in generate.generate(batch, rows, n_new)])
    if how.temperature == 0 or not drafts:                 # which draws in another order
        assert said[0] == said[1], f"{said[0]} alone, {said[1]} together"
    assert said[1] == from_rank_0(lambda: said[1])


def check_family(path, n):
    source = read_checkpoint(path)
    whole, part = load_model(source, FP32, "cpu"), loading.load_shard(source, FP32, "cpu", "compile")
    assert part.cfg.n_head == source.cfg.n_head // n and part.cfg.vocab_size == source.cfg.vocab_size
    close(logits(part, prompts(24)), logits(whole, prompts(24)))
    same_tokens(source, [row[:k].tolist() for row, k in zip(prompts(12), (5, 12, 1))])


def check_quantized(path, n):
    """The numbers are those of the whole model: rows' scales were found before the rows were cut."""
    source = read_checkpoint(path)
    for mode, head in (("int8", "int8"), ("int4", "int8"), ("int4", "int4"), ("int8", "none")):
        packed = quantized(source, mode, 32, head)
        whole, part = load_model(packed, FP32, "cpu"), loading.load_shard(packed, FP32, "cpu", "compile")
        close(logits(part, prompts(9)), logits(whole, prompts(9)))


def check_sampling(path, n):
    how = SamplingParams(temperature=1.0, top_k=20, repetition_penalty=1.2)
    same_tokens(read_checkpoint(path), prompts(8).tolist(), 20, how)


def check_compiled(path, n):
    same_tokens(read_checkpoint(path), prompts(8, 1).tolist(), 8, engine="compile")


def check_guessing(path, n):
    """Greedily, and drawing with different dice."""
    source = read_checkpoint(path)
    draft = loading.load_shard(quantized(source, "int8"), FP32, "cpu", "compile")
    row = prompts(6, 1).repeat(1, 3).tolist()
    for other in (None, draft):
        def drafts(model, sampler, other=other):
            batch = engines.build_speculative(model, sampler, generate.Steps(), "kv_cache", 3, other is None, other)
            if other:
                lengths = batch.draft_length.lengths
                costs = from_rank_0(lambda: {1: {k: 1.5 for k in lengths}})
                batch.draft_length = DraftLengthController(lengths, costs)
            return batch
        for how in (SamplingParams(temperature=0), SamplingParams(temperature=0, repetition_penalty=1.1),
                    SamplingParams(temperature=1.5)):
            same_tokens(source, row, 30, how, drafts=drafts)


def check_measuring(path, n):
    """Each rank has its own clock, and all make the same calls."""
    model = loading.load_shard(read_checkpoint(path), FP32, "cpu", "compile")
    model.setup_cache(1, 64)
    sampler = build_sampler(model, [SamplingParams(temperature=0)], torch.Generator())
    batch = engines.build_speculative(model, sampler, generate.Steps(), "kv_cache", 3, False)
    draft_length.time = SimpleNamespace(perf_counter=lambda: time.perf_counter() * (1 + 1e5 * tp.rank()))
    try:
        costs = engines.measure_drafts(batch, 6)
    finally:
        draft_length.time = time
    assert costs == from_rank_0(lambda: costs)


def check_kv_cache(path, n):
    """A head's codes and scales are its own, whichever rank has it."""
    source = read_checkpoint(path)
    whole, part = load_model(source, FP64, "cpu"), loading.load_shard(source, FP64, "cpu", "kv_cache")
    plain = logits(whole, prompts(24))
    for precision in ("int8", "int4", "int8/int4", "fp8"):
        found = []
        for model in (whole, part):
            model.kv_cache = CacheFormat.parse(precision)
            model.setup_cache(3, 24)
            with torch.inference_mode():
                found.append(model(prompts(24), torch.arange(24), 24))
        close(found[1], found[0])
        assert (found[0] - plain).abs().max() > 1e-3 * plain.std(), precision


def check_mtp(path, n):
    """By the checkpoint's own head, a part of which each rank has, beside its part of embedding and output."""
    source = read_checkpoint(path)
    head = loading.load_shard(source.mtp(), FP32, "cpu", "compile")

    def drafts(model, sampler):
        return engines.build_speculative(model, sampler, generate.Steps(), "kv_cache", 3, True, head)
    for how in (SamplingParams(temperature=0), SamplingParams(temperature=1.5)):
        same_tokens(source, prompts(12, 1).tolist(), 30, how, drafts=drafts)


def opened(directory):
    file = dflash_file(directory)
    return open_dflash(file) if file else open_eagle3(directory)


def drafted(model, draft, prompt, n_new, how, engine, text=None):
    """What two rows say, and all drafts; of these most are exchanged by right ones if the text is known."""
    model.setup_cache(2, len(prompt) + n_new + 20, max_rejected=4)
    steps, draw = engines.build_steps(model, engine), torch.Generator().manual_seed(tp.rank())
    batch = engines.build_speculative(model, build_sampler(model, [how] * 2, draw), steps, engine, 3, True, draft)
    drafts, propose = [], batch.drafter.propose

    def spy(*args):
        tokens, *dist = propose(*args)
        drafts.append(tokens.tolist())
        return tokens, *dist
    batch.drafter.propose = spy
    if text:
        batch.drafter = FixedAcceptanceDrafter(batch.drafter, 0.7)
        batch.drafter.set_text(prompt + text)
    said = [t.tolist() for t in generate.generate(batch, [prompt] * 2, n_new)]
    assert not text or sum(batch.accept_counts[1:]) > sum(batch.accept_counts) / 2
    return said, drafts


def check_drafters(path, n):
    """Each rank has the whole drafter, beside its part of the model's embedding and output layer: its drafts are those of one process."""
    source, prompt = read_checkpoint(path), prompts(20, 1)[0].tolist()
    greedy, hot = SamplingParams(temperature=0), SamplingParams(temperature=1.5)
    directories = sorted(path.glob("drafter*"))
    assert directories
    wrong = []                                             # said at the end: the ranks make the same calls
    for directory, engine in itertools.product(directories, ("kv_cache", "compile")):
        found = []
        for load in (load_model, lambda source, dtype, device: loading.load_shard(source, dtype, device, "compile")):
            model, draft = load(source, FP32, "cpu"), opened(directory)
            finish = getattr(draft, "finish", lambda draft: draft)
            draft = finish(load(draft, FP32, "cpu"))
            model.setup_cache(1, 40)
            text = [t.item() for t in generate.generate(generate.Batch(model, build_sampler(model, [greedy], None)), [prompt], 20)]
            found.append(drafted(model, draft, prompt, 20, greedy, engine if found else "kv_cache", text))
        random = drafted(model, draft, prompt, 20, hot, engine)
        if found[0] != found[1] or random != from_rank_0(lambda random=random: random):
            wrong.append(f"{directory.name} {engine}")
    assert not wrong


def check_agreement(path, n):
    """A result that differs between the ranks, an error of rank 0 alone, calls that rank 0 leads."""
    mine = torch.full((2, 1), tp.rank())
    assert not tp.broadcast(mine.clone()).any()
    assert [tp.broadcast(t).sum().item() for t in (mine.clone(), mine + 5)] == [0, 10]
    assert from_rank_0(lambda: {"rank": tp.rank()}) == {"rank": 0}
    try:
        from_rank_0(lambda: [][0])
    except IndexError:
        pass
    else:
        raise AssertionError("no IndexError")
    calls = []

    def body(call):
        call(1, "a")
        call(2, "b")
    run_on_rank_0(lambda *args: calls.append(args), body)
    assert calls == [(1, "a"), (2, "b")]


CHECKS = dict(family=check_family, quantized=check_quantized, sampling=check_sampling, compiled=check_compiled,
              guessing=check_guessing, measuring=check_measuring, mtp=check_mtp, drafters=check_drafters, kv_cache=check_kv_cache, agreement=check_agreement)


def run(argv):
    checks, failed = [], []
    for argument in argv:
        name, _, path = argument.partition(":")
        checks.append((CHECKS[name], Path(path)))
    for check, path in checks:
        try:
            check(path, tp.world())
        except Exception as e:
            failed.append(f"{check.__name__} {path.name}: {e} {traceback.format_exc()}")
    every = [None] * tp.world()
    dist.all_gather_object(every, failed)
    print(*sum(every, []), sep="\n", flush=True)
    print(f"{len(checks)} checks on {tp.world()} ranks, {len(sum(every, []))} failed", flush=True)
    return any(every)


if __name__ == "__main__":
    sys.exit(guarded(as_rank(run), sys.argv[1:]))
