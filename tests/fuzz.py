"""Damaged checkpoints of every format and family: each must run or be refused in a line.

    python tests/fuzz.py --n 10000 --seed 1                    # a table of formats and answers
    python tests/fuzz.py --n 500 --formats GGUF,config.json --save /tmp/finds
    python tests/fuzz.py --recipe tests/damaged/finds.jsonl    # cases that were finds, once more

A case is a base (fuzz_bases.py) and what is done to its files, a recipe of one line of JSON. It is run
as a user would: generate.py's command, two tokens. The answers:

    ok          it ran
    refused     one line that names the file, from a place that raises it on purpose
    unforeseen  any other exception, or a refusal that does not say where
    hang, memory, crash        beyond --seconds, beyond --mb, the process died

All but the first two are finds. Cases run one after another in a child, which is made anew after a crash.
What "on purpose" is: the exception was raised by a `raise` of ours, not by Python or a library inside.
"""

import argparse
import collections
import contextlib
import io
import json
import linecache
import os
import pickle
import random
import re
import resource
import select
import shutil
import signal
import struct
import sys
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GPT_FASTER_CACHE", str(ROOT / ".cache/tests"))

import torch  # noqa: E402

from checkpoint import Unforeseen, is_out_of_memory  # noqa: E402
from gpt_faster.cli import session  # noqa: E402
from gpt_faster.cli.common import error_line  # noqa: E402
from gpt_faster.formats.gguf_file import read_gguf_header  # noqa: E402

FINDS = ("unforeseen", "hang", "memory", "crash")
SECONDS, MB = 10, 1500
ARGUMENTS = ("--prompt", "ab th", "--max_new_tokens", "2", "--device", "cpu", "--dtype", "float32")
RAW = ['null', 'true', 'false', '"x"', '""', '-1', '0', '1', '2', '3', '7', '1.5', '-0.0', '1e-300', '1e308', '1e400', 'NaN', 'Infinity',
       '-Infinity', '[]', '{}', '[1]', '["x"]', '[[1]]', '[null]', '{"a": 1}', '{"x": {}}', '9223372036854775807', '9223372036854775808',
       '18446744073709551616', '1099511627776', '4294967296', '2147483648', '65536', '1000000', '1' * 5000, '"\\ud800"', '"\\u0000"',
       '"\\u65e5\\u672c"', '"../../x"', '"' + "x" * 3000 + '"', '"{{"', '"full_attention"', '"(a+)+$"', '[' * 100000, '{"a":' * 3000]
HUGE = [struct.pack("<Q", n) for n in (2**64 - 1, 2**63, 2**60, 2**40, 2**32, 2**31, 10**6, 0, 1)]


# ---- Files as documents: JSON inside of them, to be damaged by its structure -------------------------

class Raw(str):
    """JSON text that stands for a value, be it valid or not."""


def dump(value) -> str:
    """JSON in which Raw is put as it is."""
    found = []

    def hide(v):
        if isinstance(v, Raw):
            found.append(v)
            return f"\ue000{len(found) - 1}\ue001"
        if isinstance(v, dict):
            return {k: hide(x) for k, x in v.items()}
        return [hide(x) for x in v] if isinstance(v, list) else v
    text = json.dumps(hide(value))
    return re.sub(r'"\\ue000(\d+)\\ue001"', lambda m: found[int(m[1])], text)


def as_value(v):
    """Raw as Python's value, where the format is not JSON."""
    if isinstance(v, Raw):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(v)
        return str(v[:50])
    if isinstance(v, dict):
        return {k: as_value(x) for k, x in v.items()}
    return [as_value(x) for x in v] if isinstance(v, list) else v


def gguf_value(v) -> bytes:
    """A metadata value with its type, as its Python type says."""
    def text(s):
        data = s.encode("utf-8", "surrogatepass")
        return struct.pack("<Q", len(data)) + data
    if isinstance(v, bool):
        return struct.pack("<I?", 7, v)
    if isinstance(v, int):
        return struct.pack("<Iq" if v < 0 else "<IQ" if v >> 32 else "<II", 11 if v < 0 else 10 if v >> 32 else 4,
                           max(v, -2**63) if v < 0 else v & 2**64 - 1)
    if isinstance(v, float):
        return struct.pack("<Id", 12, v)
    if isinstance(v, list):
        kind, = struct.unpack("<I", gguf_value(v[0])[:4]) if v else (4,)
        items = [gguf_value(x if type(x) is type(v[0]) else v[0])[4:] for x in v]
        if any(len(x) != len(items[0]) for x in items) and kind not in (8, 9):
            kind, items = 12, [struct.pack("<d", float(x)) for x in v]
        return struct.pack("<IIQ", 9, kind, len(v)) + b"".join(items)
    return struct.pack("<I", 8) + text(v if isinstance(v, str) else json.dumps(v))


