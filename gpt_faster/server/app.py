"""The routes: who may ask, what is asked, and the answer, whole or as it comes.

It owns HTTP and OpenAI's shapes, in a thread of its own with its own event loop. What runs on the
model is server/engine.py's; what a request may say, server/protocol.py's.

    serve(session, slots, listening)               # until SIGTERM or Ctrl-C
"""

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import json
import re
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from generate import log
from gpt_faster.decoding.scheduler import Event, Generation
from gpt_faster.server.answers import ChatAnswer, CompletionAnswer
from gpt_faster.server.engine import Busy, Delivery, Draining, Engine
from gpt_faster.server.metrics import Metrics
from gpt_faster.server.prepare import Model
from gpt_faster.server.protocol import ChatRequest, CompletionRequest, Refused, parse

PAGE = Path(__file__).with_name("page.html")
BODY_SECONDS = 60                                  # that a body may take to arrive
LONG_BODY = 1 << 16                                # bytes: to tokenize it takes a tenth of a second
ERRORS = {"timeout": (504, "the answer took longer than --request_timeout"),
          "internal": (500, "this request failed on the server, whose log says why"),
          "the server has stopped": (503, "the server has stopped")}


class Http:
    """What the routes share."""

    def __init__(self, session, engine: Engine, metrics: Metrics):
        self.model, self.engine, self.metrics = Model(session), engine, metrics
        self.options = session.options
        self.loop = None                           # of this side's thread, once it runs
        # One request at a time is prepared, and beside it one that may take seconds.
        self.short, self.long = asyncio.Lock(), asyncio.Lock()
        self.loopback = False                      # serve() knows where it listens
        engine.flush = self.deliver
        self.page = PAGE.read_bytes()
        self.page_headers = {
            "content-security-policy": policy(self.page), "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer", "cache-control": "no-cache"}
        routes = [Route("/", self.show_page), Route("/health", self.health),
                  Route("/metrics", self.show_metrics), Route("/v1/models", self.models),
                  Route("/v1/models/{name:path}", self.one_model),
                  Route("/v1/chat/completions", self.chat, methods=["POST"]),
                  Route("/v1/completions", self.complete, methods=["POST"])]
        app = Starlette(routes=routes, exception_handlers={
            404: self.not_found, 405: self.not_found, Refused: self.refuse,
            Exception: self.fail})                 # Starlette raises it again: guarded() logs it
        self.app = self.guarded(app)

    # ---- Between the threads --------------------------------------------------------------------

    def deliver(self, events: list[Event]) -> None:
        """What some steps gave, to those who wait for it. Called in the model's thread."""
        def send():
            for event in events:
                event.generation.user_data.send(event)
        with suppress(RuntimeError):               # the loop has been closed: nobody waits
            self.loop.call_soon_threadsafe(send)

    # ---- Around every route ---------------------------------------------------------------------

    def guarded(self, app) -> Callable:
        """The key, a count of answers, and an answer to whatever goes wrong."""
        async def run(scope, receive, send):
            if scope["type"] != "http":
                return await app(scope, receive, send)
            status = [500]

            async def counted(message):
                if message["type"] == "http.response.start":
                    status[0] = message["status"]
                await send(message)

            try:
                if (name := self.foreign_host(scope)) is not None:
                    error = Refused(403, f"the Host header names '{name}', which this server does "
                                    "not answer to: --allowed_hosts adds names",
                                    "authentication_error", code="host_not_allowed")
                    return await self.refuse(None, error)(scope, receive, counted)
                if not self.is_allowed(scope):
                    error = Refused(401, "a key is needed: Authorization: Bearer KEY",
                                    "authentication_error", code="invalid_api_key")
                    return await self.refuse(None, error)(scope, receive, counted)
                await app(scope, receive, counted)
            except ClientDisconnect:
                status[0] = 499
            except Exception as e:                 # ours: a line for us, nothing of it for them
                where = e.__traceback__
                while where.tb_next:
                    where = where.tb_next
                log(f"serve.py: error: {type(e).__name__}: {str(e)[:200]} ("
                    f"{Path(where.tb_frame.f_code.co_filename).name}:{where.tb_lineno})")
            finally:
                known = any(scope["path"] == route.path for route in app.routes)
                path = scope["path"] if known else "other"
                self.metrics.requests.labels(path, status[0]).inc()
        return run

    def foreign_host(self, scope) -> str | None:
        """A page of another site whose name leads to this machine (DNS rebinding) is to its browser
        of our origin, but the Host header names the site. Without --allowed_hosts only a server on
        loopback knows its names: the others may have any. A client that is no browser may send
        none."""
        allowed = self.options.allowed_hosts or []
        if not self.loopback and not allowed:
            return None
        for header, value in scope["headers"]:
            if header == b"host":
                name = host_name(value.decode("latin-1"))
                if not is_loopback(name) and name not in allowed:
                    return ascii(name[:100])[1:-1]
        return None

    def is_allowed(self, scope) -> bool:
        """In constant time. The page and /health are for everyone: they say nothing."""
        if not self.options.api_key or scope["path"] in ("/", "/health"):
            return True
        sent = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(sent, b"Bearer " + self.options.api_key.encode())

    def refuse(self, request, error: Refused) -> Response:
        headers = {"retry-after": str(error.retry_after)} if error.retry_after else {}
        return JSONResponse(dict(error=error.error), error.status, headers)

    def fail(self, request, error: Exception) -> Response:
        """A mistake of ours: nothing of it for the client."""
        return self.refuse(request, Refused(500, ERRORS["internal"][1], "server_error",
                                            code="internal"))

    def not_found(self, request, error) -> Response:
        return self.refuse(request, Refused(error.status_code, f"{request.method} "
                           f"{request.url.path}: {error.detail}"))

    # ---- The small ones -------------------------------------------------------------------------

    async def show_page(self, request) -> Response:
        return Response(self.page, media_type="text/html; charset=utf-8",
                        headers=self.page_headers)

    async def health(self, request) -> Response:
        running, waiting = self.engine.load()
        state = "stopping" if self.engine.draining else "ok"
        return JSONResponse(dict(status=state, running=running, waiting=waiting),
                            503 if self.engine.draining else 200)

    async def show_metrics(self, request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def models(self, request) -> Response:
        return JSONResponse(dict(object="list", data=[self.model.card]))

    async def one_model(self, request) -> Response:
        self.model.check_name(request.path_params["name"])
        return JSONResponse(self.model.card)

    # ---- Answers --------------------------------------------------------------------------------

    async def chat(self, request) -> Response:
        return await self.answer(request, ChatRequest, self.model.prepare_chat, ChatAnswer)

    async def complete(self, request) -> Response:
        return await self.answer(request, CompletionRequest, self.model.prepare_completion,
                                 CompletionAnswer)

    async def body(self, request: Request) -> bytes:
        """Refused where it is too large, or no JSON by its header: a page of another site, which a
        browser lets send only plain text unasked, is not to use this server."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise Refused(415, "Content-Type: application/json is needed")
        limit, parts, n = int(self.options.max_body_mb * 1e6), [], 0
        async for part in request.stream():
            n += len(part)
            if n > limit:
                raise Refused(413, f"the body is larger than {self.options.max_body_mb:g} MB")
            parts.append(part)
        return b"".join(parts)

    async def answer(self, request, kind, prepare: Callable, shape) -> Response:
        try:
            body = await asyncio.wait_for(self.body(request), BODY_SECONDS)
        except asyncio.TimeoutError:
            raise Refused(408, f"the body took longer than {BODY_SECONDS} seconds") from None
        asked = parse(kind, body, self.model.limit)
        self.model.check_name(asked.model)
        if self.engine.draining:
            raise self.stopping()
        if self.engine.load()[1] >= self.options.max_queue + self.engine.slots.batch.n_row:
            raise self.busy()
        may_take_long = len(body) > LONG_BODY or asks_for_grammar(asked)
        async with self.long if may_take_long else self.short:
            try:
                work = await asyncio.to_thread(prepare, asked)
            except RecursionError:
                raise Refused(400, "the body is nested too deeply") from None
        answer, events = shape(self.model, asked, work), asyncio.Queue()
        deadline = time.monotonic() + self.options.request_timeout
        asked_for = work.generations if work.n_new else []     # of an echo alone nothing runs
        for i, generation in enumerate(asked_for):
            generation.user_data = Delivery(i, events.put_nowait, deadline)
        try:
            self.engine.submit(asked_for)
        except Busy:
            raise self.busy() from None
        except Draining:
            raise self.stopping() from None
        if asked.stream:
            return EventStream(self.stream(answer, asked_for, events),
                               lambda: self.engine.cancel(asked_for))
        return await self.whole(request, answer, asked_for, events)

    def busy(self) -> Refused:
        return Refused(429, f"{self.options.max_queue} answers wait already: try again soon",
                       "rate_limit_error", code="queue_full", retry_after=2)

    def stopping(self) -> Refused:
        return Refused(503, "the server is stopping", "server_error", retry_after=10)

    async def whole(self, request, answer, asked_for: list[Generation],
                    events: asyncio.Queue) -> Response:
        async def gone():
            while (await request.receive())["type"] != "http.disconnect":
                pass

        leaving, left = asyncio.ensure_future(gone()), set(asked_for)
        try:
            while left:
                waiting = asyncio.ensure_future(events.get())
                await asyncio.wait({waiting, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if not waiting.done():
                    waiting.cancel()
                    raise ClientDisconnect
                event = waiting.result()
                if event.error:
                    raise failure(event.error)
                answer.add(event)
                if event.finish_reason:
                    left.discard(event.generation)
            return JSONResponse(answer.whole())
        finally:
            leaving.cancel()
            if left:
                self.engine.cancel(list(left))

    async def stream(self, answer, asked_for: list[Generation],
                     events: asyncio.Queue) -> AsyncIterator[str]:
        """Server-sent events. Whoever closes the connection ends the answers within a step."""
        left = set(asked_for)
        yield sse(*answer.begin())
        while left:
            sent = []
            for event in [await events.get(), *rest(events)]:
                sent += answer.add(event)
                if event.error:
                    yield sse(*sent, dict(error=failure(event.error).error))
                    return
                if event.finish_reason:
                    left.discard(event.generation)
            if sent:
                yield sse(*sent)                   # in one packet
        yield sse(*answer.end()) + "data: [DONE]\n\n"


class EventStream(StreamingResponse):
    """A stream of server-sent events; however it ends, even before it began, `ended` is called."""

    def __init__(self, events: AsyncIterator[str], ended: Callable):
        super().__init__(events, media_type="text/event-stream",
                         headers={"cache-control": "no-cache"})
        self.ended = ended

    async def __call__(self, *args) -> None:
        try:
            await super().__call__(*args)
        finally:
            self.ended()


def policy(page: bytes) -> str:
    """Nothing runs, and nothing is drawn, but the page's own script and style, by their hashes."""
    def hashes(tag):
        parts = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), page, re.S)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(part).digest()).decode()}'"
                        for part in parts)

    return (f"default-src 'none'; script-src {hashes(b'script')}; style-src {hashes(b'style')}; "
            "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
            "frame-ancestors 'none'")


