"""commands.py: a command that is forked does what one that Python starts does."""

import os
import subprocess
import sys

import pytest
from commands import PYTHON

SCRIPT = """
import atexit, os, sys, threading, time
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.5), print("a thread"))).start()
print(__name__, __file__, sys.argv, sys.path[0], os.getcwd(), os.environ.get("NAME"), sys.stdin and sys.stdin.read())
print("to stderr", file=sys.stderr)
exec(sys.argv[1])
"""
ENDS = ["", "sys.exit('a message')", "sys.exit(3)", "raise ValueError('no')", "os.kill(os.getpid(), 15)", "os._exit(7)", "raise KeyboardInterrupt"]


@pytest.fixture
def script(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    return "script.py"


@pytest.mark.parametrize("end", ENDS)
def test_it_ends_as_python_does(script, tmp_path, end):
    def run(python):
        done = subprocess.run([*python, script, end], input="some text", cwd=tmp_path, env={**os.environ, "NAME": "value"},
                              capture_output=True, text=True)
        lines = done.stderr.splitlines()
        return done.returncode, done.stdout, lines[0], lines[-1]           # between them what calls the script
    assert run(PYTHON) == run([sys.executable])


@pytest.mark.parametrize("tail", [">&-", "2>&-", "<&-", "> /dev/full", "| true; exit ${PIPESTATUS[0]}"])
def test_its_files_are_the_shells(script, tmp_path, tail):
    def run(python):
        line = " ".join(f"'{a}'" for a in (*python, script, 'print("x" * 100000)'))
        done = subprocess.run(["bash", "-c", f"{line} {tail}"], cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr.splitlines()[-1:]
    assert run(PYTHON) == run([sys.executable])


@pytest.mark.parametrize("number", [1, 2, 9, 15])
def test_signals_are_passed_on(tmp_path, number):
    (tmp_path / "script.py").write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)")
    process = subprocess.Popen([*PYTHON, tmp_path / "script.py"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    pid = int(process.stdout.readline())
    process.send_signal(number)
    assert process.stdout.read() == ""                     # it has no writer any more: the child has ended, too
    assert process.wait(60) == -number and pid != process.pid
