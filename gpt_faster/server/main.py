"""serve.py's command: its flags, the model they ask for, and the two threads that serve it.

The main thread is the model's; HTTP has one beside it, on rank 0 alone.

    python serve.py --compile --checkpoint_path org/name --port 8000
"""

import os
import signal
import socket
import time

import tp
from generate import add_model_flags, add_sampling_flags, add_speed_flags, number, pick_device
from gpt_faster.cli import flags
from gpt_faster.cli.common import Help, Parser, guarded
from gpt_faster.cli.options import Options
from gpt_faster.decoding.grammar import Grammars
from gpt_faster.decoding.ranks import as_rank, run_on_rank_0
from gpt_faster.decoding.request_sampler import build_request_sampler
from gpt_faster.decoding.scheduler import Scheduler
from gpt_faster.devices import pick_dtype, pick_engine
from gpt_faster.kernels.cpu import native
from gpt_faster.loading import open_model
from gpt_faster.runtime import Runtime
from sampling import Sampler
from tp import local_device

INSTALL = "pip install -r requirements-serve.txt"
ROWS, LENGTH = 8, 4096                             # where the flags say nothing
WARM = 1024                                        # positions that it is compiled for at the start


def main(argv: list[str] | None = None) -> int:
    return guarded(as_rank(run), argv)


def build_parser() -> Parser:
    p = Parser(description="Serve a model over HTTP, as OpenAI's API has it, and a chat page at "
                           "/. What happens is said on stderr.", formatter_class=Help,
               conflict_handler="resolve")
    model = p.add_argument_group("model")
    add_model_flags(model, flags.CHECKPOINTS)
    flags.add_model(model)
    add = p.add_argument_group("server").add_argument
    add("--host", default="127.0.0.1", help="the address to listen on; 0.0.0.0: the whole network")
    add("--port", type=number(int, 0, 65535), default=8000, help="0: a free one")
    add("--api_key", metavar="KEY", default=os.environ.get("GPT_FASTER_API_KEY"),
        help="what clients must send as a bearer token; default: the environment's "
             "GPT_FASTER_API_KEY, which other users of the machine do not see in ps")
    add("--allowed_hosts", nargs="+", metavar="NAME", type=str.lower, default=[],
        help="names that a Host header may have beside localhost and 127.0.0.1; default: on "
             "loopback none, else any")
    add("--served_name", metavar="NAME", help="the model's name; default: the checkpoint's")
    add("--batch_size", type=number(int, 1), metavar="N",
        help=f"answers that run at a time; default: {ROWS}, or 1 with speculation")
    add("--max_queue", type=number(int, 0), default=64, metavar="N",
        help="answers that may wait for a slot; beyond, requests get 429 and Retry-After")
    add("--request_timeout", type=number(float, 0, above=True), default=600.0, metavar="SECONDS",
        help="an answer that takes longer, its wait included, ends with an error")
    add("--max_body_mb", type=number(float, 0, above=True), default=8.0, metavar="MB",
        help="larger requests get 413")
    add("--tool_format", choices=["hermes", "qwen_xml", "llama", "gemma"],
        help="how the model calls tools; default: what its chat template teaches")
    add("--system_prompt", metavar="TEXT", help="what a chat without one begins with")
    add("--chat_template_kwargs", type=flags.json_object, metavar="JSON",
        help='more for the chat template, as {"enable_thinking": false}')
    add_sampling_flags(p.add_argument_group("sampling"))
    speed = p.add_argument_group("speed")
    add_speed_flags(speed)
    flags.add_speed(speed)
    return p


def checked(args: Options) -> Options:
    """With the number of rows. ValueError where flags contradict each other."""
    drafting = args.draft_checkpoint_path or args.speculate
    if args.draft_checkpoint_path and args.speculate:
        raise ValueError("--draft_checkpoint_path and --speculate exclude each other")
    if args.speculate_k and not drafting:
        raise ValueError("--speculate_k needs --draft_checkpoint_path or --speculate")
    if drafting and (args.batch_size or 1) > 1:
        raise ValueError("drafting is for one row: it cannot be combined with --batch_size")
    if args.engine == "recompute":
        raise ValueError("--engine recompute has no cache that slots could share: use kv_cache")
    if args.api_key is not None and not args.api_key.strip():
        raise ValueError("--api_key, or the environment's GPT_FASTER_API_KEY, is empty: give a "
                         "key, or leave it out (unset the variable) to serve without one")
    if args.random:
        raise ValueError("--random has no tokenizer, so nothing to serve")
    return args.replaced(batch_size=args.batch_size or (1 if drafting else ROWS))


def import_http():
    """What serves, or an error that names the command that installs it."""
    try:
        from gpt_faster.server import app
    except ImportError as e:
        raise ImportError(f"serve.py needs {e.name or e}: {INSTALL}") from e
    return app


def run(argv: list[str] | None) -> int:
    options = checked(Options.parse(build_parser(), argv))
    http = import_http()
    listening = None                               # before the long load
    if tp.rank() == 0:
        listening = listen(options.host, options.port)
    device = pick_device(local_device(options.device))
    native.set_activation_bits(options.activation_bits)
    engine = pick_engine(device, options.engine, options.compile or options.compile_prefill)
    if engine == "compile" and device.type == "cpu":
        native.start_building()
    start = time.perf_counter()
    source, tokenizer = open_model(options.checkpoint_path, None, options.adapter)
    options, context = options.over(source.defaults), source.cfg.context
    length = options.max_seq_length or min(LENGTH, context)
    if length > context:
        raise ValueError(f"--max_seq_length {length} exceeds the model's context of {context}")
    options = options.replaced(max_seq_length=length)
    dtype = pick_dtype(options.dtype, device, source.cfg)
    session = ServerSession(options, source, tokenizer, device, dtype, engine, start)
    if tp.rank():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)          # rank 0 says when it is over
    slots = Scheduler(session.batch, session.model.longest_call, reuse=True)

    def call(name, *call_args):
        try:
            return getattr(slots.worker, name)(*call_args)
        except Exception:
            if tp.rank() == 0:                     # which ends the request; the others go on
                raise

    def serve(call):
        slots.call = call
        http.serve(session, slots, listening)

    run_on_rank_0(call, serve)
    return 0


def listen(host: str, port: int) -> socket.socket:
    """OSError names the address that is taken."""
    try:
        [(family, *_, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        listening = socket.socket(family)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as e:
        raise OSError(f"cannot listen on {host}, port {port}: {e.strerror}: try another --port "
                      "or --host") from None
    return listening


class ServerSession(Runtime):
    """A model whose rows take what comes, each with parameters of its own."""

    def __init__(self, options: Options, source, tokenizer, device, dtype, engine: str,
                 start: float):
        self._grammars = None
        super().__init__(options, source, tokenizer, device, dtype, engine,
                         n_row=options.batch_size, longest=WARM, start=start,
                         speculate=options.speculate,
                         rewinds=1)                # the last token may be read late
        self.eos_ids = set(self.source.eos_ids)

    def grammars(self) -> Grammars:
        """Made when the first request needs it."""
        if self._grammars is None:
            self._grammars = Grammars(self.tokenizer, self.eos_ids, self.model.cfg.vocab_size)
        return self._grammars

    def make_sampler(self) -> Sampler:
        def matcher_of(params):
            spec = getattr(params, "grammar", None)
            return self.grammars().matcher(spec) if spec else None

        return build_request_sampler(self.model, self.n_row, self.generator, matcher_of)
