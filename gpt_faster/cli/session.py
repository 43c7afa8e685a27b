"""generate.py's command: load a model, then run one prompt, many prompts, or a chat.

    python generate.py --compile --checkpoint_path org/name --prompt "Hello, my name is"
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from generate import (
    SYNTHETIC,
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
from gpt_faster import loading
from gpt_faster.cli import batch, flags
from gpt_faster.cli.chat import Chat
from gpt_faster.cli.common import guarded
from gpt_faster.cli.options import Options
from gpt_faster.cli.thoughts import ThoughtPrinter, with_thoughts
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
from gpt_faster.text.reasoning import find_format, separate, thoughts_of
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
        native.start_building()                    # while the model loads
    if options.json_schema:
        read_schema(options.json_schema)           # fail before the model is loaded
        import_llguidance()
    results = batch.Results(options.json, options.hide_thoughts)
    requests, errors, finished = from_rank_0(lambda: read_input(options, results))

    start = time.perf_counter()
    source, tokenizer = open_model(options.checkpoint_path, options.random, options.adapter)
    options = options.over(source.defaults)        # the model's, unless set by the user
    limit = options.max_seq_length or source.cfg.context
    dtype = pick_dtype(options.dtype, device, source.cfg)
    if limit > source.cfg.context:
        raise ValueError(f"--max_seq_length {limit} exceeds the model's context of "
                         f"{source.cfg.context}")
    eos_ids = set() if options.ignore_eos else set(source.eos_ids)
    work, more = batch.encode_all(requests, tokenizer, source.cfg, eos_ids, options, limit)
    errors += more
    if errors and not many:
        raise ValueError(errors[0])
    for complaint in errors:
        log(f"generate.py: error: {complaint}")
    parameters = parameters_of_all(options, source, dtype, eos_ids)
    work = batch.to_compute(work, requests, parameters, finished, results)
    if many and not work:
        return 1 if errors else 0
    speculate, acceptance = options.speculate, 1.0         # assumed for drafts set by a flag
    if source.mtp and flags.may_draft(options) and from_rank_0(lambda: can_use_mtp(source)):
        speculate, acceptance = "mtp", PUBLISHED_ACCEPTANCE
    if not many and work and work[0].max_new < options.max_new_tokens:
        log(f"note: at most {work[0].max_new} new tokens, to stay within {limit} positions")

    session = Session(options, source, tokenizer, work, device, dtype, engine, start, speculate,
                      acceptance)
    for request in [each.user_data for each in work if each.user_data.n_random is not None]:
        log(f"note: {request.where} {request.prompt}: {SYNTHETIC} (--prompts_file and stdin "
            "read digits as text)")
    if options.interactive:
        return run_chat(session)
    if many:
        interrupted = batch.run(work, session.batch, results, parameters)
        return 130 if interrupted else 1 if errors else 0
    return show_samples(session, work[0])


def parameters_of_all(options, source, dtype: torch.dtype, eos_ids: set[int]) -> dict:
    """What decides the text of every prompt, besides the prompt and its sampling parameters.

    Not the engine and the device: all give the same tokens, but for near-ties in low precision.
    """
    names = ("adapter", "quantize", "groupsize", "quantize_head", "activation_bits",
             "max_seq_length", "seed", "stop")
    schema = options.json_schema and options.json_schema.read_text(encoding="utf-8")
    random = options.random
    # Absent without the flag, as in files of earlier versions.
    more = {"kv_cache": str(options.kv_cache)} if options.kv_cache else {}
    return dict(
        model=random or source.path.name, files=None if random else loading.files_stamp(source),
        dtype=str(dtype)[6:], end_ids=sorted(eos_ids), json_schema=schema,
        **more, **{name: getattr(options, name) for name in names})


def read_schema(path: Path) -> tuple[str, str]:
    """Read a JSON schema for decoding/grammar.py. OSError or ValueError if it is invalid."""
    try:
        return json_schema(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from None


def read_input(options, results: batch.Results) -> tuple[list, list, dict]:
    """-> requests, error messages, and what the results in --output answer, by id."""
    requests, errors = [], []
    if not options.interactive:
        requests, errors = batch.read_requests(options)
    return requests, errors, results.append_to(options.output) if options.output else {}


def can_use_mtp(source) -> bool:
    """Whether the checkpoint's MTP head works. Not while the CPU kernels are still being built:
    until then decoding is uncompiled."""
    if native.is_building():
        return False
    try:
        source.mtp()
    except ValueError as e:
        log(f"note: this checkpoint's MTP head is not used: {e}")
        return False
    log("note: MTP speculation is on by default for this model; --no_speculate turns it off")
    return True


class Session(Runtime):
    """The model set up for these prompts, or for a chat if there are none.

    The options set the sampling; a prompt may override it.
    """

    def __init__(self, options, source, tokenizer, work: list[Generation], device: torch.device,
                 dtype: torch.dtype, engine: str, start: float, speculate: str | None,
                 acceptance: float):
        self.work = work
        lengths = [len(each.prompt_ids) + each.max_new for each in work] or [4096]    # a chat
        n_row = min(options.batch_size, len(work)) if flags.many(options) else options.batch_size
        needs_figures = options.json or options.profile or options.compile_prefill
        drafts = speculate or options.draft_checkpoint_path
        super().__init__(
            options, source, tokenizer, device, dtype, engine, n_row=n_row, longest=max(lengths),
            start=start, prompts=[each.prompt_ids for each in work] or [[0]], speculate=speculate,
            acceptance=acceptance, rewinds=int(not work),      # chat: reads the last token late
            waits=bool(needs_figures or drafts))
        self.eos_ids = set() if options.ignore_eos else set(self.source.eos_ids)

    def make_sampler(self) -> Sampler:
        rows = [sampling_params(self.options)] * self.n_row
        later_params = [each.params for each in self.work]
        sampler = build_sampler(self.model, rows, self.generator, later_params)
        if self.options.json_schema:
            self.constrain(sampler)
        return sampler

    def constrain(self, sampler: Sampler) -> None:
        """Constrain all rows to --json_schema. After the JSON only EOS is allowed."""
        spec = read_schema(self.options.json_schema)
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

    def chat_sequence(self, ids: list[int], n_new: int, shown: bool) -> Sequence:
        """A sequence of the answer, apart from the model's thoughts. shown: print these."""
        printer = ThoughtPrinter() if shown and not self.options.hide_thoughts else None
        form = None if self.options.json_schema else find_format(self.tokenizer)
        return separate(self.sequence(ids, n_new), form, printer)

    def figures(self, times: list[float], n_prompt: int, sequences: list[Sequence],
                draft: bool = True) -> dict:
        """n_prompt: tokens of each row's prompt."""
        read_bytes = 0 if draft and self.drafter else self.read_bytes
        return figures(times, n_prompt * len(sequences), [len(s.ids) for s in sequences],
                       read_bytes)


