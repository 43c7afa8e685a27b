"""What hostile requests and hostile users of the machine may not do: end others' answers, stop everybody, have code run.

The server of a tiny model runs in this process, without sockets: its routes are called by httpx.
"""

import argparse
import asyncio
import ctypes
import itertools
import json
import os
import random
import shutil
import subprocess
import threading
import time
from pathlib import Path

import httpx
import pytest
import torch
from conftest import ROOT
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, pre_tokenizers

from checkpoint import sampling_values
from generate import n_common_end
from gpt_faster.bench import main as bench
from gpt_faster.cli import batch, flags, quantizing
from gpt_faster.cli.options import Options
from gpt_faster.decoding.logits_processors import Processor
from gpt_faster.decoding.request_sampler import GREEDY, RequestParams, build_request_sampler
from gpt_faster.decoding.scheduler import Generation, RowsBatch, Scheduler
from gpt_faster.formats.known_shapes import with_random_weights
from gpt_faster.kernels import torch_internals
from gpt_faster.kernels.cpu import native
from gpt_faster.server import main as serve
from gpt_faster.server.app import HttpServer
from gpt_faster.server.engine import Engine
from gpt_faster.server.metrics import Metrics
from gpt_faster.storage import disk, weight_cache
from gpt_faster.text.token_bytes import unicode_to_bytes
from model import ModelConfig
from sampling import RANGES, SamplingParams
from tokenizer import NullTokenizer, Tokenizer, TokenizersBackend

CFG = ModelConfig(dim=32, n_layer=2, n_head=2, n_kv_head=1, head_dim=16, ffn_dim=48, vocab_size=260, context=256)
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
LENGTH = 96
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def byte_tokenizer() -> Tokenizer:
    """A token for each byte, and the two that the template needs."""
    fast = Fast(models.BPE(vocab={sign: byte for sign, byte in unicode_to_bytes().items()}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return Tokenizer(TokenizersBackend(fast), None, False, TEMPLATE, eos_ids=[257])


class InProcess:
    """The server, but for its sockets: ask() sends requests side by side and returns responses."""

    def __init__(self, *argv):
        parser = serve.build_parser()
        args = serve.check_options(Options.parse(parser, ["--device", "cpu", "--batch_size", "6", "--max_seq_length", str(LENGTH), *argv]))
        torch.manual_seed(0)
        source = with_random_weights(Path("tiny"), CFG)
        self.tokenizer = byte_tokenizer()
        source.eos_ids = self.tokenizer.eos_ids    # as load_for() does
        self.session = serve.ServerSession(args, source, self.tokenizer, torch.device("cpu"), torch.float32, "kv_cache", 0.0)
        with torch.no_grad():
            for p in self.session.model.parameters():
                if p.dim() > 1:
                    p.normal_(0, 0.3)              # so that no two tokens are nearly as likely
        slots = Scheduler(self.session.batch, self.session.model.longest_call)
        self.engine = Engine(slots, args.max_queue, Metrics())
        self.http = HttpServer(self.session, self.engine, Metrics())
        self.http.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.engine.run, daemon=True)
        self.thread.start()

    def ask(self, *requests, host="localhost:8000"):
        """requests: (path, fields or bytes) -> responses."""
        sent = {"content-type": "application/json", "host": host}

        async def all_of_them():
            async with self.client() as client:
                return await asyncio.gather(*(
                    client.get(path, headers=sent) if body is None else
                    client.post(path, content=body if isinstance(body, bytes) else json.dumps(body), headers=sent)
                    for path, body in requests))
        return self.http.loop.run_until_complete(all_of_them())

    def client(self):
        transport = httpx.ASGITransport(app=self.http.app)
        return httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60)

    def refused(self, status, path, body, **more):
        """-> OpenAI's error object."""
        [response] = self.ask((path, body), **more)
        assert response.status_code == status, response.text
        return response.json()["error"]

    def stop(self):
        self.engine.drain()
        self.thread.join(10)
        self.http.loop.close()
        assert not self.thread.is_alive()


@pytest.fixture(scope="module")
def server():
    server = InProcess("--max_queue", "200")
    yield server
    server.stop()


# ---- Values outside their range ------------------------------------------------------------------

