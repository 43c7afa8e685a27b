"""Many runs in one process: requests through slots, a conversation that forgets, drafts.

Memory must stay level after the first quarter, no slot may be lost, and the first runs, repeated at
the end, must give their tokens again. Exit status 1 where one of these fails. All on a CPU.

    python scripts/dev/long_runs.py --plot long-runs.svg     # 2,000 requests, 500 turns, 500 drafts
"""

import argparse
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from generate import (  # noqa: E402
    Batch,
    Sequence,
    Steps,
    follow,
    generate,
    log,  # noqa: E402
    number,
)
from gpt_faster.bench import plots  # noqa: E402
from gpt_faster.cli.chat import Chat  # noqa: E402
from gpt_faster.cli.common import Parser, guarded  # noqa: E402
from gpt_faster.decoding import engines  # noqa: E402
from gpt_faster.decoding.request_sampler import GREEDY, RequestParams, build_request_sampler  # noqa: E402
from gpt_faster.decoding.samplers import build_sampler  # noqa: E402
from gpt_faster.decoding.scheduler import Generation, RowsBatch, Scheduler  # noqa: E402
from gpt_faster.formats.quantized import quantized  # noqa: E402
from gpt_faster.loading import load_model, load_shard  # noqa: E402
from gpt_faster.text.english import english_text  # noqa: E402
from model import Transformer  # noqa: E402

AGAIN = 8                                          # runs that are repeated at the end
MB_PER_100 = 1.0                                   # runs, that memory may grow
ARENA_MB = 4                                       # malloc may take once more, however few runs
LENGTH = 512                                       # positions of each row
N_SLOTS = 4
TEXT = english_text()
PARAMS = [GREEDY, RequestParams(0.8, top_k=40), RequestParams(1.0, top_p=0.9),
          RequestParams(0, repetition_penalty=1.2), RequestParams(0, frequency_penalty=0.5),
          RequestParams(1.2, min_p=0.1, logprobs=True)]


class Runner(NamedTuple):
    model: Transformer
    draft: Transformer
    tokenizer: object
    steps: Steps


class Part(NamedTuple):
    """run(runner, n): yields the number and the new ids of each run, of n and the first again."""

    title: str
    share: float                                   # of --n
    run: Callable[[Runner, int], Iterator[tuple[int, list[int]]]]


# ---- What is run --------------------------------------------------------------------------------

def words(i: int, n: int) -> str:
    """n words, others for each i."""
    at = random.Random(i).randrange(len(TEXT) - 1000)
    return " ".join(TEXT[at:at + 500].split()[1:n + 1])


def new_generation(runner: Runner, i: int) -> Generation:
    ids = runner.tokenizer.encode(words(i, 2 + i % 9))
    params = PARAMS[i % len(PARAMS)]
    params = replace(params, seed=i if params.temperature else None)
    return Generation(runner.tokenizer, ids, max_new=1 + i % 8, params=params,
                      n_top=3 if params.logprobs else None, user_data=i)


def requests(runner: Runner, n: int) -> Iterator[tuple[int, list[int]]]:
    """As serve.py does: some at a time, prefixes reused; some clients leave after two tokens."""
    model = runner.model
    model.setup_cache(N_SLOTS, LENGTH, 64)
    sampler = build_request_sampler(model, N_SLOTS, torch.Generator(), lambda params: None)
    slots = Scheduler(RowsBatch(model, sampler, runner.steps), max_prefill=64, reuse=True)
    for todo in (iter(range(n)), iter(range(min(n, AGAIN)))):
        live = set()

        def arrive(todo=todo, live=live):
            while len(slots.waiting) < N_SLOTS and (i := next(todo, None)) is not None:
                slots.waiting.append(new_generation(runner, i))
                live.add(slots.waiting[-1])
        slots.poll = arrive
        for event in slots.run():
            generation = event.generation
            if event.error:
                raise event.error
            leaves = generation.user_data % 17 == 16 and len(generation.ids) == 2
            if event.finish_reason or leaves:
                slots.drop(generation)
                live.discard(generation)
                yield generation.user_data, generation.ids
        if live or slots.waiting or len(slots.free()) != N_SLOTS:
            raise RuntimeError(f"{N_SLOTS - len(slots.free())} slots and {len(live)} requests "
                               "are lost")


def conversation(runner: Runner, n: int) -> Iterator[tuple[int, list[int]]]:
    """Turns of one chat, whose oldest messages are forgotten again and again."""
    model, n_new, answers = runner.model, 6, []
    model.setup_cache(1, LENGTH, 64, max_rejected=1)
    batch = Batch(model, build_sampler(model, [GREEDY]), runner.steps)

    def answer(ids, n_cached):
        sequence = Sequence(runner.tokenizer, ids, max_new=n_new)
        follow(generate(batch, [ids], n_new, n_cached), [sequence], None)
        answers.append(sequence.ids)
        return sequence, ""
    n_forgotten = 0

    def note(line):
        nonlocal n_forgotten
        n_forgotten += "forgotten" in line
    chat = Chat(runner.tokenizer, answer, LENGTH - n_new, engines.rewind(batch), note)
    for turns in (range(n), range(min(n, AGAIN))):
        for i in turns:
            chat.turn(words(i, 3 + i % 9))
            yield i, answers.pop()
        chat.command("/clear")
    log(f"{n_forgotten} times the oldest messages were forgotten")