def sse(*events: dict) -> str:
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events)


def rest(queue: asyncio.Queue) -> Iterator:
    while not queue.empty():
        yield queue.get_nowait()


def failure(error: str) -> Refused:
    status, message = ERRORS[error]
    return Refused(status, message, "server_error", code=error.replace(" ", "_"))


# ---- The two threads ----------------------------------------------------------------------------

def host_name(header: str) -> str:
    """A Host header without its port: "[::1]:8000" is ::1."""
    return re.sub(r":\d*$", "", header.strip()).strip("[]").rstrip(".").lower()


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def asks_for_grammar(asked) -> bool:
    """Its compilation may take seconds."""
    names = ("regex", "grammar", "response_format", "tools")
    return any(getattr(asked, name, None) for name in names)


def warn_if_open(host: str, api_key: str | None) -> None:
    """Where anyone on the network may use it."""
    if not is_loopback(host) and not api_key:
        log(f"warning: open to the network: whoever reaches {host} may use this model; "
            "--api_key KEY asks for a key")


class Server(uvicorn.Server):
    """uvicorn, in a thread that has no signals and says when it listens."""

    def __init__(self, config, started: threading.Event):
        super().__init__(config)
        self.began = started

    async def startup(self, sockets=None) -> None:
        await super().startup(sockets)
        self.began.set()


