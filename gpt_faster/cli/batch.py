"""Many prompts over a few slots: a slot whose text has ended takes the next prompt.

It owns requests, which of them is in which slot, and where results go. It drives a generate.Batch:
no model, no device, no step of its own. One JSON object a line:

    python generate.py --prompts_file prompts.jsonl --batch_size 8 --output results.jsonl
"""

import json
import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from checkpoint import lock
from generate import (
    Batch,
    NotFinite,
    check_length,
    log,
    random_prompt,
    sampling_params,
    synthetic_length,
)
from gpt_faster.decoding.scheduler import Generation, Scheduler
from gpt_faster.text.chat_template import encode_chat
from sampling import RANGES

# ---- Requests -----------------------------------------------------------------------------------

@dataclass(frozen=True)
class Request:
    """A prompt, or messages for the chat template. where: its name in complaints; shown: what to
    print before its text; sampling: where it differs from the flags; n_random: so many random
    tokens instead of the prompt's, which is the integer that --prompt was given."""

    id: int | str
    where: str
    prompt: str | None = None
    messages: list[dict] | None = None
    max_new_tokens: int | None = None
    sampling: dict = field(default_factory=dict)
    shown: str = ""
    n_random: int | None = None


def read_requests(args, default: str) -> tuple[list[Request], list[str]]:
    """What --prompts_file, --prompt or the default ask for, and complaints about the others."""
    prompts, complaints = args.prompt or [default], []
    where = "--prompt" if len(prompts) == 1 else "--prompt {}"
    requests = [Request(i, where.format(i + 1), text, n_random=synthetic_length(text))
                for i, text in enumerate(prompts)]
    if args.prompts_file:
        requests, complaints = read_prompts(args.prompts_file)
        if not requests and not complaints:
            raise ValueError(f"{args.prompts_file}: there is no prompt in it")
    if args.chat:
        requests = [r if r.prompt is None else
                    replace(r, messages=[dict(role="user", content=r.prompt)]) for r in requests]
    shown = [r if r.messages else replace(r, shown=r.prompt) for r in requests]
    return shown, complaints


def read_prompts(path: Path) -> tuple[list[Request], list[str]]:
    """A prompt a line, or where the name ends in .jsonl an object a line -> requests, complaints.

    An object has "prompt" or "messages", and may have "id" (else its index), "max_new_tokens" and
    values of SAMPLING. Empty lines are skipped. OSError or ValueError where the file cannot be read
    at all.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as e:
        raise ValueError(f"{path}: not UTF-8 text: {e.reason} at byte {e.start}") from None
    lines = [(i, line.removesuffix("\r")) for i, line in enumerate(lines, start=1) if line.strip()]
    requests, complaints, line_of = [], [], {}
    for index, (i, line) in enumerate(lines):
        try:
            fields = parse(line) if path.suffix == ".jsonl" else dict(prompt=line)
            request = Request(**{"id": index, **fields}, where=f"{path}:{i}")
            if request.id in line_of:
                raise ValueError(f"the id {request.id!r} is that of line {line_of[request.id]}")
            line_of[request.id] = i
            requests.append(request)
        except ValueError as e:
            complaints.append(f"{path}:{i}: {e}")
    return requests, complaints


def parse(line: str) -> dict:
    """A line of JSON -> Request's fields. ValueError says what is wrong with it."""
    try:
        fields = json.loads(line)
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("half a character (a lone surrogate)") from None
    except (ValueError, RecursionError) as e:
        raise ValueError(f"not valid JSON ({e})") from None
    if not isinstance(fields, dict) or ("prompt" in fields) == ("messages" in fields):
        raise ValueError('expected an object with "prompt" or "messages"')
    known = ("id", "prompt", "messages", "max_new_tokens", *RANGES)
    if unknown := fields.keys() - set(known):
        raise ValueError(f'unknown key "{min(unknown)}" (known: {", ".join(known)})')
    messages, limit = fields.get("messages", []), fields.get("max_new_tokens", 1)
    if not isinstance(fields.get("prompt", ""), str):
        raise ValueError('"prompt" is no text')
    if not isinstance(messages, list) or "messages" in fields and not messages or not all(
            isinstance(m, dict) and isinstance(m.get("role"), str)
            and isinstance(m.get("content"), str) for m in messages):
        raise ValueError('"messages" is no list of {"role": text, "content": text}')
    if type(fields.get("id", 0)) not in (int, str):
        raise ValueError('"id" is neither a number nor text')
    if type(limit) is not int or limit < 1:
        raise ValueError('"max_new_tokens" is no number above 0')
    sampling = {name: own_value(name, fields.pop(name)) for name in RANGES
                if name in fields}
    return dict(fields, sampling=sampling)


def own_value(name: str, value):
    """A request's own temperature, … ValueError names it."""
    try:
        return RANGES[name].of(value)
    except ValueError as e:
        raise ValueError(f'"{name}": {e}') from None