HUGE = 10 ** 30
NUMBERS = [
    ("temperature", 1e308), ("temperature", -1), ("temperature", True), ("temperature", "1"), ("repetition_penalty", 1e300), ("repetition_penalty", 1e-300),
    ("repetition_penalty", 0), ("top_k", HUGE), ("top_k", True), ("top_k", -2), ("seed", HUGE), ("seed", 1 << 63),
    ("seed", -(1 << 63) - 1), ("seed", 1.5), ("seed", False), ("top_p", 0), ("top_p", 1.5), ("top_p", True), ("min_p", -0.1), ("min_p", 2),
    ("presence_penalty", 3), ("frequency_penalty", -1e308), ("logit_bias", {"1": 1e308}), ("logit_bias", {"1": True}), ("logit_bias", {str(HUGE): 1}),
    ("logit_bias", {"-1": 1}), ("n", HUGE), ("n", 0), ("n", True), ("max_tokens", HUGE), ("max_tokens", -HUGE),
    ("max_tokens", True), ("stream", 1), ("stop", [1]), ("stop", "")]
RAW = [(name, text) for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "logit_bias", "n", "chat_template_kwargs")
       for text in ("NaN", "Infinity", "-Infinity", "1e999", '{"1": NaN}')]


@pytest.mark.parametrize("path, begin", [(COMPLETIONS, '"prompt": "a"'), (CHAT, '"messages": [{"role": "user", "content": "a"}]')])
def test_a_number_outside_its_range_is_refused_by_name(server, path, begin):
    cases = [(name, json.dumps(value)) for name, value in NUMBERS] + RAW
    responses = server.ask(*((path, f'{{{begin}, "{name}": {value}}}'.encode()) for name, value in cases))
    for (name, value), response in zip(cases, responses):
        error = response.json()["error"]
        assert response.status_code == 400 and error["param"].startswith(name), (name, value, response.text)
        assert "damaged" not in error["message"]


def test_the_range_is_named_and_its_ends_are_allowed(server):
    error = server.refused(400, COMPLETIONS, dict(prompt="a", temperature=1e308))
    assert error["message"] == "temperature: must be at least 0, at most 1000000.0, got 1e+308" and error["param"] == "temperature"
    requests = [(COMPLETIONS, dict(prompt="ab", max_tokens=3, **{name: value}))
                for name, allowed in RANGES.items() if name != "top_n_sigma" for value in (allowed.minimum or 0.001, allowed.maximum)]
    requests += [(COMPLETIONS, dict(prompt="ab", max_tokens=2, top_k=-1, n=2, seed=(1 << 63) - 1))]
    requests = [(path, {k: int(v) if k in ("top_k", "seed") else v for k, v in fields.items()}) for path, fields in requests]
    assert [r.status_code for r in server.ask(*requests)] == [200] * len(requests)


@pytest.mark.parametrize("prompt", [[HUGE], [-1], [260], [1, HUGE, 2], [[1], [HUGE]], [True], [1.0], [[1.5]], ["a", 1], [None], [[None]], [], [[]], {}, 5, None])
def test_token_ids_that_are_none(server, prompt):
    error = server.refused(400, COMPLETIONS, dict(prompt=prompt, max_tokens=1))
    assert "prompt" in error["message"] and "damaged" not in error["message"]


LONE = "\ud83d"
TEXTS = [(COMPLETIONS, dict(prompt=LONE)), (COMPLETIONS, dict(prompt=["a", "b" + LONE])), (COMPLETIONS, dict(prompt="a", model=LONE)),
         (COMPLETIONS, dict(prompt="a", stop=[LONE])), (COMPLETIONS, dict(prompt="a", user=LONE)), (COMPLETIONS, dict(prompt="a", regex=LONE)),
         (COMPLETIONS, {"prompt": "a", LONE: 1}), (COMPLETIONS, dict(prompt="a", logit_bias={LONE: 1})),
         (CHAT, dict(messages=[dict(role="user", content=LONE)])), (CHAT, dict(messages=[dict(role="user", name=LONE, content="a")])),
         (CHAT, dict(messages=[dict(role=LONE, content="a")])), (CHAT, dict(messages=[{"role": "user", "content": "a", LONE: "x"}])),
         (CHAT, dict(messages=[dict(role="user", content=[dict(type="text", text=LONE)])])),
         (CHAT, dict(messages=[dict(role="user", content="a")], chat_template_kwargs={"x": {LONE: 1}})),
         (CHAT, dict(messages=[dict(role="user", content="a")], tools=[dict(type="function", function=dict(name="f", description=LONE))])),
         (CHAT, dict(messages=[dict(role="user", content="a")],
                     response_format=dict(type="json_schema", json_schema=dict(schema={"enum": [LONE]}))))]


