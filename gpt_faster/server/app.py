"""The HTTP routes: authentication, requests, and responses, whole or streamed.

HTTP runs in its own thread with its own event loop. server/engine.py runs the model;
server/protocol.py validates requests.

    serve(session, slots, listener)                # until SIGTERM or Ctrl-C
"""

import asyncio
import base64
import gc
import hashlib
import hmac
import ipaddress
import re
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import uvicorn
from pydantic import Field
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from generate import log
from gpt_faster.decoding.scheduler import Event, Generation
from gpt_faster.server import openapi
from gpt_faster.server.answers import Answer, ChatAnswer, CompletionAnswer
from gpt_faster.server.connections import limited_protocol
from gpt_faster.server.engine import Delivery, Draining, Engine, QueueFull
from gpt_faster.server.kept_responses import KeptResponses
from gpt_faster.server.messages import (
    ANTHROPIC,
    CountRequest,
    MessageAnswer,
    MessagesRequest,
    count_tokens,
    model_info,
    model_list,
    prepare_messages,
)
from gpt_faster.server.metrics import Metrics
from gpt_faster.server.prepare import PreparedRequest, RequestPreparer
from gpt_faster.server.protocol import ApiError, ChatRequest, CompletionRequest, Strict, parse
from gpt_faster.server.protocol import Request as Fields
from gpt_faster.server.renderer import MAX_TEXT, Renderer, RenderError
from gpt_faster.server.request_id import HEADERS, begin, current, log_line
from gpt_faster.server.response_store import ResponseStore
from gpt_faster.server.responses import (
    RESPONSES,
    ResponsesAnswer,
    ResponsesPreparer,
    ResponsesRequest,
)
from gpt_faster.server.text_routes import DetokenizeRequest, TextRoutes, TokenizeRequest
from gpt_faster.server.version import VERSION, commit
from gpt_faster.server.wire import OPENAI, OpenAIWire
from sampling import RANGES

PAGE = Path(__file__).with_name("page.html")
PUBLIC = ("/", "/health", "/docs", "/openapi.json")        # a browser sends no key for a page
BODY_TIMEOUT = 60                                  # seconds to receive a body
KEEP_ALIVE = 5                                     # seconds until a silent stream gets a comment
BACKLOG = 2048                                     # connections not yet accepted
LAST_RESPONSES = 3                                 # seconds to send them, once all is generated
LONG_BODY = 1 << 14                                # bytes: templates and tokens may take 50 ms
MAX_BODIES = 16                                    # largest bodies in memory: --max_body_mb each
# Threads that prepare requests, by what one costs: no kind waits for another.
PREPARING = dict(short=4, long=1, grammar=2, render=1)
ERRORS = {"timeout": (504, "the request took longer than --request_timeout"),
          "internal": (500, "internal server error: see the server's log"),
          "the server has stopped": (503, "the server has stopped")}


@dataclass(frozen=True)
class Endpoint:
    """A POST route that generates: the schema of its requests, what prepares one, the form of its
    answers, and how its API writes errors and streams."""

    path: str
    schema: type[Fields]
    prepare: Callable[[Fields], PreparedRequest]
    answer: type[Answer]
    wire: OpenAIWire = OPENAI


@dataclass(frozen=True)
class Query:
    """A POST route that does not generate: the schema of its requests, and run(request), which
    returns the answer's fields. run is called in a thread of its own."""

    path: str
    schema: type[Fields]
    run: Callable[[Fields], dict]
    wire: OpenAIWire = OPENAI
    pool: str | None = None                        # of PREPARING; None: by what the request costs


class RenderRequest(Strict):
    """The page asks for HTML of what has come of an answer."""

    model: str | None = None
    text: Annotated[str, Field(max_length=MAX_TEXT)]