def serve(session, slots, listening) -> None:
    """HTTP in a thread, the model in this one, until SIGTERM or Ctrl-C; then what runs is ended."""
    metrics = Metrics()
    metrics.slots.set(slots.batch.n_row)
    engine = Engine(slots, session.options.max_queue, metrics)
    started, http = threading.Event(), Http(session, engine, metrics)
    config = uvicorn.Config(http.app, log_level="warning", access_log=False, lifespan="off",
                            server_header=False, timeout_keep_alive=30)
    server = Server(config, started)

    async def run():
        http.loop = asyncio.get_running_loop()
        await server.serve(sockets=[listening])

    thread = threading.Thread(target=lambda: asyncio.run(run()), name="http", daemon=True)
    n_signal = []

    def stop(*_):
        n_signal.append(1)
        if len(n_signal) > 1:                      # asked twice: at once
            raise KeyboardInterrupt
        engine.drain()
        log("Stopping: what runs is finished, nothing new is taken (again: at once)")

    sys.setswitchinterval(0.0005)                  # the model's thread waits for HTTP's shortly
    before = {s: signal.signal(s, stop) for s in (signal.SIGTERM, signal.SIGINT)}
    host, port = listening.getsockname()[:2]
    http.loopback = is_loopback(host)
    thread.start()
    started.wait(30)
    warn_if_open(host, session.options.api_key)
    shown = f"[{host}]" if ":" in host else host
    log(f"Serving {http.model.name} on http://{shown}:{port} ({slots.batch.n_row} slots of "
        f"{http.model.limit} positions)")
    try:
        engine.run()
    finally:
        server.should_exit = True                  # after the answers have been sent
        thread.join(10)
        for s, handler in before.items():
            signal.signal(s, handler)
