"""Continuous batching of many prompts: when a sequence ends, its slot takes the next prompt.

It owns requests and results. It drives a generate.Batch and knows no model and no device. Results
are JSON lines:

    python generate.py --prompts_file prompts.jsonl --batch_size 8 --output results.jsonl
"""

import hashlib
import json
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from checkpoint import lock
from generate import (
    Batch,
    NotFinite,
    check_ids,
    check_length,
    flag_prompts,
    log,
    random_prompt,
    read_stdin,
    sampling_params,
)
from gpt_faster.cli.thoughts import with_thoughts
from gpt_faster.decoding.scheduler import Generation, Scheduler
from gpt_faster.text.chat_template import encode_chat
from gpt_faster.text.reasoning import find_format, separate, thoughts_of
from sampling import RANGES
from speculate import SpeculativeBatch

# ---- Requests -----------------------------------------------------------------------------------

@dataclass(frozen=True)
class Request:
    """A prompt, or messages for the chat template.

    where: its name in error messages; echo: text to print before the output; sampling: overrides
    of the flags; n_random: an integer --prompt, which means that many random tokens.
    """

    id: int | str
    where: str
    prompt: str | None = None
    messages: list[dict] | None = None
    max_new_tokens: int | None = None
    sampling: dict = field(default_factory=dict)
    echo: str = ""
    n_random: int | None = None


def read_requests(args) -> tuple[list[Request], list[str]]:
    """Requests from --prompts_file, --prompt, stdin or the default -> valid requests, error
    messages."""
    if args.prompts_file:
        requests, errors = read_prompts(args.prompts_file)
        if not requests and not errors:
            raise ValueError(f"{args.prompts_file}: no prompts in this file")
    else:
        prompts, errors = flag_prompts(args), []
        where = "--prompt" if len(prompts) == 1 else "--prompt {}"
        requests = [Request(i, where.format(i + 1), text, n_random=n_random)
                    for i, (text, n_random) in enumerate(prompts)]
    if args.chat:                                  # there digits are a message
        requests = [r if r.prompt is None else
                    replace(r, messages=[dict(role="user", content=r.prompt)], n_random=None)
                    for r in requests]
    echo = [r if r.messages else replace(r, echo=r.prompt) for r in requests]
    return echo, errors


def read_prompts(path: Path) -> tuple[list[Request], list[str]]:
    """Read one prompt per line, or one object per line of a .jsonl -> requests, error messages.

    An object has "prompt" or "messages", and optionally "id" (default: its index),
    "max_new_tokens" and sampling parameters. Empty lines are skipped. "-" is stdin, with objects if
    the first line is one. OSError or ValueError if the file cannot be read.
    """
    has_objects = path.suffix == ".jsonl"
    if str(path) == "-":
        path, lines = "stdin", read_stdin().split("\n")
        has_objects = is_object(next(filter(str.strip, lines)))
        if has_objects:
            log("note: stdin is read as JSON lines, as its first line is an object")
    else:
        lines = read_lines(path)
    lines = [(i, line.removesuffix("\r")) for i, line in enumerate(lines, start=1) if line.strip()]
    requests, errors, line_of = [], [], {}
    for index, (i, line) in enumerate(lines):
        try:
            fields = parse(line) if has_objects else dict(prompt=line)
            request = Request(**{"id": index, **fields}, where=f"{path}:{i}")
            if request.id in line_of:
                raise ValueError(f"duplicate id {request.id!r}, also in line {line_of[request.id]}")
            line_of[request.id] = i
            requests.append(request)
        except ValueError as e:
            errors.append(f"{path}:{i}: {e}")
    return requests, errors


def read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as e:
        raise ValueError(f"{path}: not UTF-8 text: {e.reason} at byte {e.start}") from None


