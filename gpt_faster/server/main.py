"""serve.py's command: flags, model loading, and the two threads of the server.

The main thread runs the model; on rank 0 a second one runs HTTP.

    python serve.py --compile --checkpoint_path org/name --port 8000
"""

import argparse
import os
import re
import signal
import socket
import threading
import time

import tp
from generate import add_model_flags, add_sampling_flags, add_speed_flags, number, pick_device
from gpt_faster.cli import flags
from gpt_faster.cli.common import guarded
from gpt_faster.cli.options import Options
from gpt_faster.cli.parser import Help, Parser
from gpt_faster.decoding.grammar import Grammars
from gpt_faster.decoding.ranks import as_rank, run_on_rank_0
from gpt_faster.decoding.request_sampler import build_request_sampler
from gpt_faster.decoding.scheduler import Scheduler, is_fault
from gpt_faster.devices import pick_dtype, pick_engine
from gpt_faster.kernels.cpu import native
from gpt_faster.loading import open_model
from gpt_faster.runtime import Runtime
from gpt_faster.server.parsing import TOOL_FORMATS
from gpt_faster.text.reasoning import find_format
from sampling import Sampler
from tp import local_device

INSTALL = "pip install -r requirements-serve.txt"
DEFAULT_BATCH_SIZE, DEFAULT_LENGTH = 8, 4096
COMPILED_LENGTH = 1024                             # positions to compile for at startup


def main(argv: list[str] | None = None) -> int:
    return guarded(as_rank(run), argv)


def build_parser() -> Parser:
    p = Parser(description="Serve a model over HTTP with an OpenAI-compatible API, and a chat page "
                           "at /. Logs go to stderr.", formatter_class=Help,
               conflict_handler="resolve")
    model = p.add_argument_group("model")
    add_model_flags(model, flags.CHECKPOINTS)
    flags.add_model(model)
    add = p.add_argument_group("server").add_argument
    add("--host", default="127.0.0.1", help="the address to listen on; 0.0.0.0: all interfaces")
    add("--port", type=number(int, 0, 65535), default=8000,
        help="the port to listen on; 0: any free port")
    add("--api_key", metavar="KEY", default=os.environ.get("GPT_FASTER_API_KEY"),
        help="the key that clients must send as a bearer token; default: the environment "
             "variable GPT_FASTER_API_KEY, which is not visible in ps")
    add("--allowed_hosts", nargs="+", metavar="NAME", type=str.lower, default=[],
        help="names to accept in the Host header besides localhost and 127.0.0.1; default: "
             "none when listening on loopback, else any")
    add("--allowed_origins", nargs="+", metavar="ORIGIN", type=origin, default=[],
        help="origins whose pages may call the server from a browser (CORS), e.g. "
             "https://app.example or http://localhost:3000; *: any; null: files; default: none but "
             "the server's own page")
    add("--served_name", metavar="NAME",
        help="the model's name in the API; default: the GGUF file's, the hub's (org/name) or the "
              "directory's")
    add("--batch_size", type=number(int, 1), default=DEFAULT_BATCH_SIZE, metavar="N",
        help="slots: sequences generated in parallel")
    add("--max_queue", type=number(int, 0), default=64, metavar="N",
        help="max sequences waiting for a slot; further requests get 429 with Retry-After")
    add("--request_timeout", type=number(float, 0, above=True), default=600.0, metavar="SECONDS",
        help="time limit of a request, including its time in the queue")
    add("--max_body_mb", type=number(float, 0, above=True), default=8.0, metavar="MB",
        help="max request body size; larger requests get 413")
    add("--max_connections", type=number(int, 1), default=512, metavar="N",
        help="max open connections; requests on further ones get 503")
    add("--keep_responses", type=number(int, 0), default=256, metavar="N",
        help="responses of /v1/responses to keep in memory, for previous_response_id; the least "
             "recently used one goes first; 0: none")
    add("--keep_minutes", type=number(float, 0, above=True), default=60.0, metavar="MINUTES",
        help="how long a response is kept after its last use")
    add("--keep_mb", type=number(float, 0, above=True), default=64.0, metavar="MB",
        help="max size of all responses kept, each counted with its conversation so far")
    add("--tool_format", choices=sorted(TOOL_FORMATS), metavar="NAME",
        help="the model's tool-call format, one of docs/serving.md's; default: detected from its "
             "chat template")
    add("--system_prompt", metavar="TEXT", help="system prompt for chats without one")
    add("--chat_template_kwargs", type=flags.json_object, metavar="JSON",
        help='extra chat template variables, e.g. {"enable_thinking": false}')
    add_sampling_flags(p.add_argument_group("sampling"))
    speed = p.add_argument_group("speed")
    add_speed_flags(speed)
    flags.add_speed(speed)
    return p