def test_half_a_character_anywhere_is_refused_by_its_field(server):
    """Before, such a name in an error could not be written as JSON: 500 in plain text."""
    for (_, fields), response in zip(TEXTS, server.ask(*TEXTS)):
        field = next(name for name in fields if LONE in json.dumps({name: fields[name]}, ensure_ascii=False))
        error = response.json()["error"]
        assert response.status_code == 400 and "lone surrogate" in error["message"], (fields, response.text)
        assert error["message"].startswith(ascii(field)[1:-1])
    raw = b'{"prompt": "\xed\xa0\xbd"}'                     # the same in bytes that no UTF-8 has
    assert "not valid JSON" in server.refused(400, COMPLETIONS, raw)["message"]
    assert server.ask((COMPLETIONS, b'\xef\xbb\xbf{"prompt": "a", "max_tokens": 1}'))[0].status_code == 200


def test_every_reader_asks_the_same_table(tmp_path):
    """Flags, JSON lines, generation_config.json, the class itself; HTTP is above."""
    for name, allowed in RANGES.items():
        for value in (allowed.minimum, allowed.maximum):
            wrong = value + 1 if value == allowed.maximum else value - 1
            with pytest.raises(ValueError, match=f"{name} must be .*at most"):
                SamplingParams(**{name: wrong})
            with pytest.raises(ValueError, match=f'"{name}": must be'):
                batch.sampling_value(name, wrong)
            with pytest.raises(SystemExit):
                flags.build_parser().parse_args([f"--{name}={wrong}"])
            assert sampling_values({name: wrong}) == {}
        batch.sampling_value(name, allowed.kind(allowed.maximum))
        flags.build_parser().parse_args([f"--{name}={allowed.kind(allowed.maximum)}"])
        assert SamplingParams(**{name: allowed.kind(allowed.maximum)})
    with pytest.raises(ValueError, match="temperature must be"):
        SamplingParams(temperature=float("nan"))
    assert sampling_values(dict(top_k=40.5, temperature=True)) == {} and sampling_values(dict(top_k=40.0)) == {"top_k": 40}


def test_500_is_json_and_says_nothing_of_files(server, monkeypatch, capsys):
    def fails(*args):
        raise OverflowError("/secret/model.gguf: the file is damaged")
    monkeypatch.setattr(server.http.preparer, "build", fails)
    error = server.refused(500, COMPLETIONS, dict(prompt="a"))
    assert error["type"] == "server_error" and "secret" not in error["message"]
    assert "OverflowError" in capsys.readouterr().err


def test_a_text_that_the_tokenizer_cannot_encode_is_the_requests_fault(server, monkeypatch):
    def fails(*args):
        raise OverflowError("Python int too large")
    monkeypatch.setattr(server.tokenizer, "path", "/secret/model.gguf")
    monkeypatch.setattr(server.tokenizer.backend, "encode", fails)
    for path, body in ((COMPLETIONS, dict(prompt="a")), (CHAT, dict(messages=[dict(role="user", content="a")]))):
        message = server.refused(400, path, body)["message"]
        assert "cannot encode" in message and "secret" not in message and "damaged" not in message
    with pytest.raises(ValueError, match="is not a token id") as e:
        server.tokenizer.decode([HUGE])
    assert "damaged" not in str(e.value)


# ---- What fails in a shared call -----------------------------------------------------------------

BAD = 66                                           # a token of the one whose call raises
KINDS = [GREEDY, RequestParams(seed=5), RequestParams(temperature=0, frequency_penalty=1.5), RequestParams(seed=7, top_k=9, repetition_penalty=1.3),
         RequestParams(seed=3, presence_penalty=1.0, logit_bias=((5, 3.0),), logprobs=True)]


class Failing(Processor):
    """Raises where a prompt has BAD: at once, or after so many of its tokens."""

    def __init__(self, after):
        super().__init__()
        self.after, self.left = after, {}

    def begin(self, row, prompt, params):
        self.left.pop(row, None)
        if BAD in prompt:
            self.use(row, True)
            self.left[row] = self.after

    def observe(self, token):
        for row in self.left:
            self.left[row] -= 1

    def forward(self, logits, rows, draft_tokens=None):
        if any(n <= 0 for n in self.left.values()):
            raise RuntimeError("a row of this call is bad")
        return logits


def random_model():
    torch.manual_seed(0)
    from gpt_faster.formats.load import load_model
    model = load_model(with_random_weights(Path("tiny"), CFG), torch.float32, "cpu")
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(0, 0.3)
    return model