def is_object(line: str) -> bool:
    """Whether a line is a JSON object."""
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def parse(line: str) -> dict:
    """Parse a JSON line -> Request's fields. ValueError if it is invalid."""
    try:
        fields = json.loads(line)
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("contains a lone surrogate (half of a UTF-16 pair)") from None
    except (ValueError, RecursionError) as e:
        raise ValueError(f"not valid JSON ({e})") from None
    if not isinstance(fields, dict) or ("prompt" in fields) == ("messages" in fields):
        raise ValueError('expected an object with "prompt" or "messages"')
    known = ("id", "prompt", "messages", "max_new_tokens", *RANGES)
    if unknown := fields.keys() - set(known):
        raise ValueError(f'unknown key "{min(unknown)}" (known: {", ".join(known)})')
    messages, limit = fields.get("messages", []), fields.get("max_new_tokens", 1)
    if not isinstance(fields.get("prompt", ""), str):
        raise ValueError('"prompt" must be a string')
    if not isinstance(messages, list) or "messages" in fields and not messages or not all(
            isinstance(m, dict) and isinstance(m.get("role"), str)
            and isinstance(m.get("content"), str) for m in messages):
        raise ValueError('"messages" must be a list of {"role": string, "content": string}')
    if type(fields.get("id", 0)) not in (int, str):
        raise ValueError('"id" must be an integer or a string')
    if type(limit) is not int or limit < 1:
        raise ValueError('"max_new_tokens" must be an integer above 0')
    sampling = {name: sampling_value(name, fields.pop(name)) for name in RANGES
                if name in fields}
    return dict(fields, sampling=sampling)


def sampling_value(name: str, value):
    """A validated sampling parameter of a request. ValueError names it."""
    try:
        return RANGES[name].of(value)
    except ValueError as e:
        raise ValueError(f'"{name}": {e}') from None


def encode(request: Request, tokenizer, cfg, eos_ids: set[int], args, limit: int) -> Generation:
    """Tokenize a request, which becomes the generation's `about`.

    limit: context length. ValueError if the prompt is empty or leaves no room for a new token.
    """
    messages = request.messages
    if messages is None and request.n_random is not None:
        ids = random_prompt(request.n_random, cfg, args.seed)
    elif messages is None and not request.prompt:
        raise ValueError("the prompt is empty")
    elif messages is None:
        ids = tokenizer.encode(request.prompt)
    elif tokenizer.chat_template is None:
        raise ValueError("this model has no chat template: add a chat_template.jinja to its "
                         "directory (Mistral's, with tekken.json, often have none)")
    elif not any(message["content"] for message in messages):
        raise ValueError("the prompt is empty")
    else:
        if args.system_prompt and messages[0]["role"] != "system":
            messages = [dict(role="system", content=args.system_prompt), *messages]
        ids = encode_chat(tokenizer, messages, **args.chat_template_kwargs or {})
    if not ids:
        raise ValueError("the prompt has no tokens")
    check_ids(ids, cfg.vocab_size)
    what = "--max_seq_length" if args.max_seq_length else "the model's context"
    check_length(len(ids), limit, what)
    n_new = min(request.max_new_tokens or args.max_new_tokens, limit - len(ids))
    generation = Generation(tokenizer, ids, eos_ids, args.stop, n_new,
                            sampling_params(args, **request.sampling), user_data=request)
    if messages is not None and not args.json_schema:
        separate(generation, find_format(tokenizer))
    return generation


def encode_all(requests: list[Request], *encode_args) -> tuple[list[Generation], list[str]]:
    """-> generations, and messages for requests that are invalid. encode_args: of encode()."""
    work, errors = [], []
    for request in requests:
        try:
            work.append(encode(request, *encode_args))
        except ValueError as e:
            errors.append(f"{request.where}: {e}")
    return work, errors


# ---- Slots --------------------------------------------------------------------------------------