class HttpServer:
    """The Starlette application and the state its routes share."""

    def __init__(self, session, engine: Engine, metrics: Metrics):
        self.preparer, self.engine, self.metrics = RequestPreparer(session), engine, metrics
        self.options = session.options
        self.loop = None                           # the HTTP thread's event loop, set by serve()
        self.threads = {kind: ThreadPoolExecutor(n, f"prepare-{kind}")
                        for kind, n in PREPARING.items()}
        self.n_body_bytes = 0                      # of all requests not yet prepared
        self.renderer = Renderer()
        self.loopback = False                      # set by serve()
        self.kept = ResponseStore(self.options.keep_responses, int(self.options.keep_mb * 1e6),
                                  self.options.keep_minutes * 60)
        engine.flush = self.deliver
        self.page = PAGE.read_bytes()
        self.page_headers = {
            "content-security-policy": content_security_policy(self.page),
            "x-content-type-options": "nosniff", "referrer-policy": "no-referrer",
            "cache-control": "no-cache"}
        routes = [Route("/", self.show_page), Route("/health", self.health),
                  Route("/metrics", self.show_metrics), Route("/version", self.version),
                  Route("/docs", self.show_docs), Route("/openapi.json", self.show_openapi),
                  Route("/v1/models", self.models), Route("/v1/models/{name:path}", self.one_model)]
        endpoints = [Endpoint("/v1/chat/completions", ChatRequest, self.preparer.prepare_chat,
                              ChatAnswer),
                     Endpoint("/v1/completions", CompletionRequest,
                              self.preparer.prepare_completion, CompletionAnswer),
                     Endpoint("/v1/responses", ResponsesRequest,
                              ResponsesPreparer(self.preparer, self.kept).prepare,
                              ResponsesAnswer, RESPONSES),
                     Endpoint("/v1/messages", MessagesRequest,
                              partial(prepare_messages, self.preparer), MessageAnswer, ANTHROPIC)]
        text = TextRoutes(self.preparer)
        queries = [Query("/v1/messages/count_tokens", CountRequest,
                         partial(count_tokens, self.preparer), ANTHROPIC),
                   Query("/tokenize", TokenizeRequest, text.tokenize),
                   Query("/detokenize", DetokenizeRequest, text.detokenize),
                   Query("/apply-template", ChatRequest, text.apply_template),
                   Query("/render", RenderRequest, self.render, pool="render")]
        self.wires = {each.path: each.wire for each in (*endpoints, *queries)}
        routes += [Route(endpoint.path, partial(self.answer, endpoint=endpoint), methods=["POST"])
                   for endpoint in endpoints]
        routes += [Route(query.path, partial(self.reply, query=query), methods=["POST"])
                   for query in queries]
        routes += KeptResponses(self.kept).routes
        self.routes = routes
        self.under_v1 = {route.path.split("/")[2] for route in routes
                         if route.path.startswith("/v1/")}
        self.description = openapi.describe(
            [route for route in routes if route.path not in self.wires], [*endpoints, *queries],
            {name: getattr(self.options, name, None) for name in RANGES if name != "seed"})
        self.docs = openapi.as_page(self.description).encode()
        app = Starlette(routes=routes, exception_handlers={
            404: self.routing_error, 405: self.routing_error, ApiError: self.error_response,
            Exception: self.internal_error})       # Starlette re-raises it: middleware() logs it
        self.app = self.middleware(app)
        if origins := self.options.allowed_origins:
            # Without credentials: a page sends its key in a header. "*" allows all request headers.
            self.app = CORSMiddleware(
                self.app, allow_origins=origins, allow_methods=("GET", "HEAD", "POST", "DELETE"),
                allow_headers=("*",), allow_private_network=True, max_age=3600,
                expose_headers=(*(name.decode() for name in HEADERS), "retry-after"))

    def config(self) -> uvicorn.Config:
        return uvicorn.Config(self.app, http=limited_protocol(self.options.max_connections),
                              ws="none", log_level="error", access_log=False, lifespan="off",
                              server_header=False, timeout_keep_alive=30, backlog=BACKLOG,
                              timeout_graceful_shutdown=LAST_RESPONSES)

    # ---- From the model's thread ----------------------------------------------------------------

    def deliver(self, events: list[Event]) -> None:
        """Send events to the requests that wait for them. Called in the model's thread."""
        def send():
            for event in events:
                event.generation.user_data.send(event)
        with suppress(RuntimeError):               # the loop is closed: no clients
            self.loop.call_soon_threadsafe(send)

    # ---- Middleware and errors ------------------------------------------------------------------

    def middleware(self, app) -> Callable:
        """Check the Host header and the API key, count responses, log unexpected errors."""
        async def run(scope, receive, send):
            if scope["type"] != "http":
                return await app(scope, receive, send)
            scope = dict(scope, path=self.canonical(scope["path"]))
            request_id = begin(scope["headers"])
            status = [500]                         # until a response begins

            async def send_and_record(message):
                if message["type"] == "http.response.start":
                    status[0] = message["status"]
                    ids = [(name, request_id.encode()) for name in HEADERS]
                    message = dict(message, headers=[*message["headers"], *ids])
                await send(message)

            try:
                if (name := self.rejected_host(scope)) is not None:
                    error = ApiError(403, f"the Host header '{name}' is not allowed: add it with "
                                     "--allowed_hosts",
                                     "authentication_error", code="host_not_allowed")
                    response = self.error_response(Request(scope), error)
                    return await response(scope, receive, send_and_record)
                if not self.is_allowed(scope):
                    error = ApiError(401, "invalid API key: send Authorization: Bearer KEY, or "
                                     "x-api-key: KEY",
                                     "authentication_error", code="invalid_api_key")
                    response = self.error_response(Request(scope), error)
                    return await response(scope, receive, send_and_record)
                await app(scope, receive, send_and_record)
            except ClientDisconnect:
                status[0] = 499
            except asyncio.CancelledError:         # LAST_RESPONSES seconds after the last answer
                if status[0] == 500:               # nothing was sent
                    response = self.error_response(Request(scope), self.stopping())
                    await response(scope, receive, send_and_record)
            except Exception as e:                 # log it; the client gets no details
                where = e.__traceback__
                while where.tb_next:
                    where = where.tb_next
                log_line(f"serve.py: error: {type(e).__name__}: {str(e)[:200]} ("
                         f"{Path(where.tb_frame.f_code.co_filename).name}:{where.tb_lineno})")
            finally:
                labels = (route.path for route in self.routes
                          if route.path_regex.match(scope["path"]))
                self.metrics.requests.labels(next(labels, "other"), status[0]).inc()
        return run

    def canonical(self, path: str) -> str:
        """The path as the routes have it: with the /v1 that a client has left out, and without
        slashes at its end or doubled ones, as base URLs lead to."""
        path = "/" + re.sub("/+", "/", path).strip("/")
        first = path.split("/")[1]
        return f"/v1{path}" if first in self.under_v1 else path

    def rejected_host(self, scope) -> str | None:
        """The Host header's name if it is not allowed: defends against DNS rebinding.

        Without --allowed_hosts any name is allowed, except on loopback, where only localhost is. A
        missing header is allowed: browsers always send one.
        """
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
        """Compare the API key in constant time. PUBLIC paths need none."""
        if not self.options.api_key or scope["path"] in PUBLIC:
            return True
        key = self.options.api_key.encode()
        return any([hmac.compare_digest(sent, key) for sent in sent_keys(scope["headers"])])

    def error_response(self, request: Request, error: ApiError) -> Response:
        headers = {"retry-after": str(error.retry_after)} if error.retry_after else {}
        default = ANTHROPIC if is_anthropic(request) else OPENAI
        wire = self.wires.get(request.scope["path"], default)
        return JSONResponse(wire.error(error), error.status, headers)

    def internal_error(self, request, error: Exception) -> Response:
        """Status 500 without details."""
        return self.error_response(request, ApiError(500, ERRORS["internal"][1], "server_error",
                                             code="internal"))

    def routing_error(self, request, error) -> Response:
        """404 and 405 list what is there."""
        path = request.scope["path"]
        matching = [route for route in self.routes if route.path_regex.match(path)]
        if matching:
            methods = {method for route in matching for method in route.methods}
            there = f"use {' or '.join(sorted(methods - {'HEAD'}))}"
        else:
            there = f"this server has {', '.join(route.path for route in self.routes)}"
            there = there.replace(":path}", "}")
        what = f"{request.method[:20]} {path[:100]}"
        return self.error_response(request, ApiError(
            error.status_code, f"{what}: {error.detail}: {there}",
            code="method_not_allowed" if matching else "route_not_found"))

    # ---- GET routes -----------------------------------------------------------------------------

    async def show_page(self, request) -> Response:
        """A chat in the browser"""
        return Response(self.page, media_type="text/html; charset=utf-8",
                        headers=self.page_headers)

    def render(self, request: RenderRequest) -> dict:
        """Markdown -> HTML, in another process."""
        try:
            return self.renderer.render(request.text)
        except RenderError as e:
            raise ApiError(422, f"{e}: show it as text", param="text") from None

    async def health(self, request) -> Response:
        """How many answers run and wait; 503 while the server stops"""
        running, waiting = self.engine.load()
        state = "stopping" if self.engine.draining else "ok"
        return JSONResponse(dict(status=state, running=running, waiting=waiting),
                            503 if self.engine.draining else 200)

    async def show_metrics(self, request) -> Response:
        """Prometheus' metrics"""
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def version(self, request) -> Response:
        """The version of gpt-faster, and the commit if it runs from a git clone"""
        return JSONResponse(dict(version=VERSION, commit=commit()))

    async def show_openapi(self, request) -> Response:
        """This description as OpenAPI 3.1"""
        return JSONResponse(self.description)

    async def show_docs(self, request) -> Response:
        """The routes and their fields as a page"""
        policy = {"content-security-policy": content_security_policy(self.docs)}
        return Response(self.docs, media_type="text/html; charset=utf-8",
                        headers=self.page_headers | policy)

    async def models(self, request) -> Response:
        """The model"""
        fields = self.preparer.card
        is_list = dict(object="list", data=[fields])
        return JSONResponse(model_list(fields) if is_anthropic(request) else is_list)

    async def one_model(self, request) -> Response:
        """The model, if this is its name"""
        self.preparer.check_name(request.path_params["name"])
        fields = self.preparer.card
        return JSONResponse(model_info(fields) if is_anthropic(request) else fields)

    # ---- Completions ----------------------------------------------------------------------------

    async def body(self, request: Request, reserve: Callable[[int], None]) -> bytes:
        """The body; reserve() counts its bytes. ApiError if it is too large or its content type is
        not JSON: without a CORS preflight, browsers let other sites' pages send plain text but not
        JSON."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, "Content-Type must be application/json")
        if (encoding := request.headers.get("content-encoding", "identity")) != "identity":
            raise ApiError(415, f"Content-Encoding {ascii(encoding[:20])} is not supported: send "
                           "the JSON itself")
        too_large = ApiError(413, f"the body is larger than {self.options.max_body_mb:g} MB")
        limit, chunks, n = int(self.options.max_body_mb * 1e6), [], 0
        if int(request.headers.get("content-length", 0)) > limit:
            raise too_large
        async for part in request.stream():
            n += len(part)
            reserve(len(part))
            if n > limit:
                raise too_large
            chunks.append(part)
        return b"".join(chunks)

    @contextmanager
    def body_memory(self) -> Iterator[Callable[[int], None]]:
        """-> reserve(n_bytes), which raises ApiError if all bodies together exceed the limit."""
        limit, reserved = int(MAX_BODIES * self.options.max_body_mb * 1e6), 0

        def reserve(n_bytes: int) -> None:
            nonlocal reserved
            reserved += n_bytes
            self.n_body_bytes += n_bytes
            if self.n_body_bytes > limit:
                raise ApiError(429, f"all bodies together are larger than {limit / 1e6:g} MB: try "
                               "again soon", "rate_limit_error", code="queue_full", retry_after=2)

        try:
            yield reserve
        finally:
            self.n_body_bytes -= reserved

    async def read(self, raw_request: Request, schema: type[Fields],
                   reserve: Callable[[int], None]) -> tuple[Fields, int]:
        """-> the request and the size of its body. ApiError if it is not valid."""
        try:
            body = await asyncio.wait_for(self.body(raw_request, reserve), BODY_TIMEOUT)
        except asyncio.TimeoutError:
            raise ApiError(408, f"no complete body within {BODY_TIMEOUT} seconds") from None
        run = partial(parse, schema, body, self.preparer.limit)
        request = await self.in_thread("long", run) if len(body) > LONG_BODY else run()
        self.preparer.check_name(request.model)
        return request, len(body)

    async def in_thread(self, pool: str, run: Callable):
        """run() in a thread of the pool."""
        call = partial(copy_context().run, call_safely, run)           # with the request id
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.threads[pool], call)

    async def reply(self, raw_request: Request, query: Query) -> Response:
        with self.body_memory() as reserve:
            request, n_bytes = await self.read(raw_request, query.schema, reserve)
            pool = query.pool or pool_of(request, n_bytes)
            return JSONResponse(await self.in_thread(pool, partial(query.run, request)))

    async def answer(self, raw_request: Request, endpoint: Endpoint) -> Response:
        with self.body_memory() as reserve:
            request, n_bytes = await self.read(raw_request, endpoint.schema, reserve)
            if self.engine.draining:
                raise self.stopping()
            max_waiting = self.options.max_queue + self.engine.slots.batch.n_row
            if self.engine.load()[1] >= max_waiting:
                raise self.busy()
            pool = pool_of(request, n_bytes)
            prepared = await self.in_thread(pool, partial(endpoint.prepare, request))
        answer = endpoint.answer(self.preparer, request, prepared)
        events = asyncio.Queue()
        deadline = time.monotonic() + self.options.request_timeout
        generations = prepared.generations if prepared.generates else []   # else only an echo
        for i, generation in enumerate(generations):
            generation.user_data = Delivery(i, events.put_nowait, deadline,
                                            request_id=current.get())
        try:
            self.engine.submit(generations)
        except QueueFull:
            raise self.busy() from None
        except Draining:
            raise self.stopping() from None
        if request.stream:
            return EventStream(self.stream(answer, generations, events, endpoint.wire),
                               lambda: self.engine.cancel(generations), prepared.headers)
        response = await self.whole(raw_request, answer, generations, events)
        response.headers.update(prepared.headers)
        return response

    def busy(self) -> ApiError:
        return ApiError(429, f"queue full: {self.options.max_queue} requests are waiting",
                        "rate_limit_error", code="queue_full", retry_after=2)

    def stopping(self) -> ApiError:
        return ApiError(503, "the server is shutting down", "server_error", retry_after=10)

    async def whole(self, raw_request, answer, generations: list[Generation],
                    events: asyncio.Queue) -> Response:
        async def wait_for_disconnect():
            while (await raw_request.receive())["type"] != "http.disconnect":
                pass

        disconnect, pending = asyncio.ensure_future(wait_for_disconnect()), set(generations)
        try:
            while pending:
                waiting = asyncio.ensure_future(events.get())
                await asyncio.wait({waiting, disconnect}, return_when=asyncio.FIRST_COMPLETED)
                if not waiting.done():
                    waiting.cancel()
                    raise ClientDisconnect
                event = waiting.result()
                if event.error:
                    raise engine_error(event.error)
                answer.add(event)
                if event.finish_reason:
                    pending.discard(event.generation)
            return JSONResponse(answer.whole())
        finally:
            disconnect.cancel()
            if pending:
                self.engine.cancel(list(pending))

    async def stream(self, answer: Answer, generations: list[Generation], events: asyncio.Queue,
                     wire: OpenAIWire) -> AsyncIterator[str]:
        """Server-sent events. A closed connection cancels the generations within a step."""
        def frames(new: list[dict]) -> str:
            return "".join(map(wire.frame, new))

        pending = set(generations)
        yield frames(answer.begin())
        while pending:
            new, sent = await next_events(events, KEEP_ALIVE), []
            if not new:
                yield wire.keep_alive
            for event in new:
                sent += answer.add(event)
                if event.error:
                    yield frames([*sent, *answer.fail(engine_error(event.error), wire)])
                    return
                if event.finish_reason:
                    pending.discard(event.generation)
            if sent:
                yield frames(sent)                 # one packet per batch of events
        yield frames(answer.end()) + wire.end


class EventStream(StreamingResponse):
    """A stream of server-sent events. Calls on_end however it ends, even before it starts."""

    def __init__(self, events: AsyncIterator[str], on_end: Callable, headers: dict[str, str]):
        super().__init__(events, media_type="text/event-stream",
                         headers={"cache-control": "no-cache", "x-accel-buffering": "no",
                                  **headers})
        self.on_end = on_end

    async def __call__(self, *args) -> None:
        try:
            await super().__call__(*args)
        finally:
            self.on_end()


def content_security_policy(page: bytes) -> str:
    """A Content-Security-Policy that allows only the page's own script and style, by hash."""
    def hash_sources(tag):
        chunks = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), page, re.S)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(part).digest()).decode()}'"
                        for part in chunks)

    return (f"default-src 'none'; script-src {hash_sources(b'script')}; "
            f"style-src {hash_sources(b'style')}; connect-src 'self'; "
            "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")