@pytest.fixture(scope="module")
def model():
    return random_model()


def answers(model, prompts, failing=None, n_row=6, n_new=8):
    """-> the new ids of each prompt, or None where it failed; and the slots."""
    model.setup_cache(n_row, 64, 32, max_rejected=1)
    sampler = build_request_sampler(model, n_row, torch.Generator().manual_seed(1), lambda params: None)
    if failing:
        sampler.processors.append(failing)
    slots = Scheduler(RowsBatch(model, sampler), max_prefill=32, reuse=True)
    tasks = [Generation(NullTokenizer(), ids, max_new=n_new, params=kind, n_top=2 if kind.logprobs else None)
             for ids, kind in zip(prompts, itertools.cycle(KINDS))]
    slots.waiting.extend(tasks)
    failed, logprobs = set(), {task: [] for task in tasks}
    for event in slots.run():
        if event.error:
            failed.add(event.generation)
        logprobs[event.generation] += [p.chosen for _, p in event.logprobs]
    return [None if task in failed else (task.ids, logprobs[task]) for task in tasks], slots


@pytest.mark.parametrize("after", [0, 1, 4])
@pytest.mark.parametrize("n_bad", [1, 2])
def test_the_one_that_fails_in_a_shared_call_fails_alone(model, after, n_bad):
    """In a prefill or a step of six rows: greedy ones, ones with seeds, penalties that count, logprobs."""
    g = torch.Generator().manual_seed(after)
    prompts = [(torch.randint(100, 160, (3 + i % 4,), generator=g)).tolist() for i in range(11)]
    expected = [answers(model, [[1]] * i + [prompts[i]], n_row=1)[0][i] for i in range(len(prompts))]
    for i in range(n_bad):
        prompts[2 + 3 * i][1] = BAD
    got, slots = answers(model, prompts, Failing(after))
    for i, (ours, alone) in enumerate(zip(got, expected)):
        if BAD in prompts[i]:
            assert ours is None
        else:
            assert ours[0] == alone[0] and ours[1] == pytest.approx(alone[1], abs=1e-4), i
    assert not slots.running and not slots.prefilling and not slots.suspects and slots.n_waiting() == 0


@pytest.mark.parametrize("name", ["qwen3_5_text", "gemma3_text"])
def test_states_and_rings_begin_anew_after_a_call_that_failed(ours, name):
    """What the call had done to them is not gone on from."""
    model = ours(name)
    prompts = [[101, 102, 103, 104], [105, BAD, 107], [108, 109, 110, 111, 112], [113, 114]]
    expected = [answers(model, [[1]] * i + [prompts[i]], n_row=1)[0][i] for i in (0, 2, 3)]
    got, _ = answers(model, prompts, Failing(3), n_row=4)
    assert got[1] is None and [ids for ids, _ in (got[0], got[2], got[3])] == [ids for ids, _ in expected]


def test_a_task_that_leaves_while_it_is_fed_its_tokens_again_leaves_a_right_cache(model):
    """What its row keeps is what was fed, not all that it had."""
    model.setup_cache(6, 64, 32)
    sampler = build_request_sampler(model, 6, None, lambda params: None)
    sampler.processors.append(Failing(5))
    slots = Scheduler(RowsBatch(model, sampler), max_prefill=32, reuse=True)
    tasks = [Generation(NullTokenizer(), ids, max_new=20, params=GREEDY) for ids in ([101, 102, 103], [105, 106], [104, BAD])]
    slots.waiting.extend(tasks)
    left = tasks[0]

    def leaves():                                  # two tokens into its second run
        if left.n_replay and left.n_sampled == 2 and left in slots.running.values():
            slots.drop(left)
    slots.poll = leaves
    for _ in slots.run():
        pass
    assert left.finish_reason is None and len(left.ids) >= 5 and left.n_sampled == 2
    assert left.prompt_ids + left.ids[:1] in slots.cached_ids
    again = Generation(NullTokenizer(), left.prompt_ids + left.ids, max_new=6, params=GREEDY)
    expected = answers(model_copy(model), [again.prompt_ids], n_row=1, n_new=6)[0][0][0]
    slots.waiting.append(again)
    for _ in slots.run():
        pass
    assert again.ids == expected and again.n_reused > 0


def model_copy(model):
    import copy
    return copy.deepcopy(model)