def read_document(data: bytes, name: str):
    """What a file says beside its numbers -> a dictionary, and a function that puts it back."""
    if name.endswith(".json"):
        return json.loads(data), lambda d: dump(d).encode("utf-8", "surrogatepass")
    if name.endswith(".safetensors"):
        n, = struct.unpack_from("<Q", data)

        def with_header(d):
            header = dump(d).encode()
            return struct.pack("<Q", len(header)) + header + data[8 + n:]
        return json.loads(data[8:8 + n]), with_header
    if name.endswith(".gguf"):
        metadata, infos, start = read_gguf_header(memoryview(data))

        def with_metadata(d):
            d = as_value(d)
            out = [b"GGUF", struct.pack("<IQQ", 3, len(d["tensors"]), len(d["metadata"]))]
            for key, value in d["metadata"].items():
                out += [struct.pack("<Q", len(key.encode())), key.encode(), gguf_value(value)]
            for info in d["tensors"]:
                with contextlib.suppress(struct.error, TypeError, ValueError, AttributeError):
                    name, shape, kind, at = info
                    head = struct.pack("<Q", len(name.encode())) + name.encode() + struct.pack("<I", len(shape))
                    out.append(head + struct.pack(f"<{len(shape)}QIQ", *shape[::-1], kind, at))
            whole = b"".join(out)
            return whole + b"\0" * (-len(whole) % 32) + data[start:]
        return dict(metadata=metadata, tensors=[[n, list(s), k, at] for n, s, k, at in infos]), with_metadata
    content = torch.load(io.BytesIO(data), weights_only=True)
    key = "model" if "model" in content else None
    document = {k: v for k, v in content.items() if k != key and not isinstance(v, torch.Tensor)}
    document = json.loads(json.dumps(document))

    def with_content(d):
        out = io.BytesIO()
        torch.save({**as_value(d), **({key: content[key]} if key else content)}, out)
        return out.getvalue()
    return document, with_content


def paths_in(value, prefix=()) -> list[tuple]:
    """Every key path of a document; of long lists the first and the last."""
    found = [prefix] if prefix else []
    items = list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    for key, inner in items if len(items) < 12 or isinstance(value, dict) and len(prefix) < 1 else items[:3] + items[-3:]:
        found += paths_in(inner, (*prefix, key))
    return found


def get(value, path):
    for key in path:
        value = value[key]
    return value


# ---- Damage: what may be done to a file, and doing it ------------------------------------------------

def has_document(name: str) -> bool:
    return name.endswith((".json", ".safetensors", ".gguf", ".pth", ".pt"))


def span(data: bytes, name: str, rng) -> tuple[int, int]:
    """Where bytes are changed: mostly where a format says how it is to be read."""
    if rng.random() < 0.15:
        return 0, len(data)
    if name.endswith(".safetensors"):
        return 0, 8 + struct.unpack_from("<Q", data)[0]
    if name.endswith(".gguf"):
        return 0, read_gguf_header(memoryview(data))[2]
    if data[:2] == b"PK":
        return rng.choice([(0, 600), (max(0, len(data) - 3000), len(data))])
    return 0, min(len(data), 6000)


def draw(rng, base: Path, info: dict) -> list:
    """A recipe: the ops of one case."""
    name = rng.choice(info["damaged"])
    data = (base / name).read_bytes()
    as_json = has_document(name) and rng.random() < (0.85 if name.endswith(".json") else 0.5)
    return [draw_in_document(rng, name, data) if as_json else draw_bytes(rng, name, data) for _ in range(rng.choice([1, 1, 1, 2, 3]))]