def serve(batch: Batch, work: Iterable[Generation]) -> Iterator[tuple[Generation, int]]:
    """Run generations in the slots of a batch; yield each with its slot when it ends.

    NotFinite, with a `generation` attribute, if logits are NaN or infinite.
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

class Asked(NamedTuple):
    """What a result answers. A result is reused only if all of it is the same."""

    prompt: str                                    # a digest of the prompt and its token ids
    parameters: str                                # JSON: the model, and what else decides

    @classmethod
    def of(cls, prompt, messages, prompt_ids, parameters) -> "Asked":
        digest = hashlib.sha256(json.dumps([prompt, messages, prompt_ids]).encode()).hexdigest()
        return cls(digest[:32], sys.intern(json.dumps(parameters, sort_keys=True)))

    def difference(self, now: "Asked") -> str:
        """What differs now, in a few words."""
        if self.prompt != now.prompt:
            return "the prompt"
        old, new = json.loads(self.parameters) or {}, json.loads(now.parameters)
        names = [name for name in new if name not in old or old[name] != new[name]]
        return ", ".join(f"{name} {old.get(name)}, now {new[name]}" for name in names[:3])


def read_finished(path: Path) -> tuple[dict[int | str, Asked], int]:
    """Read the results of an interrupted run -> what they answer, by id, and their length in bytes.

    A partial last line is not counted. ValueError if the file has other contents.
    """
    finished, end, line_start = {}, 0, b'{"id": '
    with open(path, "rb") as f:
        for i, line in enumerate(f, start=1):
            if not line.endswith(b"\n") and line.startswith(line_start[:len(line)]):
                break
            try:
                result = json.loads(line)
                if "new_ids" not in result:
                    raise KeyError("new_ids")
                names = "prompt", "messages", "prompt_ids", "parameters"
                finished[result["id"]] = Asked.of(*map(result.get, names))
            except (ValueError, KeyError, TypeError, RecursionError):
                raise ValueError(f"{path}:{i}: not a result of an earlier run: choose another "
                                 "--output, or move this file") from None
            end += len(line)
    return finished, end


class Results:
    """Write results: JSON lines to a file or stdout as they finish, or texts in input order."""

    def __init__(self, as_json: bool, hide_thoughts: bool = False):
        self.path, self.file, self.hide_thoughts = None, None, hide_thoughts
        self.as_json, self.waiting, self.texts = as_json, deque(), {}

    def append_to(self, path: Path) -> dict[int | str, Asked]:
        """Lock a file and append results to it -> what the results already in it answer, by id.

        OSError if another process is writing it, ValueError if it has other contents.
        """
        self.path, self.file = path, open(path, "ab", buffering=0)
        if not path.is_file():                     # a pipe or terminal: nothing to resume
            return {}
        lock(self.file, path)
        finished, end = read_finished(path)
        self.file.truncate(end)                    # remove a partial last line
        return finished

    def move_away(self, ids: set[int | str]) -> None:
        """Move the results of these ids to FILE.old: they will be computed again."""
        if not ids or not self.file:
            return
        lines = self.path.read_bytes().splitlines(keepends=True)
        is_old = [json.loads(line)["id"] in ids for line in lines]
        with open(f"{self.path}.old", "ab") as file:
            file.writelines(line for line, old in zip(lines, is_old) if old)
            os.fsync(file.fileno())
        partial = Path(f"{self.path}.partial")
        file = open(partial, "wb", buffering=0)
        lock(file, partial)
        file.write(b"".join(line for line, old in zip(lines, is_old) if not old))
        os.fsync(file.fileno())
        os.replace(partial, self.path)
        self.file.close()
        self.file = file

    def write(self, request: Request, **result) -> None:
        line = json.dumps(result)
        if self.file:
            self._append(f"{line}\n".encode())
        if self.as_json:
            print(line, flush=True)
        elif not self.file:
            i, thoughts = request.id, result.get("reasoning_content")
            text = with_thoughts(None if self.hide_thoughts else thoughts, result["text"])
            self.texts[i] = f"--- {i} ---\n{request.echo}{text}"
            while self.waiting and self.waiting[0] in self.texts:
                print(self.texts.pop(self.waiting.popleft()), flush=True)

    def _append(self, data: bytes) -> None:
        """OSError if the disk is full; the next run removes the partial line."""
        try:
            while data:
                data = data[self.file.write(data):]
        except OSError as e:
            raise OSError(f"{self.path} cannot be written: {e.strerror}: free some space and run "
                          "this again to resume") from None

    def close(self) -> None:
        """After an interruption: print texts that waited for an earlier one."""
        for i in self.waiting:
            if i in self.texts:
                print(self.texts[i], flush=True)


def to_compute(work: list[Generation], requests: list[Request], parameters: dict,
               finished: dict[int | str, Asked], results: Results) -> list[Generation]:
    """The generations without a result that answers the same. Moves other results of these ids
    away, with a note."""
    now = {each.user_data.id: asked(each, parameters) for each in work}
    other = {request.id: now.get(request.id) for request in requests if request.id in finished
             and finished[request.id] != now.get(request.id)}
    same = {id_ for id_, value in now.items() if finished.get(id_) == value}
    if other:
        id_, new = next(iter(other.items()))
        difference = finished[id_].difference(new) if new else "the prompt"
        log(f"note: {results.path}: {len(other)} results have another prompt, model or parameters "
            f"(of {id_}: {difference}): computed again; the old ones are in {results.path}.old")
        results.move_away(set(other))
    work = [each for each in work if each.user_data.id not in same]
    if same:
        log(f"{results.path} has {len(same)} results already: {len(work)} prompts to go")
    return work


def asked(generation: Generation, parameters: dict) -> Asked:
    request = generation.user_data
    return Asked.of(request.prompt, request.messages, generation.prompt_ids,
                    all_parameters(generation, parameters))


def all_parameters(generation: Generation, parameters: dict) -> dict:
    """parameters: those of all prompts; the sampling of the batch's generator has their seed."""
    own = asdict(generation.params)
    return {**parameters, **{name: value for name, value in own.items() if value is not None},
            "max_new_tokens": generation.max_new}


