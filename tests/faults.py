"""What test_faults.py has done to processes: commands in children that are killed, or that lack disk or memory.

A fork server has imported torch once, so that a child starts in milliseconds and a command can be killed some twenty
times in a test. In a child a command is run as it is from a shell: its file, its arguments, its own stdout and stderr.
"""

import ctypes
import itertools
import json
import multiprocessing
import os
import pwd
import random
import resource
import signal
import sys
import threading
import time
import types
from contextlib import suppress
from pathlib import Path

import torch

from gpt_faster import loading
from gpt_faster.formats.load import read_checkpoint
from gpt_faster.kernels.cpu import native

ROOT = Path(__file__).resolve().parent.parent
N_KILLS = int(os.environ.get("GPT_FASTER_KILLS", 15))      # of each kind, in a test
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)
NEW_NAMESPACE, PRIVATE, READ_ONLY, REMOUNT = 0x20000, 0x44000, 1, 32         # <linux/sched.h>, <sys/mount.h>


def server():
    """What starts children. It leaves when this process does."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["gpt_faster.cli.session", "gpt_faster.cli.quantizing", "faults"])
    os.environ["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tests'}"
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
    return context


class Child:
    """A call in a process of its own, as soon as it has begun; what it says goes to a file."""

    def __init__(self, folder: Path, call, *args, env=None, cwd=None):
        self.log = folder / f"log-{random.randrange(1 << 60)}"
        ours, theirs = _context().Pipe(duplex=False)
        self.process = _context().Process(target=_begin, args=(self.log, theirs, env or {}, cwd or folder, call, args))
        self.process.start()
        theirs.close()
        ours.recv()
        self.start = time.monotonic()

    def kill_after(self, seconds, signal_number=signal.SIGKILL):
        self.process.join(max(0, self.start + seconds - time.monotonic()))
        if self.process.exitcode is None:
            with suppress(ProcessLookupError):             # it has just ended
                os.kill(self.process.pid, signal_number)
        return self.wait()

    def wait(self, seconds=120):
        """-> the exit status, the negative number of a signal."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            self.process.kill()
            raise AssertionError(f"it hangs: {self.said()}")
        self.seconds = time.monotonic() - self.start
        return self.process.exitcode

    def said(self):
        return self.log.read_text()

    def error(self):
        """The one line that it ended with."""
        lines = [line for line in self.said().splitlines() if "error: " in line]
        assert len(lines) == 1 and "Traceback" not in self.said(), self.said()
        return lines[0]


_server = []


def _context():
    if not _server:
        _server.append(server())
    return _server[0]


def _begin(log, pipe, env, cwd, call, args):
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for n in (1, 2):
        os.dup2(fd, n)
    sys.stdout, sys.stderr = (open(n, "w", closefd=False) for n in (1, 2))
    os.environ.update(env)
    os.chdir(cwd)
    random.seed()
    for number in (signal.SIGHUP, signal.SIGTERM):         # a shell's background jobs may ignore them
        signal.signal(number, signal.SIG_DFL)
    pipe.send("begun")
    call(*args)


def command(file, *argv):
    """In a child: as `python FILE ARGV` does, but for the file's own compiling, which needs memory before our first line."""
    sys.argv = [str(ROOT / file), *map(str, argv)]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = sys.argv[0]
    exec(COMPILED.get(file) or compiled(file), vars(main))


def compiled(file):
    return compile((ROOT / file).read_text(), str(ROOT / file), "exec")


COMPILED = {"generate.py": compiled("generate.py")}        # by the server, once: memory is limited in the child


def keep(checkpoint):
    """In a child: weights are made, and kept."""
    loading.MIN_SAVE_SECONDS = 0
    loading.load(read_checkpoint(checkpoint), torch.bfloat16, "cpu", "compile")
    for thread in set(threading.enumerate()) - {threading.current_thread()}:
        if not thread.daemon:
            thread.join()                                  # it keeps them, as the interpreter's end would wait for it


def build():
    """In a child: the operations are compiled, loaded, and compute."""
    native.library.cache_clear()
    assert native.is_available(), "not built"
    x, weight = torch.ones(1, 64), torch.ones(64, 64)
    assert (native.product(x, *native.pack_weight(weight), (64, 64)) == 64).all()


def limited(kind, limit, call, *args):
    """In a child, under a limit of its resources; of memory: beyond what it has already."""
    if kind == resource.RLIMIT_AS:
        limit += int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(kind, (limit, resource.getrlimit(kind)[1]))
    call(*args)


def mounted(folder: Path, options: str, flags: int, call, *args):
    """In a child: on a file system in memory that no other process sees; status 77 where that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEW_NAMESPACE) or libc.mount(None, b"/", None, PRIVATE, None) or mount(libc, folder, f"{options},mode=755", flags):
        sys.exit(77)
    call(*args)


def mount(libc, folder: Path, options: str, flags: int) -> int:
    return libc.mount(b"none", bytes(folder), b"tmpfs", flags, options.encode())


def status_of(call, *args) -> int:
    try:
        call(*args)
        return 0
    except SystemExit as e:
        return e.code or 0


def fill_and_go_on(folder: Path, call, *args):
    """On a disk that is full, and again when it has room: how each ended, and what it left, as lines on stdout."""
    for options in (None, "size=1g"):
        if options:
            mount(ctypes.CDLL(None), folder, options, REMOUNT)
        status = status_of(call, *args)
        files = {str(p.relative_to(folder)): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
        print("ended:", json.dumps([status, files]), flush=True)


def without_a_home(call, *args):
    """As a user whom the system does not know."""
    os.environ.pop("HOME", None)
    os.environ.pop("GPT_FASTER_CACHE", None)

    def unknown(_):
        raise KeyError("uid not found")
    pwd.getpwuid = unknown
    call(*args)


def with_a_clock_that_jumps(call, *args):
    """Hours forward and back, at each look."""
    now, looks = time.time, itertools.count()
    time.time = lambda: now() + (-1) ** next(looks) * 40000
    call(*args)


def moments(seconds, n=N_KILLS, seed=1):
    """Random ones, and how it ends then."""
    draw = random.Random(seed)
    return [(draw.uniform(0, 1.1 * seconds), draw.choice(SIGNALS)) for _ in range(n)]