def origin(text: str) -> str:
    """An origin as browsers send it. ValueError if it can be none."""
    text = text.lower().removesuffix("/")
    if text in ("*", "null") or re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s/?#@,*]+", text):
        return text
    raise argparse.ArgumentTypeError(f"'{text}' is not an origin: write scheme://host or "
                                     "scheme://host:port, without a path, or *")


def check_options(args: Options) -> Options:
    """ValueError if flags conflict."""
    speculates = args.draft_checkpoint_path or args.speculate
    if args.draft_checkpoint_path and args.speculate:
        raise ValueError("--draft_checkpoint_path and --speculate are mutually exclusive")
    if args.speculate_k and not speculates:
        raise ValueError("--speculate_k requires --draft_checkpoint_path or --speculate")
    if args.engine == "recompute":
        raise ValueError("--engine recompute is not supported: the server needs a KV cache")
    if args.api_key is not None and not args.api_key.strip():
        raise ValueError("--api_key (or GPT_FASTER_API_KEY in the environment) is empty: set a "
                         "key, or unset it to serve without one")
    if args.api_key and not (args.api_key.isascii() and args.api_key.isprintable()):
        raise ValueError("--api_key (or GPT_FASTER_API_KEY) must be of printable ASCII characters: "
                         "clients encode others differently")
    if args.random:
        raise ValueError("--random is not supported: it has no tokenizer")
    if args.api_key:                               # HTTP strips the spaces of a header's value
        args = args.replaced(api_key=args.api_key.strip())
    return args


def import_http():
    """The app module. ImportError names the command that installs its dependencies."""
    try:
        from gpt_faster.server import app
    except ImportError as e:
        raise ImportError(f"serve.py needs {e.name or e}: {INSTALL}") from e
    return app


def run(argv: list[str] | None) -> int:
    options = check_options(Options.parse(build_parser(), argv))
    http = import_http()
    listener = None                                # bind before loading the model
    if tp.rank() == 0:
        listener = listen(options.host, options.port)
    device = pick_device(local_device(options.device))
    native.set_activation_bits(options.activation_bits)
    engine = pick_engine(device, options.engine, options.compile or options.compile_prefill)
    if engine == "compile" and device.type == "cpu":
        native.start_building()
    start = time.perf_counter()
    source, tokenizer = open_model(options.checkpoint_path, None, options.adapter)
    options, context = options.over(source.defaults), source.cfg.context
    length = options.max_seq_length or min(DEFAULT_LENGTH, context)
    if length > context:
        raise ValueError(f"--max_seq_length {length} exceeds the model's context of {context}")
    options = options.replaced(max_seq_length=length)
    dtype = pick_dtype(options.dtype, device, source.cfg)
    session = ServerSession(options, source, tokenizer, device, dtype, engine, start)
    if tp.rank():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)          # rank 0 shuts down all ranks
    slots = Scheduler(session.batch, session.model.longest_call, reuse=True)

    def call(name, *call_args):
        try:
            return getattr(slots.worker, name)(*call_args)
        except BaseException as e:                 # it fails the request; other ranks continue
            if tp.rank() == 0 or not is_fault(e):
                raise

    def serve(call):
        slots.call = call
        http.serve(session, slots, listener)

    run_on_rank_0(call, serve)
    return 0


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. OSError names the address."""
    try:
        [(family, *_, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as e:
        raise OSError(f"cannot listen on {host}, port {port}: {e.strerror}: try another --port "
                      "or --host") from None
    return listener


class ServerSession(Runtime):
    """A model whose batch rows have their own sampling parameters and grammars."""

    def __init__(self, options: Options, source, tokenizer, device, dtype, engine: str,
                 start: float):
        self._grammars, self.lock = None, threading.Lock()
        super().__init__(options, source, tokenizer, device, dtype, engine,
                         n_row=options.batch_size, longest=COMPILED_LENGTH, start=start,
                         speculate=options.speculate,
                         rewinds=1)                # the last token may be read one step late
        self.eos_ids = set(self.source.eos_ids)

    def grammars(self) -> Grammars:
        """Built on first use."""
        with self.lock:
            if self._grammars is None:
                self._grammars = Grammars(self.tokenizer, self.eos_ids,
                                          self.model.cfg.vocab_size)
        return self._grammars

    def make_sampler(self) -> Sampler:
        def matcher_of(params):
            spec = getattr(params, "grammar", None)
            if spec and params.thinks_first:
                form = find_format(self.tokenizer)
                return self.grammars().matcher_after_thoughts(spec, form)
            return self.grammars().matcher(spec) if spec else None

        max_draft = self.k if self.drafter else 0
        return build_request_sampler(self.model, self.n_row, self.generator, matcher_of, max_draft)