async def next_events(queue: asyncio.Queue, seconds: float) -> list[Event]:
    """What has come, or what comes first; nothing if that takes longer than this."""
    events = []
    if queue.empty():
        with suppress(asyncio.TimeoutError):
            events.append(await asyncio.wait_for(queue.get(), seconds))
    while not queue.empty():
        events.append(queue.get_nowait())
    return events


def engine_error(error: str) -> ApiError:
    status, message = ERRORS[error]
    return ApiError(status, message, "server_error", code=error.replace(" ", "_"))


# ---- The two threads ----------------------------------------------------------------------------

def host_name(header: str) -> str:
    """A Host header's name without the port: "[::1]:8000" -> "::1"."""
    return re.sub(r":\d*$", "", header.strip()).strip("[]").rstrip(".").lower()


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_anthropic(request: Request) -> bool:
    """Whether a client of Anthropic's API asks, on a path that both APIs have."""
    return "anthropic-version" in request.headers


def sent_keys(headers: list[tuple[bytes, bytes]]) -> Iterator[bytes]:
    """The API keys of a request's headers."""
    for name, value in headers:
        scheme, _, key = value.strip().partition(b" ")
        if name == b"authorization" and scheme.lower() == b"bearer":
            yield key.strip()
        if name == b"x-api-key":
            yield value.strip()