def run(work: list[Generation], batch: Batch, results: Results, parameters: dict) -> bool:
    """Run all, write each result, and log the speed -> whether Ctrl-C interrupted it.

    parameters: of all prompts: what was asked, written with each result.
    """
    results.waiting.extend(generation.user_data.id for generation in work)
    start, n_tokens, speeds, interrupted = time.perf_counter(), 0, [], False
    try:
        for done, slot in serve(batch, work):
            request, n = done.user_data, len(done.ids)
            n_tokens += n
            speeds.append(n / (done.last_s - done.start_s))
            thoughts = thoughts_of(done)
            more = {} if thoughts is None else dict(reasoning_content=thoughts)
            if isinstance(batch, SpeculativeBatch):
                more.update(rounds=done.n_rounds, accepted=done.n_accepted)
            results.write(
                request, id=request.id, slot=slot, prompt=request.prompt,
                messages=request.messages, parameters=all_parameters(done, parameters),
                text=done.text, **more, prompt_ids=done.prompt_ids, new_ids=done.ids,
                finish_reason=done.finish_reason, ttft_s=done.first_s - done.start_s,
                decode_tok_s=(n - 1) / (done.last_s - done.first_s) if n > 1 else None)
    except KeyboardInterrupt:
        interrupted = True
    except NotFinite as e:
        results.close()
        raise ValueError(f"{e.generation.user_data.where}: {e}") from None
    results.close()
    seconds = time.perf_counter() - start
    log(f"{len(speeds)} of {len(work)} prompts, {n_tokens} new tokens in {seconds:.2f} s: "
        f"{n_tokens / seconds:.2f} tok/s in total, "
        f"{statistics.median(speeds) if speeds else 0:.2f} per prompt (median)")
    return interrupted
