"""The process that renders the chat page's Markdown (server/markdown.py).

Some text takes any parser or highlighter for ever, and one regular expression would hold the whole
server: in a process of its own it costs that process.

    Renderer().render("# Title")    # {"done": …, "open": …, "length": …, "seconds": …}
"""

import json
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAX_TEXT = 200_000                                 # characters
TIMEOUT, START_TIMEOUT = 3.0, 30.0                 # seconds


class RenderError(Exception):
    """The text could not be rendered."""


class Renderer:
    """Renders in another process, started by the first call. Use it in one thread at a time."""

    def __init__(self):
        self.process = None

    def render(self, text: str) -> dict:
        """-> markdown.Rendered as a dict, with the seconds of CPU time that it took. RenderError if
        it fails or takes longer than TIMEOUT; the next call starts another process."""
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gpt_faster.server.markdown"], cwd=ROOT, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            self.exchange("", START_TIMEOUT)       # it imports for some 0.2 s
        return self.exchange(text, TIMEOUT)

    def exchange(self, text: str, timeout: float) -> dict:
        timer = threading.Timer(timeout, self.process.kill)
        timer.start()
        try:
            self.process.stdin.write(json.dumps(text) + "\n")
            self.process.stdin.flush()
            reply = json.loads(self.process.stdout.readline())
        except (OSError, ValueError):              # it was killed, or has died
            self.process.kill()
            self.process.wait()
            reply = None
        finally:
            timer.cancel()
        if reply is None:
            raise RenderError("the text could not be rendered")
        return reply

    def close(self) -> None:
        if self.process:
            self.process.kill()
