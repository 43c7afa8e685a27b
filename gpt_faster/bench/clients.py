"""Many clients of a completions server in one thread, which takes little from the server's cores.

It notes when each event came, of one token or some, and parses nothing else.

    answers = ask_all(port, requests, n_client=8)  # in the order in which they end
"""

import json
import selectors
import socket
import time
from collections import deque

EVENT, LAST = b"data: {", b"data: [DONE]"


class Answer:
    """A streamed answer: the request, when it was sent, and when each event came."""

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
        self.unread = b""                          # the end of what came: half a mark, perhaps

    def read(self) -> None:
        """What has come by now. RuntimeError where it is no stream, or breaks off."""
        data = self.unread + self.socket.recv(1 << 16)
        if data == self.unread:
            raise RuntimeError(f"the server broke off: {data[-200:].decode(errors='replace')}")
        if not self.times and data.startswith(b"HTTP/") and b" 200 " not in data[:16]:
            raise RuntimeError(data.decode(errors="replace").splitlines()[-1][:200])
        now = time.perf_counter()
        self.times += [now] * data.count(EVENT)
        self.ended = LAST in data
        end = data.rfind(EVENT)
        self.unread = data[end + len(EVENT) if end >= 0 else 0:][-len(LAST) + 1:]

    def close(self) -> None:
        self.socket.close()


def ask_all(port: int, requests: list[dict], n_client: int) -> list[Answer]:
    """Each client sends its next request when its last one has ended."""
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


def first_token(port: int, request: dict, beside: list[dict]) -> float:
    """Seconds to a request's first token while those beside it run; they are broken off then."""
    others = [Answer(port, other) for other in beside]
    try:
        while not all(other.times for other in others):
            for other in others:
                other.read()
        answer = Answer(port, request)
        others.append(answer)
        while not answer.times:                    # theirs wait in the sockets' buffers
            answer.read()
        return answer.times[0] - answer.start
    finally:
        for other in others:
            other.close()