def test_over_http_the_one_that_fails_gets_500_and_the_others_their_answers():
    """Whole and streamed; the letter B, whose byte is BAD, makes a call raise after three tokens."""
    server = InProcess("--max_queue", "64")
    try:
        g = random.Random(0)
        good = [(path, fields) for path, fields in (ordinary(g) for _ in range(12)) if path == COMPLETIONS]
        alone = [text_of(server.ask(request)[0]) for request in good]
        server.session.batch.sampler.processors.append(Failing(3))
        bad = [(COMPLETIONS, dict(prompt="aBc", max_tokens=9, temperature=0, stream=stream)) for stream in (False, True)]
        responses = server.ask(bad[0], *good, bad[1])
        assert [text_of(r) for r in responses[1:-1]] == alone and len(alone) > 3
        assert responses[0].status_code == 500 and responses[0].json()["error"]["code"] == "internal"
        assert responses[-1].status_code == 200 and '"code": "internal"' in responses[-1].text and "[DONE]" not in responses[-1].text
        server.session.batch.sampler.processors.pop(-1)
        assert [text_of(r) for r in server.ask(*good)] == alone
    finally:
        server.stop()


# ---- What takes long -----------------------------------------------------------------------------

def test_a_prompt_is_refused_by_its_bytes_before_it_is_tokenized(server, monkeypatch):
    """As many bytes as positions times the longest token can hold: here 96 x 12."""
    def never(*args):
        raise AssertionError("tokenized")
    assert server.http.preparer.max_bytes == LENGTH * len("<|im_start|>")
    monkeypatch.setattr(server.tokenizer.backend, "encode", never)
    long = "a " * 600
    for path, body in ((COMPLETIONS, dict(prompt=long)), (COMPLETIONS, dict(prompt=["a", long][1:])),
                       (CHAT, dict(messages=[dict(role="user", content=long)])),
                       (CHAT, dict(messages=[dict(role="user", content=long[:400])] * 3)),
                       (CHAT, dict(messages=[dict(role="user", content=[dict(type="text", text=long)])]))):
        error = server.refused(400, path, body)
        assert "bytes exceed what 96 tokens can hold (1,152)" in error["message"] and error["code"] == "context_length_exceeded"
    monkeypatch.undo()
    assert server.ask((COMPLETIONS, dict(prompt=long[:90], max_tokens=1)))[0].status_code == 200


def test_stop_strings_are_short(server):
    """Each of their beginnings is looked for after each token, in the thread that all share."""
    for stop in ("a" * 257, ["a"] * 17, ["b", ""]):
        assert "at most 16 strings of 1 to 256" in server.refused(400, COMPLETIONS, dict(prompt="a", stop=stop))["message"]
    g = random.Random(0)
    for _ in range(2000):
        text, stop = ("".join(g.choice("ab") for _ in range(g.randint(n, 7))) for n in (0, 1))
        assert n_common_end(text, stop) == max(n for n in range(len(stop)) if text.endswith(stop[:n]))


@pytest.mark.parametrize("depth", [450, 900, 100_000])
def test_a_body_that_is_nested_deeply_gets_no_500(server, depth):
    nested = '{"a":' * depth + "1" + "}" * depth
    user = '{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, '
    bodies = [user + f'"chat_template_kwargs": {{"x": {nested}}}}}', user + f'"x": {nested}}}',
              user + f'"response_format": {{"type": "json_schema", "json_schema": {{"schema": {nested}}}}}}}']
    assert {r.status_code for r in server.ask(*((CHAT, body.encode()) for body in bodies))} <= {200, 400}


@pytest.mark.parametrize("middle", [b"[1],", b'{"a":1},', b'{"role":"u"},'])
def test_a_body_of_a_million_parts_is_refused_before_it_is_read(server, middle):
    """pydantic took a minute for a list of 2.7 million items, in which nothing else ran."""
    body = b'{"prompt": "a", "messages": [' + middle * 300_000 + b"1]}"
    start = time.process_time()
    for path in (COMPLETIONS, CHAT):
        assert "more than 50,000" in server.refused(400, path, body)["message"]
    assert time.process_time() - start < 2
    assert "more than 62,288 values" in server.refused(400, COMPLETIONS, b'{"prompt": [' + b"1," * 70_000 + b"1]}")["message"]
    text = json.dumps("{[:," * 30_000).encode()             # in a string they are text
    assert "bytes exceed" in server.refused(400, COMPLETIONS, b'{"prompt": ' + text + b"}")["message"]