def draw_in_document(rng, name, data):
    document, _ = read_document(data, name)
    if not document:
        return draw_bytes(rng, name, data)
    path = rng.choice(paths_in(document))
    what = rng.random()
    if what < 0.6:
        return ["set", name, path, rng.choice(RAW)]
    if what < 0.7:
        old = get(document, path)
        near = [old * 2, old + 1, old - 1, old // 2 if isinstance(old, int) else old / 2, -old, old * 1000] if type(old) in (int, float) else [None]
        return ["set", name, path, json.dumps(rng.choice(near))]
    if what < 0.8:
        return ["set", name, path, dump(get(document, rng.choice(paths_in(document))))[:20000]]
    if what < 0.9:
        return ["drop", name, path]
    return ["rename", name, path, rng.choice(["x", "layer_types", "rope_scaling", "quantization_config", "num_experts", "text_config", "", "0"])]


def draw_bytes(rng, name, data):
    low, high = span(data, name, rng)
    at, what = rng.randrange(low, max(low + 1, high)), rng.random()
    if what < 0.45:
        new = bytes(rng.randrange(256) for _ in range(rng.randint(1, 8)))
        return ["bytes", name, at, new.hex()]
    if what < 0.55:
        return ["bytes", name, at, bytes([data[at] ^ 1 << rng.randrange(8)]).hex()]
    if what < 0.7:
        return ["bytes", name, at, rng.choice(HUGE).hex()]
    if what < 0.8:
        return ["cut", name, rng.choice([at, rng.randrange(len(data) + 1)])]
    if what < 0.88:
        return ["swap", name, at, rng.randrange(low, max(low + 1, high)), rng.choice([1, 4, 8, 16, 64, 512])]
    if what < 0.94:
        return ["insert", name, at, bytes(rng.randrange(256) for _ in range(rng.randint(1, 64))).hex()]
    if data[:2] == b"PK":
        entry = zipfile.ZipFile(io.BytesIO(data)).namelist()[0]
        return ["entry", name, entry, rng.randrange(3000), bytes(rng.randrange(256) for _ in range(rng.randint(1, 4))).hex()]
    return ["fill", name, at, rng.randint(1, 256), rng.choice([0, 32, 255])]


def damaged(data: bytes, op: list) -> bytes:
    """A file's bytes after one op. What no longer fits (after another op, in another library's base) changes nothing."""
    what, name, *how = op
    if what in ("set", "drop", "rename"):
        *outer, key = how[0]
        try:
            document, put = read_document(data, name)
            place = get(document, outer)
            if what == "set":
                place[key] = Raw(how[1])
            elif what == "drop":
                del place[key]
            elif isinstance(place, dict):
                place[how[1]] = place.pop(key)
            return put(document)
        except Exception:
            return data
    if what == "bytes":
        new = bytes.fromhex(how[1])
        return data[:how[0]] + new + data[how[0] + len(new):]
    if what == "cut":
        return data[:how[0]]
    if what == "insert":
        return data[:how[0]] + bytes.fromhex(how[1]) + data[how[0]:]
    if what == "fill":
        return data[:how[0]] + bytes([how[2]]) * how[1] + data[how[0] + how[1]:]
    if what == "text":
        return how[0].encode("utf-8", "surrogatepass")
    if what == "swap":
        (a, b), n = sorted(how[:2]), how[2]
        n = min(n, b - a)
        return data[:a] + data[b:b + n] + data[a + n:b] + data[a:a + n] + data[b + n:]
    if what == "entry":                                    # of an archive, whose checksum is put right
        out = io.BytesIO()
        try:
            old = zipfile.ZipFile(io.BytesIO(data))
            entries = {entry: old.read(entry) for entry in old.namelist()}
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, EOFError):
            return data
        with zipfile.ZipFile(out, "w") as archive:
            for entry, inner in entries.items():
                archive.writestr(entry, damaged(inner, ["bytes", name, *how[1:]]) if entry == how[0] else inner)
        return out.getvalue()
    raise ValueError(f"unknown op {what}")


def put_case(base: Path, ops: list, directory: Path) -> None:
    """The base's files as links, and copies of those that the ops change."""
    for path in base.rglob("*"):
        target = directory / path.relative_to(base)
        if path.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        elif path.name != "base.json":
            target.symlink_to(path)
    for op in ops:
        target = directory / op[1]
        data = damaged(target.read_bytes() if target.exists() else b"", op)
        target.unlink(missing_ok=True)
        target.write_bytes(data)


# ---- One case, and what it answers -------------------------------------------------------------------

class TooLong(BaseException):
    """The alarm."""


