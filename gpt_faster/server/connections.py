"""Limits of connections, which uvicorn has not: how many, how long and large a request's head may
be, and how long a client may leave its answer unread.

It knows no route. The time and the size of a body are limited where it is read (app.py).

    uvicorn.Config(app, http=limited_protocol(max_connections=512))
"""

import json
import re
from asyncio import Transport
from http import HTTPStatus

import httptools
from starlette.responses import JSONResponse
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gpt_faster.server.protocol import ApiError
from gpt_faster.server.wire import OPENAI

HEAD_TIMEOUT = 20                                  # seconds from a head's first byte to its last
MAX_HEAD = 1 << 16                                 # bytes
REST_TIMEOUT = 20                                  # for the rest of a body that is not read
UNREAD_TIMEOUT = 60                                # seconds without room in the send buffer
SPARE_CONNECTIONS = 64                             # beyond the limit: answered with 503
# Java's client offers HTTP/2 in its first request; httptools would drop that request's body.
UPGRADE = re.compile(rb"\r\nupgrade:", re.I)


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol; every connection that waits for its client has a deadline.

    connection made ── head ── body ── response ── (idle: uvicorn's timeout_keep_alive) ── head …
                    HEAD_TIMEOUT       UNREAD_TIMEOUT
    """

    max_connections: int                           # set by limited_protocol()
    deadline = unread = None                       # timers
    n_head = 0                                     # bytes received since the head began
    in_head = True                                 # no complete head since the last response
    answering = None                               # the cycle that runs; self.cycle: the last begun

    def connection_made(self, transport: Transport) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self.app = too_many_connections        # instead of the server's, for its first request
        if len(self.connections) > self.max_connections + SPARE_CONNECTIONS:
            transport.abort()
        else:
            self._set_deadline(HEAD_TIMEOUT)

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_deadline(None)
        self._set_unread(None)
        if self.answering:                         # uvicorn tells only the last of pipelined ones
            self.answering.disconnected = True
            self.answering.message_event.set()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle, app) -> None:
        self.answering = cycle
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():            # refused: what comes after it is not read
            return
        if self._is_idle():
            if not self.deadline:
                self._set_deadline(HEAD_TIMEOUT)
            self.in_head, self.n_head = True, self.n_head + len(data)
            head, end, rest = data.partition(b"\r\n\r\n")
            data = UPGRADE.sub(b"\r\nIgnored:", head) + end + rest
        super().data_received(data)
        if self.in_head and self._is_idle() and self.n_head > MAX_HEAD:
            self._refuse(431, f"the headers have more than {MAX_HEAD:,} bytes")

    def _is_idle(self) -> bool:
        return self.cycle is None or (self.cycle.response_complete and not self.cycle.more_body)

    def on_headers_complete(self) -> None:
        self.in_head, self.n_head = False, 0
        self._set_deadline(None)
        if not self.url.startswith(b"/") and (host := httptools.parse_url(self.url).host):
            self.headers.append((b"host", host))   # http://host/path: uvicorn keeps the path alone
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and self.cycle.more_body:
            self._set_deadline(REST_TIMEOUT)       # refused early: it reads and drops the rest

    def on_message_complete(self) -> None:
        if self.cycle.response_complete:
            self._set_deadline(None)
            self.cycle.more_body = False
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._set_unread(UNREAD_TIMEOUT)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._set_unread(None)

    # ---- Timers and refusals --------------------------------------------------------------------

    def _set_deadline(self, seconds: float | None) -> None:
        if self.deadline:
            self.deadline.cancel()
        self.deadline = seconds and self.loop.call_later(seconds, self._end_late)

    def _set_unread(self, seconds: float | None) -> None:
        if self.unread:
            self.unread.cancel()
        self.unread = seconds and self.loop.call_later(seconds, self.transport.abort)

    def _end_late(self) -> None:
        if self.n_head and self.in_head and not self.transport.is_closing():
            self._refuse(408, f"no complete headers within {HEAD_TIMEOUT} seconds")
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls it for what is not HTTP."""
        cycle = self.cycle
        is_in_body = cycle and cycle.more_body and not cycle.response_started and not self.pipeline
        if cycle is None or cycle.response_complete or is_in_body:
            self._refuse(400, "the request is not valid HTTP")
        else:                                      # it followed a request that is being answered
            cycle.keep_alive = False
            self.flow.pause_reading()

    def _refuse(self, status: int, message: str) -> None:
        body = json.dumps(OPENAI.error(ApiError(status, message))).encode()
        head = (f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
                f"content-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n")
        self.transport.write(head.encode() + body)
        self.transport.close()


async def too_many_connections(scope, receive, send) -> None:
    error = ApiError(503, "too many connections: close some, or try again (--max_connections)",
                     "server_error", code="too_many_connections")
    response = JSONResponse(OPENAI.error(error), 503, {"connection": "close", "retry-after": "2"})
    await response(scope, receive, send)


def limited_protocol(max_connections: int) -> type[LimitedProtocol]:
    return type("Protocol", (LimitedProtocol,), dict(max_connections=max_connections))