def test_a_long_text_holds_no_lock_that_others_need(server, monkeypatch):
    """While one is being tokenized, another one is answered, and nobody waits for the interpreter."""
    encode, released, entered = server.tokenizer.encode, threading.Event(), threading.Event()

    def slowly(text, *more):
        if len(text) > 10_000:
            entered.set()
            assert released.wait(20)
            raise ValueError("too long")
        return encode(text, *more)
    monkeypatch.setattr(server.tokenizer, "encode", slowly)
    monkeypatch.setattr(server.http.preparer, "max_bytes", 1 << 30)

    async def both():
        async with server.client() as client:
            headers = {"content-type": "application/json"}
            long = asyncio.ensure_future(client.post(COMPLETIONS, content=json.dumps(dict(prompt="a" * 100_000)), headers=headers))
            while not entered.is_set():
                await asyncio.sleep(0.01)
            short = await client.post(COMPLETIONS, content=json.dumps(dict(prompt="a", max_tokens=1)), headers=headers)
            was_waiting = not long.done()
            released.set()
            return was_waiting, short.status_code, (await long).status_code
    assert server.http.loop.run_until_complete(both()) == (True, 200, 400)


def test_a_long_text_is_encoded_without_the_interpreters_lock():
    backend, ticks = byte_tokenizer().backend, []
    text = "some words, 123 and more: <|im_end|> " * 12_000
    thread = threading.Thread(target=lambda: ticks.append(backend.encode(text, special=True)))
    thread.start()
    n = 0
    while thread.is_alive():
        time.sleep(0.001)
        n += 1
    assert n > 5
    pieces = [i for piece in [text[:37]] * 12_000 for i in backend.encode(piece, special=True)]
    assert ticks[0] == pieces
    assert 257 in backend.encode("<|im_end|>", special=True) and 257 not in backend.encode("<|im_end|>", special=False)


