"""generate.py's command: a model as the flags want it, and what is done with it.

    python generate.py --compile --checkpoint_path org/name --prompt "Hello, my name is"
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from generate import (
    HELLO,
    Sequence,
    describe,
    figures,
    follow,
    generate,
    log,
    pick_device,
    sampling_params,
    summarize,
    traced,
)
from gpt_faster.cli import batch, flags
from gpt_faster.cli.chat import Chat
from gpt_faster.cli.common import guarded
from gpt_faster.cli.options import Options
from gpt_faster.decoding.engines import rewind
from gpt_faster.decoding.grammar import Grammars, import_llguidance, json_schema
from gpt_faster.decoding.logits_processors import TokenMask
from gpt_faster.decoding.mtp import PUBLISHED_ACCEPTANCE
from gpt_faster.decoding.ranks import as_rank, from_rank_0, run_on_rank_0
from gpt_faster.decoding.samplers import build_sampler
from gpt_faster.decoding.scheduler import Generation
from gpt_faster.devices import pick_dtype, pick_engine
from gpt_faster.kernels.cpu import native
from gpt_faster.loading import open_model
from gpt_faster.runtime import Runtime, on_each_rank
from sampling import Sampler
from tp import local_device


def main(argv: list[str] | None = None) -> int:
    return guarded(as_rank(run), argv)


def run(argv: list[str] | None) -> int:
    options = Options.parse(flags.build_parser(), argv)
    flags.check(options)
    device = pick_device(local_device(options.device))
    native.set_activation_bits(options.activation_bits)
    engine = pick_engine(device, options.engine, options.compile or options.compile_prefill)
    many = flags.many(options)
    if engine == "compile" and device.type == "cpu":
        native.start_building()                   # beside the loading
    if options.json_schema:
        schema_of(options.json_schema)                # before the model is loaded
        import_llguidance()
    results = batch.Results(options.json)
    requests, complaints, finished = from_rank_0(lambda: read_work(options, results))

    start = time.perf_counter()
    source, tokenizer = open_model(options.checkpoint_path, options.random, options.adapter)
    options = options.over(source.defaults)                # the model's, where the user is silent
    limit = options.max_seq_length or source.cfg.context
    dtype = pick_dtype(options.dtype, device, source.cfg)
    if limit > source.cfg.context:
        raise ValueError(f"--max_seq_length {limit} exceeds the model's context of "
                         f"{source.cfg.context}")
    requests = [request for request in requests if request.id not in finished]
    eos_ids = set() if options.ignore_eos else set(source.eos_ids)
    work, more = batch.encode_all(requests, tokenizer, source.cfg, eos_ids, options, limit)
    complaints += more
    if complaints and not many:
        raise ValueError(complaints[0])
    for complaint in complaints:
        log(f"generate.py: error: {complaint}")
    if finished:
        log(f"{len(finished)} results are in {options.output} already: {len(work)} prompts to go")
    if many and not work:
        return 1 if complaints else 0
    speculate, acceptance = options.speculate, 1.0         # that drafts may reach if asked for
    if source.mtp and flags.may_draft(options) and from_rank_0(lambda: drafts_by_default(source)):
        speculate, acceptance = "mtp", PUBLISHED_ACCEPTANCE
    if not many and work and work[0].max_new < options.max_new_tokens:
        log(f"note: at most {work[0].max_new} new tokens, to stay within {limit} positions")

    session = Session(options, source, tokenizer, work, device, dtype, engine, start, speculate,
                      acceptance)
    for request in [each.user_data for each in work if each.user_data.n_random is not None]:
        log(f"note: {request.where} {request.prompt}: a synthetic prompt of so many random tokens "
            "(--prompts_file reads digits as text)")
    if options.interactive:
        return talk(session)
    if many:
        interrupted = batch.run(work, session.batch, results)
        return 130 if interrupted else 1 if complaints else 0
    return show_samples(session, work[0])


def schema_of(path: Path) -> tuple[str, str]:
    """A file's JSON schema, for decoding/grammar.py. OSError or ValueError where there is none."""
    try:
        return json_schema(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from None


def read_work(options, results: batch.Results) -> tuple[list, list, set]:
    """-> requests, complaints about others, and the ids of those that are finished already."""
    requests, complaints = [], []
    if not options.interactive:
        requests, complaints = batch.read_requests(options, HELLO)
    return requests, complaints, results.append_to(options.output) if options.output else set()


def drafts_by_default(source) -> bool:
    """Not while operations are built: that text begins uncompiled, and drafts would wait."""
    if native.is_building():
        return False
    try:
        source.mtp()
    except ValueError as e:
        log(f"note: the head of this checkpoint that drafts tokens is not used: {e}")
        return False
    log("note: this checkpoint's own head drafts tokens, where that pays (--no_speculate: it does "
        "not)")
    return True


class Session(Runtime):
    """The model for these prompts (none: a conversation), all with the options' sampling or their
    own."""

    def __init__(self, options, source, tokenizer, work: list[Generation], device: torch.device,
                 dtype: torch.dtype, engine: str, start: float, speculate: str | None,
                 acceptance: float):
        self.work = work
        ends = [len(each.prompt_ids) + each.max_new for each in work] or [4096]    # a conversation
        n_row = min(options.batch_size, len(work)) if flags.many(options) else options.batch_size
        needs_figures = options.json or options.profile or options.compile_prefill
        drafts = speculate or options.draft_checkpoint_path
        super().__init__(
            options, source, tokenizer, device, dtype, engine, n_row=n_row, longest=max(ends),
            start=start, prompts=[each.prompt_ids for each in work] or [[0]], speculate=speculate,
            acceptance=acceptance, rewinds=int(not work),      # it may read its last token late
            waits=bool(needs_figures or drafts))
        self.eos_ids = set() if options.ignore_eos else set(self.source.eos_ids)

    def make_sampler(self) -> Sampler:
        rows = [sampling_params(self.options)] * self.n_row
        later = [each.params for each in self.work]
        sampler = build_sampler(self.model, rows, self.generator, later)
        if self.options.json_schema:
            self.constrain(sampler)
        return sampler

    def constrain(self, sampler: Sampler) -> None:
        """Every row's text is JSON of --json_schema. Where it ends, only an end may follow."""
        spec = schema_of(self.options.json_schema)
        n_vocab = self.model.cfg.vocab_size
        grammars = Grammars(self.tokenizer, self.source.eos_ids, n_vocab)
        try:
            grammars.check(spec)
        except ValueError as e:
            raise ValueError(f"{self.options.json_schema}: {e}") from None
        mask = TokenMask(sampler.n_row, n_vocab, self.device, lambda params: grammars.matcher(spec))
        sampler.processors.append(mask)

    def tokens(self, prompts: list, n_new: int, n_cached: int = 0,
               draft: bool = True) -> Iterator[Tensor]:
        return generate(self.batch if draft else self.plain, prompts, n_new, n_cached)

    def sequence(self, ids: list[int], n_new: int) -> Sequence:
        return Sequence(self.tokenizer, ids, self.eos_ids, self.options.stop, n_new)

    def figures(self, times: list[float], n_prompt: int, sequences: list[Sequence],
                draft: bool = True) -> dict:
        """n_prompt: of each row."""
        read_bytes = 0 if draft and self.drafter else self.read_bytes
        return figures(times, n_prompt * len(sequences), [len(s.ids) for s in sequences],
                       read_bytes)


# ---- What is done with it -----------------------------------------------------------------------

def talk(session: Session) -> int:
    """A conversation in the terminal."""
    options, length = session.options, session.length

    def answer(ids, n_cached):
        n_new = min(options.max_new_tokens, length - len(ids))
        sequence = session.sequence(ids, n_new)
        times, _ = follow(session.tokens([ids], n_new, n_cached), [sequence], "",
                          session.batch)
        return sequence, describe(session.figures(times, len(ids) - n_cached, [sequence]))

    room = length - max(1, min(options.max_new_tokens, length // 4))
    max_rewind = rewind(session.batch)
    run_on_rank_0(answer, lambda answer: Chat(
        session.tokenizer, answer, room, max_rewind, log, options.system_prompt,
        options.chat_template_kwargs).run())
    return 0


def show_samples(session: Session, asked: Generation) -> int:
    """--num_samples times, one prompt in --batch_size rows."""
    options, request, ids = session.options, asked.user_data, asked.prompt_ids
    shown = "" if options.random else request.shown
    if options.json or options.batch_size > 1:
        shown = None
    speeds, interrupted = [], False
    for i in range(options.num_samples):
        sequences = [session.sequence(ids, asked.max_new) for _ in range(options.batch_size)]
        with traced(options.profile if i == options.num_samples - 1 else None):
            tokens = session.tokens([ids] * len(sequences), asked.max_new)
            times, interrupted = follow(tokens, sequences, shown, session.batch)
        f = session.figures(times, len(ids), sequences)
        if options.compare and not interrupted:
            interrupted = compare(session, asked, f)
        for j, sequence in enumerate(sequences):
            if options.json:
                print(json.dumps(dict(
                    prompt=request.prompt, text=sequence.text, prompt_ids=ids,
                    new_ids=sequence.ids, finish_reason=sequence.finish_reason, sample=i, row=j,
                    **f, **session.about())), flush=True)
            elif options.batch_size > 1:
                print(f"--- row {j} ---\n{request.shown}{sequence.text}", flush=True)
        log(f"Sample {i + 1}: {describe(f)}")
        speeds += [f["decode_tok_s_total"]] if f["decode_tok_s"] else []
        if interrupted:
            break
    summarize(session.batch, speeds, on_each_rank())
    return 130 if interrupted else 0


def compare(session: Session, asked: Generation, f: dict) -> bool:
    """The same without drafts: puts the speedup into f -> whether Ctrl-C ended it."""
    tokens = session.tokens([asked.prompt_ids], asked.max_new, draft=False)
    sequences = [session.sequence(asked.prompt_ids, asked.max_new)]
    times, interrupted = follow(tokens, sequences, None, session.plain)
    plain = session.figures(times, len(asked.prompt_ids), sequences, draft=False)
    f["speedup"] = None
    if f["decode_tok_s"] and plain["decode_tok_s"]:
        f["speedup"] = f["decode_tok_s"] / plain["decode_tok_s"]
    log(f"Without drafts: {describe(plain)}")
    log(f"Speedup: {f['speedup'] or 0:.2f}")
    return interrupted