def encode(request: Request, tokenizer, cfg, eos_ids: set[int], args, limit: int) -> Generation:
    """`about` is the request. ValueError where it has no tokens, or `limit` positions no room for a
    new one."""
    messages = request.messages
    if messages is None and request.n_random is not None:
        ids = random_prompt(request.n_random, cfg, args.seed)
    elif messages is None and not request.prompt:
        raise ValueError("the prompt is empty: give it some text")
    elif messages is None:
        ids = tokenizer.encode(request.prompt)
    elif tokenizer.chat_template is None:
        raise ValueError("this model has no chat template")
    elif not any(message["content"] for message in messages):
        raise ValueError("the prompt is empty")
    else:
        if args.system_prompt and messages[0]["role"] != "system":
            messages = [dict(role="system", content=args.system_prompt), *messages]
        ids = encode_chat(tokenizer, messages, **args.chat_template_kwargs or {})
    if not ids:
        raise ValueError("the prompt has no tokens")
    if max(ids) >= cfg.vocab_size:
        raise ValueError(f"the tokenizer gives id {max(ids)}, but the model has {cfg.vocab_size} "
                         "tokens: they do not belong together")
    what = "--max_seq_length" if args.max_seq_length else "the model's context"
    check_length(len(ids), limit, what)
    n_new = min(request.max_new_tokens or args.max_new_tokens, limit - len(ids))
    return Generation(tokenizer, ids, eos_ids, args.stop, n_new,
                      sampling_params(args, **request.sampling), user_data=request)


def encode_all(requests: list[Request], *more) -> tuple[list[Generation], list[str]]:
    """-> what can run, and complaints about the others. more: encode()'s other arguments."""
    work, complaints = [], []
    for request in requests:
        try:
            work.append(encode(request, *more))
        except ValueError as e:
            complaints.append(f"{request.where}: {e}")
    return work, complaints


# ---- Slots --------------------------------------------------------------------------------------

def serve(batch: Batch, work: Iterable[Generation]) -> Iterator[tuple[Generation, int]]:
    """Run them through the rows of a batch, and yield each as it ends, with its slot.

    A row whose text has ended takes the next one. NotFinite where a row's logits are no numbers:
    `generation` says whose.
    """
    slots = Scheduler(batch)
    slots.waiting.extend(work)
    for event in slots.run():
        if event.error:
            event.error.generation = event.generation
            raise event.error
        if event.finish_reason:
            yield event.generation, event.row


# ---- Results ------------------------------------------------------------------------------------

def done_before(path: Path) -> tuple[set[int | str], int]:
    """The ids of the results that an interrupted run left, and the bytes that they take: after
    these comes a line that was cut short, or nothing.

    ValueError where the file is something else.
    """
    ids, end, beginning = set(), 0, b'{"id": '
    with open(path, "rb") as f:
        for i, line in enumerate(f, start=1):
            if not line.endswith(b"\n") and line.startswith(beginning[:len(line)]):
                break
            try:
                result = json.loads(line)
                if "new_ids" not in result:
                    raise KeyError("new_ids")
                ids.add(result["id"])
            except (ValueError, KeyError, TypeError, RecursionError):
                raise ValueError(f"{path}:{i}: not a result of ours: choose another --output, or "
                                 "move this file away") from None
            end += len(line)
    return ids, end


class Results:
    """Writes JSON lines as rows end, to a file, to stdout, or both; else texts, in input order."""

    def __init__(self, as_json: bool):
        self.path = self.file = None
        self.as_json, self.waiting, self.texts = as_json, deque(), {}

    def append_to(self, path: Path) -> set[int | str]:
        """Write to this file too, which is locked -> the ids of the results that are in it.

        OSError where another process writes it, ValueError where it is something else.
        """
        self.path, self.file = path, open(path, "ab", buffering=0)
        if not path.is_file():                     # a pipe, a terminal: nothing to go on from
            return set()
        lock(self.file, path)
        ids, end = done_before(path)
        self.file.truncate(end)                    # without a line that was cut short
        return ids

    def write(self, request: Request, **result) -> None:
        line = json.dumps(result)
        if self.file:
            self._append(f"{line}\n".encode())
        if self.as_json:
            print(line, flush=True)
        elif not self.file:
            i = request.id
            self.texts[i] = f"--- {i} ---\n{request.shown}{result['text']}"
            while self.waiting and self.waiting[0] in self.texts:
                print(self.texts.pop(self.waiting.popleft()), flush=True)

    def _append(self, data: bytes) -> None:
        """OSError where the disk is full, which leaves what the next run removes."""
        try:
            while data:
                data = data[self.file.write(data):]
        except OSError as e:
            raise OSError(f"{self.path} cannot be written: {e.strerror}: run this again with more "
                          "room, it goes on after the results that are there") from None

    def close(self) -> None:
        """Interrupted: show what waited for a row that did not end."""
        for i in self.waiting:
            if i in self.texts:
                print(self.texts[i], flush=True)


def run(work: list[Generation], batch: Batch, results: Results) -> bool:
    """Run all, write each as it ends, and say how fast it went -> whether Ctrl-C ended it."""
    results.waiting.extend(generation.user_data.id for generation in work)
    start, n_tokens, speeds, interrupted = time.perf_counter(), 0, [], False
    try:
        for done, slot in serve(batch, work):
            request, n = done.user_data, len(done.ids)
            n_tokens += n
            speeds.append(n / (done.last_s - done.start_s))
            results.write(
                request, id=request.id, slot=slot, prompt=request.prompt,
                messages=request.messages, text=done.text, prompt_ids=done.prompt_ids,
                new_ids=done.ids, finish_reason=done.finish_reason,
                ttft_s=done.first_s - done.start_s,
                decode_tok_s=(n - 1) / (done.last_s - done.first_s) if n > 1 else None)
    except KeyboardInterrupt:
        interrupted = True
    except NotFinite as e:
        results.close()
        raise ValueError(f"{e.generation.user_data.where}: {e}") from None
    results.close()
    seconds = time.perf_counter() - start
    log(f"{len(speeds)} of {len(work)} prompts, {n_tokens} new tokens in {seconds:.2f} s: "
        f"{n_tokens / seconds:.2f} tok/s in all, "
        f"{statistics.median(speeds) if speeds else 0:.2f} per prompt (median)")
    return interrupted