def test_threads_that_encode_do_not_disturb_each_other():
    """tokenizers raises "Already borrowed" where a tokenizer is changed while another thread encodes by it."""
    backend, wrong = byte_tokenizer().backend, []
    expected = {special: backend.encode("a<|im_end|>" * 2000, special) for special in (True, False)}

    def run(special):
        for _ in range(30):
            try:
                if backend.encode("a<|im_end|>" * 2000, special) != expected[special]:
                    wrong.append("other ids")
            except BaseException as e:
                wrong.append(repr(e))
    threads = [threading.Thread(target=run, args=(i % 2 == 0,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---- Keys and hosts ------------------------------------------------------------------------------

@pytest.mark.parametrize("how", ["flag", "blank", "environment"])
def test_an_empty_key_is_refused_at_the_start(how, monkeypatch, capsys):
    monkeypatch.setattr(serve, "open_model", lambda *a: pytest.fail("it went on"))
    argv = [] if how == "environment" else ["--api_key", "" if how == "flag" else "  "]
    if how == "environment":
        monkeypatch.setenv("GPT_FASTER_API_KEY", "")
    with pytest.raises(SystemExit) as e:
        serve.main(["--port", "0", *argv])
    assert e.value.code == 2 and "is empty" in capsys.readouterr().err


def test_a_foreign_host_is_refused_on_loopback(server, monkeypatch):
    def status(host):
        [answer] = server.ask(("/health", None), host=host)
        assert answer.status_code == 200 or answer.json()["error"]["code"] == "host_not_allowed"
        return answer.status_code
    foreign = ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "0.0.0.0:8000", "192.168.1.5", "[::2]:80", "",
               "localhost:80:80", "evil@localhost", "caf\xe9.example".encode("latin-1"))
    own = ("localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1", "127.0.0.1:8123", "127.9.8.7:1", "[::1]", "[::1]:8000")
    assert {status(host) for host in foreign + own} == {200}           # open to the network: any name
    monkeypatch.setattr(server.http, "loopback", True)
    assert {host: status(host) for host in foreign} == dict.fromkeys(foreign, 403)
    assert {host: status(host) for host in own} == dict.fromkeys(own, 200)
    monkeypatch.setattr(server.http, "options", server.http.options.replaced(allowed_hosts=["my.example"]))
    assert status("My.Example:443") == status("localhost") == 200 and status("evil.example") == 403
    monkeypatch.setattr(server.http, "loopback", False)
    assert status("my.example") == 200 and status("evil.example") == 403
    assert server.refused(403, COMPLETIONS, dict(prompt="a"), host="evil.example")["message"].startswith("the Host header 'evil.example' is not allowed")


def test_allowed_hosts_is_a_flag():
    assert serve.build_parser().parse_args(["--allowed-hosts", "A.example", "b"]).allowed_hosts == ["a.example", "b"]


# ---- The cache -----------------------------------------------------------------------------------

SOMEBODY = 12345


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of this user's, whose parent is too."""
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("GPT_FASTER_CACHE", str(folder))
    torch_internals.note_once.cache_clear()
    native._home.cache_clear()
    yield folder
    native._home.cache_clear()


def make_untrusted(how, folder, path):
    """Let others write a file's folder, the folder's parent, or the file."""
    if how in ("0777", "0770"):
        folder.chmod(int(how, 8))
    elif how == "parent":
        folder.parent.chmod(0o777)
    elif how == "file":
        path.chmod(0o664)
    elif os.geteuid() != 0:
        pytest.skip("only root gives files away")
    else:
        os.chown({"somebody's folder": folder, "somebody's parent": folder.parent, "somebody's file": path}[how], SOMEBODY, -1)


UNTRUSTED = ["0777", "0770", "parent", "file", "somebody's folder", "somebody's parent", "somebody's file"]


@pytest.mark.parametrize("how", UNTRUSTED)
def test_a_planted_library_is_not_loaded(cache, tmp_path, monkeypatch, capsys, how):
    """It would say so when it is loaded; the own one, copied by what stands for a compiler, is loaded instead."""
    monkeypatch.setenv("GPT_FASTER_CACHE", str(ROOT / ".cache/tests"))
    assert native.is_available()
    own, work = native.library_path(), tmp_path / "work"
    native._home.cache_clear()
    monkeypatch.setenv("GPT_FASTER_CACHE", str(cache))
    work.mkdir()
    compiler = work / "g++"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *-fsyntax-only*) exit 0;; esac\nwhile [ "$1" != -o ]; do shift; done\nhead -c -{len(native.END_MARK)} "{own}" > "$2"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    planted = cache / native.library_path().name
    source = work / "planted.cpp"
    source.write_text(f'#include <cstdio>\n__attribute__((constructor)) void run() {{ std::fopen("{work}/was_loaded", "w"); }}\n')
    subprocess.run(["g++", "-shared", "-fPIC", "-o", planted, source], check=True)
    with open(planted, "ab") as f:
        f.write(native.END_MARK)
    planted.chmod(0o755)
    assert native.is_complete(planted)
    make_untrusted(how, cache, planted)
    torch_internals.note_once.cache_clear()
    native._home.cache_clear()
    library = native.library.__wrapped__()
    assert library.panel_width() > 0 and not (work / "was_loaded").exists()
    path = native.library_path()
    assert disk.is_trusted(path) and (path.parent == cache) == ("file" in how)
    assert "is not used" in capsys.readouterr().err
    ctypes.CDLL(str(shutil.copy(planted, work / "copy.so")) if path != planted else str(path))
    assert (work / "was_loaded").exists() == (path != planted), "what was planted would have run"


@pytest.mark.parametrize("how", UNTRUSTED)
def test_planted_weights_are_not_loaded(cache, capsys, how):
    tensors = dict(a=torch.arange(5.0))
    weight_cache.save("key", tensors)
    assert torch.equal(weight_cache.load("key")["a"], tensors["a"])
    make_untrusted(how, cache, cache / "weights/key/data")
    assert weight_cache.load("key") is None and "is not used" in capsys.readouterr().err
    weight_cache.save("other", tensors)
    assert (cache / "weights/other").exists() == ("file" in how)


def test_digests_of_files_that_others_may_write_are_not_read(cache, tmp_path):
    from gpt_faster import loading
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"weights")
    right = loading.file_digest(file)
    known = cache / "contents.json"
    assert known.stat().st_mode & 0o777 == 0o600
    known.write_text(known.read_text().replace(right, "0" * 64))
    assert loading.file_digest(file) == "0" * 64
    known.chmod(0o666)
    assert loading.file_digest(file) == right