# What asks for a grammar: in chats and completions, in /v1/responses, in /v1/messages.
GRAMMAR_FIELDS = ("regex", "grammar", "response_format", "text", "output_config", "output_format")


def needs_grammar(request: Fields) -> bool:
    """Whether a grammar may have to be compiled, which may take a second."""
    choice = getattr(request, "tool_choice", None)
    mode = getattr(choice, "mode", getattr(choice, "type", choice))
    if isinstance(mode, dict):
        mode = mode.get("type")
    forces_call = mode not in (None, "none", "auto")
    return forces_call or any(getattr(request, name, None) for name in GRAMMAR_FIELDS)


def pool_of(request: Fields, n_bytes: int) -> str:
    """The threads that prepare a request with a body of this size."""
    if needs_grammar(request):
        return "grammar"
    has_history = getattr(request, "previous_response_id", None)       # of any length
    return "long" if n_bytes > LONG_BODY or has_history else "short"


def call_safely(run: Callable):
    """run(); every error as one that a handler of the application gets."""
    try:
        return run()
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except Exception:
        raise
    except BaseException as e:                     # a Rust library's panic is no Exception
        raise RuntimeError(f"{type(e).__name__}: {e}") from e


def warn_if_public(host: str, api_key: str | None) -> None:
    """Warn if the server listens beyond loopback without an API key."""
    if not is_loopback(host) and not api_key:
        log(f"warning: anyone who can reach {host} can use this server: set --api_key to "
            "require a key")