def raised_by(e: BaseException) -> tuple[str, str]:
    """The innermost frame's file and line; of ours, where there is one."""
    frames, at = [], e.__traceback__
    while at is not None:
        code = at.tb_frame.f_code
        frames.append((code.co_filename, at.tb_lineno))
        at = at.tb_next
    ours = [f for f in frames if f[0].startswith(str(ROOT)) and "/.venv" not in f[0]] or frames
    file, line = ours[-1]
    source = linecache.getline(file, line).strip() if frames[-1] == ours[-1] else ""
    return f"{Path(file).relative_to(ROOT) if file.startswith(str(ROOT)) else file}:{line}", source


def judge(e: BaseException, directory: Path) -> tuple[str, str]:
    """An exception -> the answer, and a line about it."""
    if is_out_of_memory(e):
        return "memory", f"{type(e).__name__} at {raised_by(e)[0]}"
    outer = e
    while e.__cause__ is not None:                         # messages.reading() wraps
        e = e.__cause__
    place, source = raised_by(e)
    text = f"{type(e).__name__} at {place}: {str(outer)[:300]!r}"
    on_purpose = source.startswith("raise") or isinstance(e, OSError) and e.filename
    if isinstance(outer, Unforeseen) or not isinstance(e, (ValueError, OSError, ImportError)) or not on_purpose:
        return "unforeseen", text
    if str(directory) not in str(outer) and not place.startswith(("gpt_faster/cli/", "generate.py")):
        return "unforeseen", "names no file: " + text
    if len(error_line(outer).splitlines()) > 1 or len(error_line(outer)) > 1100:
        return "unforeseen", "more than a line: " + text
    return "refused", text


def run_case(base: Path, info: dict, ops: list, seconds: float) -> tuple[str, str]:
    """In a directory of its own, with an alarm."""
    directory = Path(tempfile.mkdtemp(prefix="fuzz-"))
    argv = ["-m", str(directory / info["model"]) if info["model"] else str(directory), *ARGUMENTS]
    argv += [a.replace("{}", str(directory)) for a in info["more"]]

    def too_long(*_):
        raise TooLong
    signal.signal(signal.SIGALRM, too_long)
    try:
        put_case(base, ops, directory)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as err:
            session.run(argv)
        return "ok", ""
    except TooLong as e:
        return "hang", raised_by(e)[0]
    except SystemExit:
        return "refused", err.getvalue()[-200:]
    except (Exception, KeyboardInterrupt) as e:
        return judge(e, directory)
    except BaseException as e:                             # pyo3's panics
        return "crash", f"{type(e).__name__} at {raised_by(e)[0]}: {str(e)[:200]}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        shutil.rmtree(directory, ignore_errors=True)