def drafts(runner: Runner, n: int) -> Iterator[tuple[int, list[int]]]:
    """By look-up and by an int8 copy in turns, four tokens each."""
    model, n_draft = runner.model, 4
    model.setup_cache(1, LENGTH, 64, max_rejected=n_draft)
    batches = []
    for draft in (None, runner.draft):
        sampler = build_sampler(model, [GREEDY])
        batches.append(engines.build_speculative(
            model, sampler, runner.steps, "compile", n_draft, True, draft))
    for runs in (range(n), range(min(n, AGAIN))):
        for i in runs:
            ids = runner.tokenizer.encode(words(i, 8) + " " + words(i, 5))
            tokens = generate(batches[i % 2], [ids], 8)
            yield i, [token.item() for token in tokens]


PARTS = dict(requests=Part("requests through four slots", 1, requests),
             turns=Part("turns of a conversation", 1 / 4, conversation),
             drafts=Part("texts with drafts", 1 / 4, drafts))


# ---- What is measured ---------------------------------------------------------------------------

def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def growth(memory: list[float]) -> float:
    """MB for each run, the slope of a line through all but the first quarter. malloc gives back
    late and in pieces: single values say little."""
    later = torch.tensor(memory[len(memory) // 4:], dtype=torch.float64)
    at = torch.arange(len(later), dtype=torch.float64)
    at -= at.mean()
    return ((at * (later - later.mean())).sum() / (at * at).sum().clamp(min=1)).item()


def watch(part: Part, runner: Runner, n: int) -> tuple[list[float], list[str]]:
    """-> memory after each run, and what went wrong."""
    start, n_same = time.perf_counter(), 0
    memory, first, wrong = [], {}, []
    for i, ids in part.run(runner, n):
        if len(memory) < n:
            memory.append(resident_mb())
            if i < AGAIN:
                first[i] = ids
        elif first[i] == ids:
            n_same += 1
        else:
            wrong.append(f"run {i} gave {first[i]} and later {ids}")
    per_100 = 100 * growth(memory)
    if per_100 > MB_PER_100 and per_100 * len(memory) * 3 / 400 > ARENA_MB:
        wrong.append(f"memory grows by {per_100:.2f} MB for each 100")
    print(f"{n} {part.title}, {time.perf_counter() - start:.0f} s: {memory[0]:.0f} MB after the "
          f"first, {memory[n // 4]:.0f} after a quarter, {memory[-1]:.0f} at the end, "
          f"{per_100:+.3f} for each 100; of the first {len(first)} again {n_same} the same",
          flush=True)
    return memory, wrong


def draw(memory_of: dict[str, list[float]], path: Path) -> None:
    """A panel for each part: how much more memory than after its first run."""
    matplotlib, Figure, _ = plots.load_matplotlib()
    with matplotlib.rc_context(plots.STYLE | {"svg.fonttype": "none", "svg.hashsalt": ""}):
        figure = Figure((8, 2.8), layout="constrained")
        panels = figure.subplots(1, len(memory_of), squeeze=False, sharey=True)[0]
        for ax, (name, memory) in zip(panels, memory_of.items()):
            n, every = len(memory), max(1, len(memory) // 250)
            more = [mb - memory[0] for mb in memory]
            ax.plot(range(1, n + 1, every), more[::every], color=plots.COLORS["compile"],
                    lw=1.2, label=f"since {memory[0]:,.0f} MB")
            limit = more[n // 4] + MB_PER_100 * (n - n // 4) / 100
            ax.plot([n // 4, n], [more[n // 4], limit], color=plots.TEXT, ls="--", lw=1,
                    label="most that may be")
            ax.set_xlabel(PARTS[name].title)
            ax.legend(loc="upper left")
            ax.grid(True)
        panels[0].set_ylim(-5, max(25, 1.5 * panels[0].get_ylim()[1]))     # of all
        panels[0].set_ylabel("resident memory, MB more")
        figure.savefig(path, metadata={"Date": None})


def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__.splitlines()[0],
                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("-m", "--checkpoint_path", help="default: generate.py's")
    parser.add_argument("--n", type=number(int, 4), default=2000,
                        help="requests; turns and texts with drafts are a quarter each")
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw memory over the runs")
    args = parser.parse_args(argv)
    if args.plot:
        plots.load_matplotlib()                    # or say now that it lacks
    model, source, tokenizer = load_model(args.checkpoint_path, "cpu", torch.float32)
    draft = load_shard(quantized(source, "int8"), torch.float32, "cpu")
    runner = Runner(model, draft, tokenizer, engines.build_steps(model, "compile"))
    memory_of, wrong = {}, []
    for name, part in PARTS.items():
        if args.only in (None, name):
            memory_of[name], more = watch(part, runner, max(1, int(args.n * part.share)))
            wrong += [f"{part.title}: {line}" for line in more]
    for line in wrong:
        log(f"long_runs.py: error: {line}")
    if args.plot:
        draw(memory_of, args.plot)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(guarded(main))