# ---- Modes --------------------------------------------------------------------------------------

def run_chat(session: Session) -> int:
    """Chat in the terminal."""
    options, length = session.options, session.length

    def answer(ids, n_cached):
        n_new = min(options.max_new_tokens, length - len(ids))
        sequence = session.chat_sequence(ids, n_new, shown=True)
        times, _ = follow(session.tokens([ids], n_new, n_cached), [sequence], "",
                          session.batch)
        return sequence, describe(session.figures(times, len(ids) - n_cached, [sequence]))

    room = length - max(1, min(options.max_new_tokens, length // 4))
    max_rewind = rewind(session.batch)
    run_on_rank_0(answer, lambda answer: Chat(
        session.tokenizer, answer, room, max_rewind, log, options.system_prompt,
        options.chat_template_kwargs, options.max_new_tokens).run())
    return 0


def show_samples(session: Session, generation: Generation) -> int:
    """Generate --num_samples times from one prompt, in --batch_size rows."""
    options, request, ids = session.options, generation.user_data, generation.prompt_ids
    echo = "" if options.random else request.echo
    if options.json or options.batch_size > 1:
        echo = None
    speeds, interrupted = [], False
    for i in range(options.num_samples):
        sequences = [session.sequence(ids, generation.max_new) for _ in range(options.batch_size)]
        if request.messages:
            sequences = [session.chat_sequence(ids, generation.max_new, shown=echo is not None)
                         for _ in sequences]
        with traced(options.profile if i == options.num_samples - 1 else None):
            tokens = session.tokens([ids] * len(sequences), generation.max_new)
            times, interrupted = follow(tokens, sequences, echo, session.batch)
        f = session.figures(times, len(ids), sequences)
        if options.compare and not interrupted:
            interrupted = compare(session, generation, f)
        for j, sequence in enumerate(sequences):
            thoughts = thoughts_of(sequence)
            more = {} if thoughts is None else dict(reasoning_content=thoughts)
            if options.json:
                print(json.dumps(dict(
                    prompt=request.prompt, text=sequence.text, **more, prompt_ids=ids,
                    new_ids=sequence.ids, finish_reason=sequence.finish_reason, sample=i, row=j,
                    **row_stats(session, j), **f, **session.about())), flush=True)
            elif options.batch_size > 1:
                text = with_thoughts(None if options.hide_thoughts else thoughts, sequence.text)
                print(f"--- row {j} ---\n{request.echo}{text}", flush=True)
        log(f"Sample {i + 1}: {describe(f)}")
        speeds += [f["decode_tok_s_total"]] if f["decode_tok_s"] else []
        if interrupted:
            break
    summarize(session.batch, speeds, on_each_rank())
    return 130 if interrupted else 0


def row_stats(session: Session, row: int) -> dict:
    """Of the row's last text, if it may have had drafts."""
    if not session.drafter:
        return {}
    n_rounds, n_accepted = session.batch.row_stats[row]
    return dict(row_rounds=n_rounds, row_accepted=n_accepted)


def compare(session: Session, generation: Generation, f: dict) -> bool:
    """Generate again without speculation and set f["speedup"] -> whether Ctrl-C interrupted."""
    ids, n_row = generation.prompt_ids, session.options.batch_size
    tokens = session.tokens([ids] * n_row, generation.max_new, draft=False)
    sequences = [session.sequence(ids, generation.max_new) for _ in range(n_row)]
    times, interrupted = follow(tokens, sequences, None, session.plain)
    plain = session.figures(times, len(ids), sequences, draft=False)
    f["speedup"] = None
    if f["decode_tok_s"] and plain["decode_tok_s"]:
        f["speedup"] = f["decode_tok_s_total"] / plain["decode_tok_s_total"]
    log(f"Without speculation: {describe(plain)}")
    log(f"Speedup: {f['speedup'] or 0:.2f}")
    return interrupted