def run_tasks(bases, tasks: int, answers: int, seconds: float, mb: int):
    """A worker's loop, in a process of its own: cases from one pipe, answers to the other. Does not return."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)                                    # panics of libraries
    used = int(re.search(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (used + (mb << 20),) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with os.fdopen(tasks, "rb") as given, os.fdopen(answers, "wb") as out:
        while True:
            try:
                base, ops = pickle.load(given)
            except EOFError:
                os._exit(0)
            pickle.dump(run_case(*bases[base], ops, seconds), out)
            out.flush()


class Worker:
    """A child process that runs cases; it is killed where it neither answers nor ends.

    is_fork: of this process, with its patches, which must not have run anything on several threads: a fork has none of
    them, and waits for them.
    """

    def __init__(self, bases, seconds: float, mb: int, is_fork: bool = False):
        self.bases, self.seconds, self.mb, self.is_fork = bases, seconds, mb, is_fork
        self.pid = None

    def start(self) -> None:
        (tasks, self.tasks), (self.answers, answers) = os.pipe(), os.pipe()
        if self.is_fork:
            self.pid = os.fork()
            if not self.pid:
                os.close(self.tasks)
                run_tasks(self.bases, tasks, answers, self.seconds, self.mb)
        else:
            given = [str(number) for number in (tasks, answers, self.seconds, self.mb)]
            os.set_inheritable(tasks, True)
            os.set_inheritable(answers, True)
            self.pid = os.posix_spawn(sys.executable, [sys.executable, __file__, "--worker", *given], os.environ)
        os.close(tasks)
        os.close(answers)

    def run(self, base: str, ops: list) -> tuple[str, str]:
        if self.pid is None:
            self.start()
        os.write(self.tasks, pickle.dumps((base, ops)))
        ready, _, _ = select.select([self.answers], [], [], 2 * self.seconds + 5)
        if ready:
            data = os.read(self.answers, 1 << 16)
            if data:
                return pickle.loads(data)
            return "crash", f"ended with status {self.stop()}"
        os.kill(self.pid, signal.SIGKILL)
        self.stop()
        return "hang", "in a library's code"

    def stop(self) -> int:
        if self.pid is None:
            return 0
        os.close(self.tasks)
        os.close(self.answers)
        _, status = os.waitpid(self.pid, 0)
        self.pid = None
        return status


# ---- Many --------------------------------------------------------------------------------------------

def case(seed: int, i: int, bases: dict, formats: list[str]) -> tuple[str, list]:
    """Case i of a seed: formats take turns, the rest is drawn."""
    rng = random.Random(f"{seed}:{i}")
    kind = formats[i % len(formats)]
    name = rng.choice(sorted(n for n, (_, info) in bases.items() if info["format"] == kind))
    return name, draw(rng, *bases[name])


def smaller(worker, base, ops, answer):
    """Fewer ops with the same answer."""
    for op in list(ops):
        rest = [o for o in ops if o is not op]
        if rest and worker.run(base, rest)[0] == answer:
            ops = rest
    return ops


def table(counts: dict) -> str:
    """Markdown: a line for each format, a column for each answer."""
    answers = ["ok", "refused", *FINDS]
    lines = ["| format | cases | " + " | ".join(answers) + " |", "|---" * (len(answers) + 2) + "|"]
    counts = dict(sorted(counts.items()))
    total = collections.Counter()
    for counter in counts.values():
        total += counter
    for kind, counter in {**counts, "all": total}.items():
        lines.append(f"| {kind} | {sum(counter.values())} | " + " | ".join(str(counter[a]) for a in answers) + " |")
    return "\n".join(lines)


def load_bases(only=None) -> dict:
    import fuzz_bases
    return {name: (path, json.loads((path / "base.json").read_text())) for name, path in fuzz_bases.make(only).items()}


def main() -> int:
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["--worker"]:
        tasks, answers, seconds, mb = sys.argv[2:]
        run_tasks(load_bases(), int(tasks), int(answers), float(seconds), int(mb))
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--n", type=int, default=1000, help="cases")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--start", type=int, default=0, help="the first case's number")
    parser.add_argument("--formats", help="some of the table's, with commas")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="what a case may take")
    parser.add_argument("--mb", type=int, default=MB, help="what it may allocate")
    parser.add_argument("--save", type=Path, help="a file that finds are appended to, one recipe a line")
    parser.add_argument("--recipe", type=Path, help="run the recipes of this file instead")
    parser.add_argument("--limit_s", type=float, default=1e9, help="stop after so many seconds")
    args = parser.parse_args()
    bases = load_bases()
    formats = sorted({info["format"] for _, info in bases.values()})
    if args.formats:
        formats = [f for f in formats if any(f.startswith(x) for x in args.formats.split(","))]
    worker, counts, seen = Worker(bases, args.seconds, args.mb, is_fork=True), collections.defaultdict(collections.Counter), collections.Counter()
    start = time.perf_counter()
    cases = ((i, *case(args.seed, i, bases, formats)) for i in range(args.start, args.start + args.n))
    if args.recipe:
        cases = [(i, r["base"], r["ops"]) for i, r in enumerate(map(json.loads, args.recipe.read_text().splitlines()))]
    for i, base, ops in cases:
        answer, text = worker.run(base, ops)
        counts[bases[base][1]["format"]][answer] += 1
        if answer in FINDS:
            key = re.sub(r"fuzz-\w+|0x\w+|'.*", "", text)
            seen[answer, key] += 1
            if seen[answer, key] == 1:
                ops = smaller(worker, base, ops, answer)
                print(f"{i} {base} {answer}: {text[:400]}\n    {json.dumps(ops)[:300]}", flush=True)
                if args.save:
                    with open(args.save, "a") as f:
                        f.write(json.dumps(dict(base=base, ops=ops, answer=answer, text=text[:200])) + "\n")
        if time.perf_counter() - start > args.limit_s:
            print(f"stopped before case {i + 1}")
            break
    worker.stop()
    print(table(counts))
    print(f"seed {args.seed}, {sum(sum(c.values()) for c in counts.values())} cases in {time.perf_counter() - start:.0f} s, {len(seen)} kinds of finds")
    return 1 if seen else 0


if __name__ == "__main__":
    sys.exit(main())