def test_links_and_sticky_folders(cache, tmp_path, monkeypatch):
    """A link counts as what it leads to; names in a sticky folder are their owners'."""
    link, sticky = tmp_path / "link", tmp_path / "sticky"
    link.symlink_to(cache)
    monkeypatch.setenv("GPT_FASTER_CACHE", str(link))
    assert disk.trusted_cache() == cache.resolve()
    sticky.mkdir()
    sticky.chmod(0o1777)
    (sticky / "mine").mkdir(mode=0o700)
    monkeypatch.setenv("GPT_FASTER_CACHE", str(sticky / "mine"))
    assert disk.trusted_cache() == (sticky / "mine").resolve()
    monkeypatch.setenv("GPT_FASTER_CACHE", str(sticky))
    assert disk.trusted_cache() is None
    cache.chmod(0o777)
    monkeypatch.setenv("GPT_FASTER_CACHE", str(link))
    assert disk.trusted_cache() is None


def test_a_new_cache_is_private_whatever_the_umask(tmp_path, monkeypatch):
    before = os.umask(0)
    try:
        monkeypatch.setenv("GPT_FASTER_CACHE", str(tmp_path / "a/b/cache"))
        folder = disk.trusted_cache()
        assert folder == tmp_path / "a/b/cache"
        weight_cache.save("key", dict(a=torch.ones(2)))
        assert weight_cache.load("key") is not None
        assert not any(path.stat().st_mode & 0o022 for path in (tmp_path / "a").rglob("*"))
        folder.chmod(0o777)
        private_one = disk.writable_folder()
        assert private_one != folder and private_one.stat().st_mode & 0o777 == 0o700
        shutil.rmtree(private_one)
    finally:
        os.umask(before)


# ---- Ordinary requests beside hostile ones -------------------------------------------------------

def ordinary(g):
    path, text = g.choice([COMPLETIONS, CHAT]), "".join(g.choice("abcdef ghij") for _ in range(g.randint(3, 30)))
    fields = dict(prompt=text) if path == COMPLETIONS else dict(messages=[dict(role="user", content=text)])
    fields |= g.choice([dict(temperature=0), dict(temperature=1, seed=g.randint(0, 99)), dict(temperature=0.7, top_k=9, seed=g.randint(0, 99)),
                        dict(temperature=0, frequency_penalty=1.2), dict(temperature=1.5, min_p=0.05, seed=3, repetition_penalty=1.2)])
    return path, dict(fields, max_tokens=g.randint(1, 12))


def hostile(g):
    """Of the kinds that got 500 and ended their neighbours, and more."""
    name, value = g.choice([case for case in NUMBERS if case[0] != "stream"])
    return g.choice([
        (COMPLETIONS, {"prompt": "a", "max_tokens": 2, name: value}), (CHAT, {"messages": [dict(role="user", content="a")], name: value}),
        (COMPLETIONS, dict(prompt=[g.choice([HUGE, -1, 260, 1 << 31])], max_tokens=2)), g.choice(TEXTS),
        (COMPLETIONS, f'{{"prompt": "a", "top_p": {g.choice(["NaN", "1e999", "-Infinity"])}}}'.encode()),
        (COMPLETIONS, dict(prompt="a" * g.randint(2000, 200_000))), (COMPLETIONS, g.randbytes(g.randint(0, 200))), (CHAT, b"[" * 5000)])


def text_of(response):
    [choice] = response.json()["choices"]
    return choice.get("text") or choice.get("message", {}).get("content")


@pytest.mark.parametrize("seed", [1, 2])
def test_48_ordinary_requests_beside_48_hostile_ones(server, seed):
    """All of them are answered as alone, and none of the others gets 500."""
    g = random.Random(seed)
    good, bad = [ordinary(g) for _ in range(48)], [hostile(g) for _ in range(48)]
    alone = [text_of(server.ask(request)[0]) for request in good]
    order = g.sample(range(96), 96)
    responses = server.ask(*((good + bad)[i] for i in order))
    by_index = dict(zip(order, responses))
    assert [by_index[i].status_code for i in range(48)] == [200] * 48
    assert [text_of(by_index[i]) for i in range(48)] == alone
    assert {by_index[i].status_code for i in range(48, 96)} <= {400, 404}, [by_index[i].text for i in range(48, 96)]
    assert all(by_index[i].json()["error"]["message"] for i in range(48, 96))


@pytest.mark.parametrize("text", ["inf", "-inf", "nan", "1e999"])
def test_no_flag_takes_a_number_that_is_not_finite(text):
    """A limit of infinitely many MB cannot be counted in bytes."""
    for build in (serve.build_parser, flags.build_parser, quantizing.build_parser, bench.build_parser):
        for action in build()._actions:
            if not callable(action.type):
                continue
            try:
                value = action.type(text)
            except (ValueError, argparse.ArgumentTypeError, OSError):
                continue
            assert not isinstance(value, float), action.option_strings
