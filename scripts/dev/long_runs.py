"""Soak test in one process on a CPU: requests in slots, a long chat, speculation.

After the first quarter memory must not grow, no slot may leak, and the first runs, repeated at the
end, must generate the same tokens. Exit status 1 otherwise.

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
from gpt_faster.cli.common import guarded  # noqa: E402
from gpt_faster.cli.parser import Parser  # noqa: E402
from gpt_faster.decoding import engines  # noqa: E402
from gpt_faster.decoding.request_sampler import GREEDY, RequestParams, build_request_sampler  # noqa: E402
from gpt_faster.decoding.samplers import build_sampler  # noqa: E402
from gpt_faster.decoding.scheduler import Generation, RowsBatch, Scheduler  # noqa: E402
from gpt_faster.formats.quantize_on_load import quantized  # noqa: E402
from gpt_faster.loading import load_model, load_shard  # noqa: E402
from gpt_faster.text.english import english_text  # noqa: E402
from model import Transformer  # noqa: E402

N_REPEATED = 8                                     # first runs to repeat at the end
MB_PER_100 = 1.0                                   # allowed growth per 100 runs
ARENA_MB = 4                                       # a one-time malloc arena is allowed
LENGTH = 512                                       # context length of each row
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
    """run(runner, n): yields (number, new ids) of n runs, then of the first ones again."""

    title: str
    share: float                                   # fraction of --n
    run: Callable[[Runner, int], Iterator[tuple[int, list[int]]]]


# ---- Runs ---------------------------------------------------------------------------------------

def random_words(i: int, n: int) -> str:
    """n words of the text, seeded by i."""
    at = random.Random(i).randrange(len(TEXT) - 1000)
    return " ".join(TEXT[at:at + 500].split()[1:n + 1])


def new_generation(runner: Runner, i: int) -> Generation:
    ids = runner.tokenizer.encode(random_words(i, 2 + i % 9))
    params = PARAMS[i % len(PARAMS)]
    params = replace(params, seed=i if params.temperature else None)
    return Generation(runner.tokenizer, ids, max_new=1 + i % 8, params=params,
                      n_top=3 if params.logprobs else None, user_data=i)


def requests(runner: Runner, n: int) -> Iterator[tuple[int, list[int]]]:
    """Like serve.py: slots with prefix reuse; some clients disconnect after two tokens."""
    model = runner.model
    model.setup_cache(N_SLOTS, LENGTH, 64)
    sampler = build_request_sampler(model, N_SLOTS, torch.Generator(), lambda params: None)
    slots = Scheduler(RowsBatch(model, sampler, runner.steps), max_prefill=64, reuse=True)
    for todo in (iter(range(n)), iter(range(min(n, N_REPEATED)))):
        active = set()

        def arrive(todo=todo, active=active):
            while len(slots.waiting) < N_SLOTS and (i := next(todo, None)) is not None:
                slots.waiting.append(new_generation(runner, i))
                active.add(slots.waiting[-1])
        slots.poll = arrive
        for event in slots.run():
            generation = event.generation
            if event.error:
                raise event.error
            disconnects = generation.user_data % 17 == 16 and len(generation.ids) == 2
            if event.finish_reason or disconnects:
                slots.drop(generation)
                active.discard(generation)
                yield generation.user_data, generation.ids
        if active or slots.waiting or len(slots.free()) != N_SLOTS:
            raise RuntimeError(f"{N_SLOTS - len(slots.free())} slots and {len(active)} requests "
                               "leaked")


def chat_turns(runner: Runner, n: int) -> Iterator[tuple[int, list[int]]]:
    """Turns of one chat that repeatedly drops its oldest messages."""
    model, n_new, answers = runner.model, 6, []
    model.setup_cache(1, LENGTH, 64, max_rejected=1)
    batch = Batch(model, build_sampler(model, [GREEDY]), runner.steps)

    def answer(ids, n_cached):
        sequence = Sequence(runner.tokenizer, ids, max_new=n_new)
        follow(generate(batch, [ids], n_new, n_cached), [sequence], None)
        answers.append(sequence.ids)
        return sequence, ""
    n_dropped = 0

    def note(line):
        nonlocal n_dropped
        n_dropped += "dropped" in line
    chat = Chat(runner.tokenizer, answer, LENGTH - n_new, engines.rewind(batch), note)
    for turns in (range(n), range(min(n, N_REPEATED))):
        for i in turns:
            chat.turn(random_words(i, 3 + i % 9))
            yield i, answers.pop()
        chat.command("/clear")
    log(f"the oldest messages were dropped {n_dropped} times")


def speculation(runner: Runner, n: int) -> Iterator[tuple[int, list[int]]]:
    """Alternate n-gram and int8 speculation with four draft tokens."""
    model, n_draft = runner.model, 4
    model.setup_cache(1, LENGTH, 64, max_rejected=n_draft)
    batches = []
    for draft in (None, runner.draft):
        sampler = build_sampler(model, [GREEDY])
        batches.append(engines.build_speculative(
            model, sampler, runner.steps, "compile", n_draft, True, draft))
    for runs in (range(n), range(min(n, N_REPEATED))):
        for i in runs:
            ids = runner.tokenizer.encode(random_words(i, 8) + " " + random_words(i, 5))
            tokens = generate(batches[i % 2], [ids], 8)
            yield i, [token.item() for token in tokens]


PARTS = dict(requests=Part("requests through four slots", 1, requests),
             turns=Part("turns of a conversation", 1 / 4, chat_turns),
             drafts=Part("texts with drafts", 1 / 4, speculation))


# ---- Measurements -------------------------------------------------------------------------------

def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def growth(memory: list[float]) -> float:
    """MB per run: slope of a least-squares line without the first quarter. malloc frees late and in
    pieces, so single values are noisy."""
    later = torch.tensor(memory[len(memory) // 4:], dtype=torch.float64)
    at = torch.arange(len(later), dtype=torch.float64)
    at -= at.mean()
    return ((at * (later - later.mean())).sum() / (at * at).sum().clamp(min=1)).item()


def measure_part(part: Part, runner: Runner, n: int) -> tuple[list[float], list[str]]:
    """-> memory after each run, error messages."""
    start, n_same = time.perf_counter(), 0
    memory, first, errors = [], {}, []
    for i, ids in part.run(runner, n):
        if len(memory) < n:
            memory.append(resident_mb())
            if i < N_REPEATED:
                first[i] = ids
        elif first[i] == ids:
            n_same += 1
        else:
            errors.append(f"run {i} gave {first[i]} and later {ids}")
    per_100 = 100 * growth(memory)
    if per_100 > MB_PER_100 and per_100 * len(memory) * 3 / 400 > ARENA_MB:
        errors.append(f"memory grows by {per_100:.2f} MB per 100 runs")
    print(f"{n} {part.title}, {time.perf_counter() - start:.0f} s: {memory[0]:.0f} MB after the "
          f"first, {memory[n // 4]:.0f} after a quarter, {memory[-1]:.0f} at the end, "
          f"{per_100:+.3f} for each 100; of the first {len(first)} again {n_same} the same",
          flush=True)
    return memory, errors


def draw(memory_of: dict[str, list[float]], path: Path) -> None:
    """A panel per part: memory growth since its first run."""
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
                    label="limit")
            ax.set_xlabel(PARTS[name].title)
            ax.legend(loc="upper left")
            ax.grid(True)
        panels[0].set_ylim(-5, max(25, 1.5 * panels[0].get_ylim()[1]))     # all panels
        panels[0].set_ylabel("resident memory growth, MB")
        figure.savefig(path, metadata={"Date": None})


def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__.splitlines()[0],
                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("-m", "--checkpoint_path", help="default: that of generate.py")
    parser.add_argument("--n", type=number(int, 4), default=2000,
                        help="requests; chat turns and speculative runs are a quarter each")
    parser.add_argument("--only", choices=PARTS, help="run only this part")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="plot memory over runs")
    args = parser.parse_args(argv)
    if args.plot:
        plots.load_matplotlib()                    # fail early if it is missing
    model, source, tokenizer = load_model(args.checkpoint_path, "cpu", torch.float32)
    draft = load_shard(quantized(source, "int8"), torch.float32, "cpu", "compile")
    runner = Runner(model, draft, tokenizer, engines.build_steps(model, "compile"))
    memory_of, errors = {}, []
    for name, part in PARTS.items():
        if args.only in (None, name):
            memory_of[name], more = measure_part(part, runner, max(1, int(args.n * part.share)))
            errors += [f"{part.title}: {line}" for line in more]
    for line in errors:
        log(f"long_runs.py: error: {line}")
    if args.plot:
        draw(memory_of, args.plot)
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(guarded(main))