class Server(uvicorn.Server):
    """uvicorn in a thread without signal handlers; sets `started` once it listens."""

    def __init__(self, config, started: threading.Event):
        super().__init__(config)
        self.listens = started

    async def startup(self, sockets=None) -> None:
        await super().startup(sockets)
        self.listens.set()


def serve(session, slots, listener) -> None:
    """HTTP in a thread, the model in this one, until SIGTERM or Ctrl-C; then finish what runs."""
    metrics = Metrics()
    metrics.slots.set(slots.batch.n_row)
    engine = Engine(slots, session.options.max_queue, metrics)
    started, http = threading.Event(), HttpServer(session, engine, metrics)
    host, port = listener.getsockname()[:2]
    try:
        listener.listen(BACKLOG)
    except OSError as e:                           # another server was loading at the same time
        raise OSError(f"cannot listen on {host}, port {port}: {e.strerror}: try another --port "
                      "or --host") from None
    server = Server(http.config(), started)

    async def run():
        http.loop = asyncio.get_running_loop()
        await server.serve(sockets=[listener])

    thread = threading.Thread(target=lambda: asyncio.run(run()), name="http", daemon=True)
    signals = []

    def stop(*_):
        signals.append(1)
        if len(signals) > 1:                       # the second signal: stop immediately
            raise KeyboardInterrupt
        engine.drain()
        log("Shutting down after the running requests (signal again to stop immediately)")

    sys.setswitchinterval(0.0005)                  # switch quickly between the threads
    gc.collect()
    gc.freeze()                                    # a collection of all objects takes 0.2 s
    old_handlers = {s: signal.signal(s, stop) for s in (signal.SIGTERM, signal.SIGINT)}
    http.loopback = is_loopback(host)
    thread.start()
    if not started.wait(30):
        raise RuntimeError("the HTTP thread did not start")
    warn_if_public(host, session.options.api_key)
    url_host = f"[{host}]" if ":" in host else host
    log(f"Serving {http.preparer.name} on http://{url_host}:{port} ({slots.batch.n_row} slots of "
        f"{http.preparer.limit} positions)")
    try:
        engine.run()
    finally:
        server.should_exit = True                  # after sending the last responses
        thread.join(10)
        http.renderer.close()
        for threads in http.threads.values():
            threads.shutdown(wait=False, cancel_futures=True)
        for s, handler in old_handlers.items():
            signal.signal(s, handler)
