"""Many clients of a completions server in one thread, to use little of the server's CPU time.

It records when each event (one or more tokens) arrives and parses nothing else.

    answers = ask_all(port, requests, n_client=8)  # in order of completion
"""

import json
import selectors
import socket
import time
from collections import deque

EVENT, LAST = b"data: {", b"data: [DONE]"


class Answer:
    """A streamed response: its request, start time and event times."""

    def __init__(self, port: int, request: dict):
        """request: prompt, max_new_tokens."""
        body = json.dumps(dict(
            prompt=request["prompt"], max_tokens=request["max_new_tokens"], temperature=0,
            stream=True, ignore_eos=True))
        head = ("POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n")
        self.request, self.times, self.ended = request, [], False
        self.start = time.perf_counter()
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.sendall((head + body).encode())
        self.tail = b""                            # may end in a partial marker

    def read(self) -> None:
        """Read what has arrived. RuntimeError if it is not a stream or the connection closes."""
        data = self.tail + self.socket.recv(1 << 16)
        if data == self.tail:
            raise RuntimeError("the server closed the connection: "
                               f"{data[-200:].decode(errors='replace')}")
        if not self.times and data.startswith(b"HTTP/") and b" 200 " not in data[:16]:
            raise RuntimeError(data.decode(errors="replace").splitlines()[-1][:200])
        now = time.perf_counter()
        self.times += [now] * data.count(EVENT)
        self.ended = LAST in data
        end = data.rfind(EVENT)
        self.tail = data[end + len(EVENT) if end >= 0 else 0:][-len(LAST) + 1:]

    def close(self) -> None:
        self.socket.close()


def ask_all(port: int, requests: list[dict], n_client: int) -> list[Answer]:
    """Each client sends its next request when the previous one is complete."""
    waiting, ended, n_open = deque(requests), [], 0
    with selectors.DefaultSelector() as selector:
        while waiting or n_open:
            while waiting and n_open < n_client:
                answer = Answer(port, waiting.popleft())
                selector.register(answer.socket, selectors.EVENT_READ, answer)
                n_open += 1
            for key, _ in selector.select():
                answer = key.data
                answer.read()
                if answer.ended:
                    selector.unregister(answer.socket)
                    answer.close()
                    ended.append(answer)
                    n_open -= 1
    return ended


def first_token(port: int, request: dict, background: list[dict]) -> float:
    """Seconds to a request's first token while `background` requests run; then cancel those."""
    others = [Answer(port, other) for other in background]
    try:
        while not all(other.times for other in others):
            for other in others:
                other.read()
        answer = Answer(port, request)
        others.append(answer)
        while not answer.times:                    # the others' data stays in socket buffers
            answer.read()
        return answer.times[0] - answer.start
    finally:
        for other in others:
            other.close()
