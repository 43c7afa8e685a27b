"""Starts the project's commands in processes that have torch already: a fork takes milliseconds, an import seconds.

`[*PYTHON, "generate.py", …]` stands for `[sys.executable, "generate.py", …]`: for subprocess, for a shell, for a
terminal. What runs is this file, a client. It hands its files 0 to 2, its arguments, folder and environment to a server,
which forks; it passes signals on, and ends as the child does. The server is started once in a process of the tests and
ends with it. What it does not imitate: SIGSTOP, limits of resources, a session of its own, options of python but -u.
It knows nothing of the commands.
"""

import os
import signal
import socket
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PRELOADED = ("gpt_faster.cli.session", "gpt_faster.cli.quantizing", "gpt_faster.cli.evaluate", "gpt_faster.bench.main", "tokenizers")     # not huggingface_hub: it reads the environment


# ---- In the tests -------------------------------------------------------------------------------

class Python:
    """The beginning of a command line, in place of [sys.executable]."""

    def __init__(self):
        self.address = None

    def __iter__(self):
        return iter([sys.executable, "-I", "-S", os.path.abspath(__file__), self._server()])

    def _server(self) -> str:
        """-> its address, as soon as it listens."""
        if self.address is None:
            import subprocess
            import tempfile
            self.folder = tempfile.TemporaryDirectory(prefix="commands-")
            address = os.path.join(self.folder.name, "socket")
            # It ends with the tests, when its stdin does.
            self.process = subprocess.Popen([sys.executable, os.path.abspath(__file__), address], stdin=subprocess.PIPE,
                                            stdout=subprocess.PIPE, cwd=ROOT, start_new_session=True,
                                            env=dict(os.environ, TEST_FUNCTION=""))      # it serves many tests
            assert self.process.stdout.readline() == b"listening\n"
            self.address = address
        return self.address


PYTHON = Python()


# ---- The client ---------------------------------------------------------------------------------

def client(address: str, argv: list[str]) -> int:
    """Run one command in the server's child -> its exit status; ends by the signal that the child ended by."""
    import fcntl
    import json
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    is_open = [n for n in (0, 1, 2) if _is_open(n)]
    with socket.socket(socket.AF_UNIX) as first:
        connection = socket.socket(fileno=fcntl.fcntl(first, fcntl.F_DUPFD, 3))        # where a file of the command is closed
    connection.connect(address)
    request = json.dumps([argv, os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(connection, [f"{len(request):8} {''.join(map(str, is_open)):3}".encode()], is_open)
    connection.sendall(request)
    with connection.makefile("rb") as answers:
        pid = int(answers.readline())
        for number in PASSED_ON:
            signal.signal(number, lambda number, _: os.kill(pid, number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        status = int(answers.readline())
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def _is_open(n: int) -> bool:
    try:
        os.fstat(n)
        return True
    except OSError:
        return False


# ---- The server ---------------------------------------------------------------------------------

def serve(address: str):
    """Fork for each client. -> (argv, folder, environment) in a child; it leaves with its stdin in the server."""
    import gc
    import importlib
    import selectors
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path[0] = ROOT
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()                                            # or each child looks through all of it as it ends
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    print("listening", flush=True)
    events, children = selectors.DefaultSelector(), {}
    events.register(listener, selectors.EVENT_READ, "listener")
    events.register(0, selectors.EVENT_READ, "parent")
    while True:
        for key, _ in events.select():
            if key.data == "parent":
                for pid in children.values():
                    os.kill(pid, signal.SIGKILL)
                sys.exit()
            if key.data == "listener":
                connection = listener.accept()[0]
                request, files = receive(connection)
                pid = os.fork()
                if not pid:
                    for other in [key.fileobj for key in events.get_map().values()]:
                        if isinstance(other, socket.socket):           # else it would close this number later
                            other.close()
                        elif other:
                            os.close(other)
                    connection.close()
                    events.close()
                    argv, _, environment = request
                    take_over(files, argv[0] == "-u" or bool(environment.get("PYTHONUNBUFFERED")))
                    return request
                for fd in files.values():
                    os.close(fd)
                connection.sendall(f"{pid}\n".encode())
                children[connection] = pid
                events.register(os.pidfd_open(pid), selectors.EVENT_READ, ("ended", connection))
                events.register(connection, selectors.EVENT_READ, "client")
            elif key.data == "client":                     # it was killed: so is what it stands for
                events.unregister(key.fileobj)
                if key.fileobj in children:
                    os.kill(children[key.fileobj], signal.SIGKILL)
            else:
                connection = key.data[1]
                status = os.waitstatus_to_exitcode(os.waitpid(children.pop(connection), 0)[1])
                events.unregister(key.fileobj)
                os.close(key.fileobj)
                if connection in events.get_map():
                    events.unregister(connection)
                    connection.sendall(f"{status}\n".encode())
                connection.close()


def receive(connection):
    """-> (argv, folder, environment), {number: file descriptor}"""
    import json
    head, fds, _, _ = socket.recv_fds(connection, 12, 3)
    size, numbers = int(head[:8]), head[9:].decode().strip()
    text = b""
    while len(text) < size:
        text += connection.recv(size - len(text))
    return json.loads(text), dict(zip(map(int, numbers), fds))


def take_over(files: dict[int, int], is_unbuffered: bool) -> None:
    """The client's files 0 to 2, as a Python that begins has them."""
    import io
    for n in (0, 1, 2):
        if n in files:
            os.dup2(files[n], n)
            os.close(files[n])
        else:
            os.close(n)
    sys.stdin = sys.__stdin__ = open(0, closefd=False) if 0 in files else None
    for n, name in ((1, "stdout"), (2, "stderr")):
        stream = None
        if n in files:
            stream = io.TextIOWrapper(open(n, "wb", 0 if is_unbuffered else -1, closefd=False), encoding="utf-8",
                                      errors="strict" if n == 1 else "backslashreplace",
                                      line_buffering=n == 2 or os.isatty(n), write_through=is_unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def begin(argv: list[str], folder: str, environment: dict[str, str]) -> str:
    """-> the path of the file to run; the process looks as one that Python has just begun."""
    if argv[0] == "-u":
        argv = argv[1:]
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    coverage = sys.modules.get("coverage")                 # where it runs, see tests/coverage.ini
    if coverage and (measured := coverage.Coverage.current()):
        measured.switch_context(environment.get("TEST_FUNCTION", ""))
    sys.argv = argv
    sys.path[0] = os.path.dirname(os.path.abspath(argv[0]))
    if "OMP_NUM_THREADS" in environment:                   # which is read as torch is imported
        import torch
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    return os.path.abspath(argv[0])


def run(path: str) -> None:
    """The file is __main__, with nothing of this one in it."""
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    namespace, more = vars(sys.modules["__main__"]), {"__name__": "__main__", "__file__": path, "__builtins__": __builtins__}
    namespace.clear()
    namespace.update(more)
    exec(code, namespace)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(client(sys.argv[1], sys.argv[2:]))
    run(begin(*serve(sys.argv[1])))                        # here, so that it ends as Python does
