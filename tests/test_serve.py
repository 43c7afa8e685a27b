"""serve.py: OpenAI's API by OpenAI's client against a process of it; tokens are generate.py's in any company."""

import concurrent.futures
import http.client
import itertools
import json
import random
import re
import signal
import socket
import subprocess
import tarfile
import threading
import time
from collections import Counter
from types import SimpleNamespace

import hypothesis
import jsonschema
import openai
import pytest
import referencing
import torch
from commands import PYTHON
from conftest import ROOT, SMOLLM2
from hypothesis import strategies

from generate import Batch, generate
from gpt_faster.formats.load import open_checkpoint
from gpt_faster.loading import load_model
from gpt_faster.text.chat_template import encode_chat
from gpt_faster.text.tokenizer_files import load as load_tokenizer
from sampling import Sampler, SamplingParams

NAME = SMOLLM2.name
QUESTION = [dict(role="user", content="Name three colours.")]


class Process:
    """serve.py on a free port of loopback."""

    def __init__(self, *flags, n_rows=4, length=512, dtype="float32"):
        command = [*PYTHON, "serve.py", "-m", str(SMOLLM2), "--device", "cpu", "--dtype", dtype, "--compile",
                   "--port", "0", "--batch_size", str(n_rows), "--max_seq_length", str(length), *flags]
        self.process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        self.lines, self.port = [], None
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.search(r"on http://127\.0\.0\.1:(\d+)", line):
                self.port = int(found[1])
                break
        assert self.port, "".join(self.lines)
        self.reader = threading.Thread(target=lambda: self.lines.extend(self.process.stderr), daemon=True)
        self.reader.start()
        self.client = self.new_client()

    def new_client(self, key="none"):
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key=key, max_retries=0, timeout=600)

    def raw(self, method, path, body=None, headers=()):
        """-> status, headers, body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection.request(method, path, body, {"Content-Type": "application/json", **dict(headers)})
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        return answer.status, dict(answer.getheaders()), text

    def post(self, path, **fields):
        status, _, body = self.raw("POST", path, json.dumps(fields))
        return status, json.loads(body)

    def load(self):
        health = json.loads(self.raw("GET", "/health")[2])
        return health["running"], health["waiting"]

    def n_new_tokens(self):
        return int(float(re.search(r"^gpt_faster_new_tokens_total (\S+)", self.raw("GET", "/metrics")[2].decode(), re.M)[1]))

    def wait_until(self, load, seconds=120):
        end = time.monotonic() + seconds
        while self.load() != load:
            assert time.monotonic() < end, self.load()
            time.sleep(0.02)

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(60)
        self.reader.join(5)
        return status


@pytest.fixture(scope="module")
def server():
    process = Process()
    yield process
    assert process.stop() == 0 and not [line for line in process.lines if "Traceback" in line]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(open_checkpoint(SMOLLM2).tokenizer)


@pytest.fixture(scope="module")
def alone():
    """ids, n_new, params -> the new ids of a batch of one row."""
    model, source, _ = load_model(SMOLLM2, "cpu", torch.float32)
    model.setup_cache(1, 512, 512)

    def run(ids, n_new, params):
        batch, new = Batch(model, Sampler([params], source.cfg.vocab_size)), []
        for token in generate(batch, [ids], n_new):
            new.append(token.item())
            if new[-1] in source.eos_ids:
                break
        return new
    return run


def greedy(server, **fields):
    return server.client.completions.create(**{**dict(model=NAME, temperature=0, max_tokens=12), **fields})


def refused(server, status, match, path="/v1/chat/completions", **fields):
    """OpenAI's error object with this status."""
    fields = {**({"messages": QUESTION} if "chat" in path else {"prompt": "Once"}), **fields}
    got, body = server.post(path, max_tokens=3, **fields) if "max_tokens" not in fields else server.post(path, **fields)
    assert got == status and set(body["error"]) == {"message", "type", "param", "code"}, body
    assert re.search(match, body["error"]["message"]), body
    return body["error"]


# ---- Tokens --------------------------------------------------------------------------------------

def test_32_requests_side_by_side_give_the_tokens_of_each_alone(server, alone, tokenizer):
    """Greedy ones and ones with a seed, of many lengths, over four slots, half of them streamed."""
    text = "The harbour was quiet before dawn, and the boats turned slowly on their ropes. " * 6
    prompts = [text[:7 + 13 * i] for i in range(32)]
    counts = [3 + i % 11 for i in range(32)]
    how = [dict(temperature=0), dict(temperature=0.9, top_k=40, seed=5), dict(temperature=1, seed=6, top_p=0.9),
           dict(temperature=1.2, min_p=0.1, seed=7), dict(temperature=1, seed=9)]

    def ask(i):
        more = {k: v for k, v in how[i % 5].items() if k in ("top_k", "min_p")}
        fields = {k: v for k, v in how[i % 5].items() if k not in more}
        got = server.client.completions.create(
            model=NAME, prompt=prompts[i], max_tokens=counts[i], **fields, stream=i % 2 == 0,
            extra_body={"top_k": 0, "min_p": 0, **more})
        if i % 2 == 0:
            return "".join(event.choices[0].text for event in got)
        return got.choices[0].text

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        texts = list(pool.map(ask, range(32)))
    for i, got in enumerate(texts):
        new = alone(tokenizer.encode(prompts[i]), counts[i], SamplingParams(**how[i % 5]))
        assert got == tokenizer.decode(new), i


@pytest.mark.parametrize("kv_cache", ["int8", "int4", "fp8"])
def test_a_cache_of_codes_gives_the_tokens_that_the_command_prints(kv_cache, tokenizer, capsys):
    """One after another: what computes in another order may round to another code, in fp32 too (docs/limits.md)."""
    from gpt_faster.cli import session
    prompts = ["The harbour was quiet before dawn, and", "Once upon a time", "def area(self):"]
    expected = []
    for prompt in prompts:
        status = session.main(["-m", str(SMOLLM2), "--device", "cpu", "--dtype", "float32", "--compile", "--kv_cache", kv_cache,
                               "--prompt", prompt, "--max_new_tokens", "12", "--temperature", "0", "--json"])
        assert status == 0
        expected.append(tokenizer.decode(json.loads(capsys.readouterr().out)["new_ids"]))
    server = Process("--kv_cache", kv_cache, n_rows=1)
    answers = [server.post("/v1/completions", model=NAME, prompt=prompt, max_tokens=12, temperature=0) for prompt in prompts]
    server.stop()
    assert [answer["choices"][0]["text"] for _, answer in answers] == expected


def test_a_prefix_is_reused_and_changes_no_token(server):
    start = "The lighthouse keeper wrote the number of ships into his book every evening. " * 8
    first = greedy(server, prompt=start + "Then")
    again = greedy(server, prompt=start + "Then")
    other = greedy(server, prompt=start + "But in the winter")
    assert again.choices[0].text == first.choices[0].text
    assert again.usage.prompt_tokens_details.cached_tokens == first.usage.prompt_tokens - 1
    assert 100 < other.usage.prompt_tokens_details.cached_tokens < other.usage.prompt_tokens
    fresh = Process(n_rows=1)
    try:
        whole = greedy(fresh, prompt=start + "But in the winter")
        assert whole.usage.prompt_tokens_details.cached_tokens == 0
        assert whole.choices[0].text == other.choices[0].text
    finally:
        fresh.stop()


def test_a_long_prompt_stalls_no_stream(alone, tokenizer):
    """Chunks of 16 between the steps of another answer, and both get their own tokens."""
    server = Process("--prefill_chunk", "16")
    try:
        events = []

        def stream():
            for _ in server.client.completions.create(model=NAME, prompt="Once upon", max_tokens=60, temperature=0, stream=True):
                events.append(time.time())
        thread = threading.Thread(target=stream)
        thread.start()
        while len(events) < 3:
            time.sleep(0.005)
        long = "A line of the log, and one more. " * 40
        begun, before = time.time(), len(events)
        got = greedy(server, prompt=long, max_tokens=4)
        first = time.time()
        between = sum(begun < t < first for t in events)
        thread.join()
        assert between >= min(10, 60 - before), (before, between)
        assert got.choices[0].text == tokenizer.decode(alone(tokenizer.encode(long), 4, SamplingParams(temperature=0)))
    finally:
        server.stop()


# ---- Parameters ----------------------------------------------------------------------------------

def test_chat_whole_and_streamed(server, tokenizer, alone):
    asked = dict(model=NAME, messages=QUESTION, temperature=0, max_completion_tokens=20)
    whole = server.client.chat.completions.create(**asked)
    events = list(server.client.chat.completions.create(**asked, stream=True, stream_options=dict(include_usage=True)))
    new = alone(encode_chat(tokenizer, QUESTION), 20, SamplingParams(temperature=0))
    text = whole.choices[0].message.content
    assert text == tokenizer.decode(new)
    assert "".join(e.choices[0].delta.content or "" for e in events if e.choices) == text
    assert events[0].choices[0].delta.role == "assistant" and events[-1].choices == []
    assert events[-1].usage.completion_tokens == whole.usage.completion_tokens == len(new)
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + len(new)
    assert [e.choices[0].finish_reason for e in events if e.choices][-1] == whole.choices[0].finish_reason


def test_stop_n_seed_echo(server):
    text = greedy(server, prompt="One, two, three,", max_tokens=20).choices[0].text
    for stop in (text[6:9], ["never to be seen", text[6:9]]):
        cut = greedy(server, prompt="One, two, three,", max_tokens=20, stop=stop)
        assert cut.choices[0].text == text[:text.index(text[6:9])] and cut.choices[0].finish_reason == "stop"
    several = [greedy(server, prompt=["Once upon", "The sea"], n=2, temperature=1, seed=3, max_tokens=8, echo=True) for _ in "12"]
    texts = [[c.text for c in s.choices] for s in several]
    assert texts[0] == texts[1] and len(set(texts[0])) == 4 and [c.index for c in several[0].choices] == [0, 1, 2, 3]
    assert [t.split()[0] for t in texts[0]] == ["Once", "Once", "The", "The"]
    assert greedy(server, prompt="Hello", echo=True, max_tokens=0).choices[0].text == "Hello"


def test_logprobs_are_the_models(server, tokenizer):
    model, _, _ = load_model(SMOLLM2, "cpu", torch.float32)
    got = greedy(server, prompt="The capital of France is", max_tokens=4, echo=True, logprobs=2, temperature=1, seed=1)
    p = got.choices[0].logprobs
    ids = tokenizer.encode("The capital of France is" + "".join(p.tokens[5:]))
    assert len(ids) == 9 and p.token_logprobs[0] is None and "".join(p.tokens) == got.choices[0].text
    with torch.inference_mode():
        expected = model(torch.tensor([ids]), torch.arange(9), 9)[0].log_softmax(-1)
    for i in range(1, 9):
        assert p.token_logprobs[i] == pytest.approx(expected[i - 1, ids[i]].item(), abs=2e-3)
        assert max(p.top_logprobs[i].values()) == pytest.approx(expected[i - 1].max().item(), abs=2e-3)
    chat = server.client.chat.completions.create(model=NAME, messages=QUESTION, temperature=0, max_tokens=5, logprobs=True,
                                                 top_logprobs=3)
    entries = chat.choices[0].logprobs.content
    assert len(entries) == 5 and b"".join(bytes(e.bytes) for e in entries).decode() == chat.choices[0].message.content
    assert all(len(e.top_logprobs) == 3 and e.top_logprobs[0].logprob == e.logprob for e in entries)
    asked = dict(model=NAME, max_tokens=40, temperature=0, stream=True)
    events = [e.choices[0] for e in server.client.chat.completions.create(
        **asked, messages=QUESTION, logprobs=True, top_logprobs=3)]
    streamed = [entry for e in events if e.logprobs for entry in e.logprobs.content]   # how many an event has depends on the machine's speed
    assert [e.token for e in streamed[:5]] == [e.token for e in entries] and len(streamed) <= 40
    assert [e.logprob for e in streamed[:5]] == pytest.approx([e.logprob for e in entries], abs=1e-4)
    assert b"".join(bytes(e.bytes) for e in streamed).decode() == "".join(e.delta.content or "" for e in events)
    events = [e.choices[0] for e in server.client.completions.create(**asked, prompt="The capital of France is", logprobs=0)]
    tokens = [token for e in events if e.logprobs for token in e.logprobs.tokens]
    assert len(tokens) <= 40 and "".join(tokens).startswith("".join(e.text for e in events))


def test_bias_and_penalties(server, tokenizer):
    [comma] = tokenizer.encode(",", bos=False)
    only = greedy(server, prompt="Once", logit_bias={str(comma): 100}, max_tokens=5)
    assert only.choices[0].text == "," * 5
    never = greedy(server, prompt="One, two, three,", logit_bias={str(comma): -100}, max_tokens=20)
    assert "," not in never.choices[0].text
    loop = "la la la la la la la la la la la la"
    plain = greedy(server, prompt=loop, max_tokens=16).choices[0].text.split()
    for more in (dict(frequency_penalty=2.0), dict(presence_penalty=2.0), dict(extra_body=dict(repetition_penalty=5.0))):
        assert greedy(server, prompt=loop, max_tokens=16, **more).choices[0].text.split() != plain


# ---- Structure and tools -------------------------------------------------------------------------

SCHEMA = dict(type="object", additionalProperties=False, required=["name", "age", "tags"], properties=dict(
    name=dict(type="string", maxLength=12), age=dict(type="integer", minimum=0, maximum=150),
    tags=dict(type="array", items=dict(enum=["a", "b", "c"]), maxItems=3)))


def test_every_structured_answer_validates_at_temperature_1(server):
    def ask(seed):
        form = dict(type="json_schema", json_schema=dict(name="person", schema=SCHEMA))
        got = server.client.chat.completions.create(model=NAME, messages=QUESTION, temperature=1, seed=seed, max_tokens=120,
                                                    response_format=form)
        return got.choices[0]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        for choice in pool.map(ask, range(12)):
            assert choice.finish_reason == "stop"
            jsonschema.validate(json.loads(choice.message.content), SCHEMA)


SUITE = ROOT / "checkpoints/jsonschema-4.26.0.tar.gz"


@pytest.fixture(scope="session")
def public_schemas():
    """Of JSON-Schema-Test-Suite, drafts 2019-09 and 2020-12, in random order. It comes with jsonschema's sources."""
    assert SUITE.exists(), f"{SUITE} is not there: run `bash scripts/setup.sh requirements-dev.txt gemma`, which fetches it"
    schemas = []
    with tarfile.open(SUITE) as archive:
        for name in sorted(archive.getnames()):
            if re.search(r"/json/tests/draft20(19-09|20-12)/[^/]*\.json$", name):
                schemas += [case["schema"] for case in json.load(archive.extractfile(name)) if isinstance(case["schema"], dict)]
    return random.Random(0).sample(schemas, len(schemas))


def answer_to_schemas(server, tokenizer, schemas, max_tokens, first=0):
    """-> a count of what became of them. Each answer that ended must validate, each refusal say what is not supported.

    At temperature 1 a small model seldom comes to an end: quotes and brackets that close are made likelier.
    """
    closing = {str(t): 6 for text in ('"', "}", "]", '"}', '"]', '":', "0") for t in tokenizer.encode(text)[-1:]}

    def ask(i, schema):
        status, body = server.post("/v1/chat/completions", messages=QUESTION, temperature=1, seed=i, max_tokens=max_tokens, logit_bias=closing,
                                   response_format=dict(type="json_schema", json_schema=dict(schema=schema)))
        if status == 400:
            error = body["error"]
            assert error["param"] == "response_format", error
            named = re.findall(r'"([$a-zA-Z]+)"', error["message"])
            inside = "json-schema.org" in json.dumps(schema.get("$ref", ""))         # what that schema says
            assert named and (inside or all(f'"{name}"' in json.dumps(schema) for name in named)) or REASONS.search(error["message"]), error
            return "refused"
        assert status == 200, (schema, body)
        [choice] = body["choices"]
        if choice["finish_reason"] == "stop":
            jsonschema.validators.validator_for(schema)(schema, registry=NOTHING_REMOTE).validate(json.loads(choice["message"]["content"]))
        return choice["finish_reason"]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return Counter(pool.map(ask, range(first, first + len(schemas)), schemas))


NOTHING_REMOTE = referencing.Registry()
REASONS = re.compile("oneOf|Unsatisfiable schema|Resource '|Unknown format|Expected positive integer for '|multipleOf|patternProperty")


def test_schemas_of_a_public_suite(server, tokenizer, public_schemas):
    counts = answer_to_schemas(server, tokenizer, public_schemas[:30], 24)
    assert counts["refused"] >= 8 and counts["stop"] >= 3, counts


@pytest.mark.parametrize("first", range(0, 700, 25))
def test_answers_to_schemas_of_a_public_suite(server, tokenizer, public_schemas, first):
    """25 of them, from the first one on: some come to an end."""
    counts = answer_to_schemas(server, tokenizer, public_schemas[first:first + 25], 120, first)
    assert counts["stop"] >= 2, counts


def test_json_object_regex_and_grammar(server):
    for more, match in ((dict(regex=r"[0-9]{3}-[a-z]{2}"), r"[0-9]{3}-[a-z]{2}"),
                        (dict(grammar='start: "yes" | "no"'), "yes|no")):
        got = greedy(server, prompt="Answer:", temperature=1, max_tokens=20, extra_body=more)
        assert re.fullmatch(match, got.choices[0].text), got
    got = server.client.chat.completions.create(model=NAME, messages=QUESTION, temperature=0, max_tokens=200,
                                                response_format=dict(type="json_object"))
    assert got.choices[0].message.content.startswith("{")
    if got.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(got.choices[0].message.content), dict)
    refused(server, 400, "regex", regex="(a")
    refused(server, 400, "contains", response_format=dict(type="json_schema", json_schema=dict(schema={"contains": 3})))
    refused(server, 400, "mutually exclusive", regex="a", grammar="start: \"a\"")


def test_generate_py_takes_a_schema(tmp_path):
    file = tmp_path / "schema.json"

    def run(text):
        file.write_text(text)
        return subprocess.run([*PYTHON, "generate.py", "-m", SMOLLM2, "--device", "cpu", "--json_schema", file, "--prompt", "A person: ",
                               "--temperature", "1", "--max_new_tokens", "120", "--json"], cwd=ROOT, capture_output=True, text=True)
    jsonschema.validate(json.loads(json.loads(run(json.dumps(SCHEMA)).stdout)["text"]), SCHEMA)
    for text, match in (("[]", "a JSON schema must be an object"), ("{", "not valid JSON"), ('{"contains": 3}', "contains")):
        result = run(text)
        assert result.returncode == 2 and match in result.stderr.splitlines()[-1], result.stderr


TOOL = dict(type="function", function=dict(name="weather", parameters=dict(
    type="object", required=["city"], additionalProperties=False, properties=dict(city=dict(type="string", maxLength=10)))))


def test_tools_are_refused_by_a_template_that_knows_none(server):
    assert refused(server, 400, "does not support tools", tools=[TOOL])["param"] == "tools"


@pytest.mark.parametrize("form", ["hermes", "llama", "gemma"])
@pytest.mark.slow
def test_a_forced_call_comes_back_as_one(form):
    server = Process("--tool_format", form, n_rows=2)
    try:
        asked = dict(model=NAME, messages=QUESTION, tools=[TOOL], tool_choice="required", temperature=1, max_tokens=100, seed=2)
        [call] = (whole := server.client.chat.completions.create(**asked)).choices[0].message.tool_calls
        assert call.function.name == "weather" and whole.choices[0].finish_reason == "tool_calls"
        jsonschema.validate(json.loads(call.function.arguments), TOOL["function"]["parameters"])
        events = server.client.chat.completions.create(**asked, stream=True)
        deltas = [d for e in events if (d := e.choices[0].delta).tool_calls]
        assert "".join(d.tool_calls[0].function.arguments for d in deltas) == call.function.arguments
        named = dict(type="function", function=dict(name="weather"))
        assert server.client.chat.completions.create(**{**asked, "tool_choice": named}).choices[0].message.tool_calls
        follow = [*QUESTION, whole.choices[0].message.model_dump(exclude_none=True),
                  dict(role="tool", tool_call_id=call.id, content="12 degrees")]
        again = server.client.chat.completions.create(model=NAME, messages=follow, max_tokens=4, temperature=0)
        assert again.usage.prompt_tokens > whole.usage.completion_tokens
    finally:
        server.stop()


# ---- What is wrong -------------------------------------------------------------------------------

WRONG = [
    (400, "did you mean 'temperature'", dict(temperatur=1)), (400, "not supported", dict(suffix="x", best_of=2)), (400, "temperature", dict(temperature=-1)),
    (400, "temperature", dict(temperature="hot")), (400, "top_p", dict(top_p=0)), (400, "^n:", dict(n=0)),
    (400, "stop", dict(stop=[""])), (400, "is not a token", dict(logit_bias={"x": 1})), (400, "is not a token", dict(logit_bias={"999999": 1})),
    (404, "does not exist", dict(model="gpt-4")),
    (400, "logprobs", dict(top_logprobs=3)),
    (400, "messages", dict(messages=[])), (400, "role", dict(messages=[dict(role="robot", content="x")])),
    (400, "content", dict(messages=[dict(role="user", content=[dict(type="image_url", image_url="x")])])),
    (400, "cannot replace", dict(chat_template_kwargs=dict(messages=[]))), (400, "requires tools", dict(tool_choice="required")),
]


@pytest.mark.parametrize("status, match, fields", WRONG)
def test_what_is_wrong_is_named(server, status, match, fields):
    refused(server, status, match, **fields)


def test_wrong_completions(server):
    path = "/v1/completions"
    refused(server, 400, "shorten it", path, prompt="word " * 600)
    refused(server, 400, "is empty", path, prompt="")
    refused(server, 400, "prompt", path, prompt=[])
    refused(server, 400, "id 60000", path, prompt=[1, 60000])
    refused(server, 400, "requires echo", path, max_tokens=0)
    refused(server, 400, "best_of", path, best_of=3)


def test_malformed_bodies_and_paths(server):
    path = "/v1/chat/completions"
    for body, status in ((b"{", 400), (b"[1]", 400), (b"\xff\xfe", 400), (b"[" * 100000, 400), (b"", 400), (b'{"messages": NaN}', 400)):
        got, _, text = server.raw("POST", path, body)
        assert got == status and "error" in json.loads(text), body[:10]
    assert server.raw("POST", path, b"x" * 9_000_000)[0] == 413
    assert server.raw("POST", path, b"{}", {"Content-Type": "text/plain"})[0] == 415
    assert server.raw("GET", path)[0] == 405 and server.raw("GET", "/nowhere")[0] == 404
    assert server.raw("GET", "/v1/models/" + NAME)[0] == 200 and server.raw("GET", "/v1/models/x")[0] == 404
    with socket.create_connection(("127.0.0.1", server.port)) as s:
        s.sendall(b"nonsense\r\n\r\n")
        assert b"400" in s.recv(100)
    assert server.load() == (0, 0)


JSON = strategies.recursive(strategies.none() | strategies.booleans() | strategies.integers() | strategies.floats() | strategies.text(max_size=5),
                            lambda x: strategies.lists(x, max_size=3) | strategies.dictionaries(strategies.text(max_size=5), x, max_size=3))
NAMES = strategies.sampled_from(["messages", "temperature", "top_p", "n", "stop", "logit_bias", "seed", "tools", "tool_choice", "stream",
                                 "response_format", "regex", "logprobs", "top_k", "model", "stream_options", "x", "prompt", "echo"])


@pytest.mark.parametrize("seed", range(4))
def test_random_bodies_get_an_answer(server, seed):
    @hypothesis.seed(seed)
    @hypothesis.settings(max_examples=50, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(fields=strategies.dictionaries(NAMES, JSON, max_size=4), path=strategies.sampled_from(["chat/completions", "completions"]))
    def ask(fields, path):
        base = dict(messages=QUESTION) if "chat" in path else dict(prompt="Once")
        body = json.dumps({**base, **fields, "max_tokens": 1})
        status, _, text = server.raw("POST", f"/v1/{path}", body)
        assert status in (200, 400, 404), (status, text)
        if status != 200:
            assert json.loads(text)["error"]["message"]
    ask()


# ---- Under load ----------------------------------------------------------------------------------

def test_a_client_that_leaves_frees_its_slot(server):
    """Long before its answer would have been complete."""
    before = server.n_new_tokens()
    stream = server.client.completions.create(model=NAME, prompt="Count:", max_tokens=450, temperature=0, stream=True,
                                              extra_body=dict(ignore_eos=True))
    next(iter(stream))
    assert server.load() == (1, 0)
    stream.close()
    server.wait_until((0, 0))
    assert server.n_new_tokens() - before < 400
    before = server.n_new_tokens()
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    body = json.dumps(dict(prompt="Count:", max_tokens=450, temperature=0, ignore_eos=True))
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    server.wait_until((1, 0))
    connection.close()
    server.wait_until((0, 0))
    assert server.n_new_tokens() - before < 400


def test_a_flood_gets_429_and_the_rest_their_answers(server):
    small = Process("--max_queue", "2", n_rows=1)
    try:
        def ask(i):
            return small.raw("POST", "/v1/completions", json.dumps(dict(prompt="Once", max_tokens=40, temperature=0)))
        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(ask, range(12)))
        statuses = [status for status, _, _ in answers]
        assert set(statuses) == {200, 429} and statuses.count(200) >= 3
        assert all("retry-after" in headers for status, headers, _ in answers if status == 429)
        assert len({text[text.index(b'"text"'):] for status, _, text in answers if status == 200}) <= 2    # cached_tokens differ
        small.wait_until((0, 0))
    finally:
        assert small.stop() == 0


def test_the_queue_has_the_length_that_was_asked_for(ours):
    """Of an engine that does not run: one request for each free row and max_queue more, in any pieces."""
    from gpt_faster.decoding.request_sampler import GREEDY, build_request_sampler
    from gpt_faster.decoding.scheduler import Generation, RowsBatch, Scheduler
    from gpt_faster.server.engine import Delivery, Engine, QueueFull
    from gpt_faster.server.metrics import Metrics
    from tokenizer import NullTokenizer
    model = ours("llama3")
    model.setup_cache(2, 32, 8)
    slots = Scheduler(RowsBatch(model, build_request_sampler(model, 2, None, lambda params: None)), max_prefill=8, reuse=True)

    def some(i):
        return Generation(NullTokenizer(), [1], params=GREEDY, user_data=Delivery(i, None, 1e9))
    for pieces in ([1] * 6, [4, 2], [6]):
        engine = Engine(slots, 4, Metrics())
        for n in pieces:
            engine.submit([some(i) for i in range(n)])
        with pytest.raises(QueueFull):
            engine.submit([some(0)])
        assert len(engine.inbox) == 6


def test_key_timeout_and_what_needs_none():
    server = Process("--api_key", "sesame", "--request_timeout", "0.3", n_rows=1)
    try:
        with pytest.raises(openai.AuthenticationError):
            server.new_client("wrong").models.list()
        assert server.raw("GET", "/health")[0] == 200 and server.raw("GET", "/metrics")[0] == 401
        client = server.new_client("sesame")
        assert client.models.list().data[0].id == NAME
        with pytest.raises(openai.APIStatusError) as e:
            client.completions.create(model=NAME, prompt="Count:", max_tokens=480, temperature=0, extra_body=dict(ignore_eos=True))
        assert e.value.status_code == 504
        assert client.completions.create(model=NAME, prompt="Hello", max_tokens=1).usage.completion_tokens == 1
    finally:
        server.stop()


def test_sigterm_finishes_what_runs():
    server = Process(n_rows=1)
    stream = server.client.completions.create(model=NAME, prompt="Count:", max_tokens=200, temperature=0, stream=True,
                                              extra_body=dict(ignore_eos=True))
    events = iter(stream)
    next(events)
    server.process.send_signal(signal.SIGTERM)
    while server.raw("GET", "/health")[0] == 200:
        time.sleep(0.01)
    status, _, _ = server.raw("POST", "/v1/completions", json.dumps(dict(prompt="Once", max_tokens=2)))
    assert status == 503
    assert [e.choices[0].finish_reason for e in events][-1] == "length"
    assert server.process.wait(120) == 0


def test_metrics_count(server):
    before = server.raw("GET", "/metrics")[2].decode()
    greedy(server, prompt="A prompt of its own", max_tokens=7)
    after = server.raw("GET", "/metrics")[2].decode()

    def value(text, name):
        return float(re.search(rf"^gpt_faster_{name} (\S+)", text, re.M)[1])
    assert value(after, "new_tokens_total") - value(before, "new_tokens_total") == 7
    assert value(after, "slots") == 4 and 'status="200"' in after


def test_bad_flags(capfd):
    def run(*flags):
        result = subprocess.run([*PYTHON, "serve.py", *flags], cwd=ROOT, capture_output=True, text=True)
        return result.returncode, result.stderr.strip().splitlines()[-1]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        status, line = run("--port", str(taken.getsockname()[1]))
        assert status == 2 and "cannot listen on 127.0.0.1" in line
    assert run("--speculate", "ngram", "--engine", "recompute") == (
        2, "serve.py: error: --engine recompute is not supported: the server needs a KV cache")


# ---- The slots, without HTTP ---------------------------------------------------------------------

def asked(prompts, n, params=None):
    from gpt_faster.decoding.request_sampler import GREEDY
    from gpt_faster.decoding.scheduler import Generation
    from tokenizer import NullTokenizer
    return [Generation(NullTokenizer(), ids, max_new=n, params=params or GREEDY) for ids in prompts]


def run_slots(slots, generations):
    """-> each one's error, or None."""
    errors, looks = {}, itertools.count()

    def count():
        assert next(looks) < 1000, "it never ends: a slot is not free"
    slots.poll = count
    slots.waiting.extend(generations)
    for event in slots.run():
        if event.error:
            errors[event.generation] = event.error
    return [errors.get(each) for each in generations]


@pytest.mark.parametrize("name", ["llama3", "gemma3_text", "qwen3_5_text"])
def test_slots_reuse_prefixes_in_chunks_and_rings(ours, name):
    """Turns of conversations over two rows, in chunks of 4: as recomputed from scratch."""
    from gpt_faster.decoding.request_sampler import build_request_sampler
    from gpt_faster.decoding.scheduler import RowsBatch, Scheduler
    model, g = ours(name), torch.Generator().manual_seed(3)

    def some(n):
        return torch.randint(0, 160, (n,), generator=g).tolist()
    starts = [some(9), some(12), some(5)]
    prompts = [start + some(n) for start in starts for n in (3, 6, 1)]
    expected = [plain(model, ids, 6) for ids in prompts]
    model.setup_cache(2, 48, 4)
    slots = Scheduler(RowsBatch(model, build_request_sampler(model, 2, None, lambda params: None)), max_prefill=4, reuse=True)
    tasks = asked(prompts, 6)
    assert run_slots(slots, tasks) == [None] * 9
    assert [task.ids for task in tasks] == expected
    assert name != "llama3" or sum(task.n_reused for task in tasks) > 20
    assert not slots.running and not slots.prefilling


def test_slots_go_on_from_a_state(ours):
    """A conversation that goes on as it was computes what is new only; one that was changed begins anew."""
    from gpt_faster.decoding.request_sampler import build_request_sampler
    from gpt_faster.decoding.scheduler import RowsBatch, Scheduler
    model = ours("qwen3_5_text")
    turns, said = [[5, 6, 7, 8, 9], [3, 4], [8, 1, 2]], []
    model.setup_cache(2, 64, 4, max_rejected=1)
    slots = Scheduler(RowsBatch(model, build_request_sampler(model, 2, None, lambda params: None)), max_prefill=4, reuse=True)
    tasks = []
    for turn in turns:
        tasks += asked([said + turn], 6)
        assert run_slots(slots, tasks[-1:]) == [None]
        assert tasks[-1].n_reused == max(0, len(said) - 1)                   # the last token was never fed
        said = said + turn + tasks[-1].ids
    changed = [*said[:9], 77, *said[10:]]
    tasks += asked([changed], 6)
    assert run_slots(slots, tasks[-1:]) == [None] and tasks[-1].n_reused == 0
    for task in tasks:
        assert task.ids == plain(model, task.prompt_ids, 6)


def plain(model, ids, n):
    from helpers import GREEDY, generated
    return [t.item() for t in generated(model, [ids], n, GREEDY, use_cache=False)]


def test_a_request_that_raises_takes_no_other_with_it(ours, monkeypatch):
    from gpt_faster.decoding.request_sampler import build_request_sampler
    from gpt_faster.decoding.scheduler import RowsBatch, Scheduler
    model = ours("llama3")
    prompts = [[1, 2, 3, 4, 5], [66] * 4, [7, 8, 9]]
    expected = [plain(model, ids, 5) for ids in prompts]
    model.setup_cache(2, 32, 8)
    batch = RowsBatch(model, build_request_sampler(model, 2, None, lambda params: None))
    prefill = batch.prefill

    def fails(rows, prompts, *more):
        if [66] * 4 in prompts:
            raise RuntimeError("no")
        return prefill(rows, prompts, *more)
    monkeypatch.setattr(batch, "prefill", fails)
    tasks = asked(prompts, 5)
    errors = run_slots(Scheduler(batch, max_prefill=5), tasks)
    assert [bool(e) for e in errors] == [False, True, False]
    assert [tasks[i].ids for i in (0, 2)] == [expected[0], expected[2]]


def test_a_request_that_comes_when_the_slots_have_just_ended_is_not_left_waiting(ours):
    """Between the slots' last look at who waits, and the engine's own."""
    from gpt_faster.decoding.request_sampler import build_request_sampler
    from gpt_faster.decoding.scheduler import RowsBatch, Scheduler
    from gpt_faster.server.engine import Delivery, Engine
    from gpt_faster.server.metrics import Metrics
    model, prompts = ours("llama3"), [[1, 2, 3], [7, 8, 9]]
    expected = [plain(model, ids, 4) for ids in prompts]
    model.setup_cache(1, 32, 8)
    slots = Scheduler(RowsBatch(model, build_request_sampler(model, 1, None, lambda params: None)), max_prefill=8, reuse=True)
    engine = Engine(slots, 4, Metrics())
    work = asked(prompts, 4)
    for each in work:
        each.user_data = Delivery(0, None, time.monotonic() + 60)
    run, ended = slots.run, []

    def run_and_then_it_comes():
        yield from run()
        if not ended:
            engine.submit(work[1:])
        ended.append(True)
    slots.run = run_and_then_it_comes
    engine.submit(work[:1])
    thread = threading.Thread(target=engine.run, daemon=True)
    thread.start()
    end = time.monotonic() + 20
    while len(ended) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    engine.drain()
    thread.join(5)
    assert [each.ids for each in work] == expected and not thread.is_alive()


def test_tokens_come_together_but_the_first_and_the_last_at_once(ours, monkeypatch):
    """By a clock that goes 15 ms further with each token."""
    from gpt_faster.decoding.request_sampler import build_request_sampler
    from gpt_faster.decoding.scheduler import RowsBatch, Scheduler
    from gpt_faster.server import engine as module
    from gpt_faster.server.metrics import Metrics
    model, clock, delivered = ours("llama3"), [100.0], []
    model.setup_cache(1, 32, 8)
    slots = Scheduler(RowsBatch(model, build_request_sampler(model, 1, None, lambda params: None)), max_prefill=8, reuse=True)
    engine = module.Engine(slots, 4, Metrics(), lambda events: delivered.extend(
        (e.text, len(e.generation.ids)) for e in events))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    run = slots.run

    def slowly():
        for event in run():
            clock[0] += 0.015
            yield event
    slots.run = slowly
    prompts = [[1, 2, 3], [7, 8, 9, 1]]
    work = asked(prompts, 9)
    for each in work:
        each.user_data = module.Delivery(0, None, 1e9)
    engine.submit(work)
    engine.drain()
    engine.run()
    assert [each.ids for each in work] == [plain(model, ids, 9) for ids in prompts]
    assert "".join(text for text, _ in delivered) == "".join(each.text for each in work)
    assert [n for _, n in delivered] == 2 * [1, 5, 9]


# ---- Tool calls and thinking ---------------------------------------------------------------------

TOOLS = [TOOL, dict(type="function", function=dict(name="add", parameters=dict(
    type="object", properties=dict(a=dict(type="integer"), s=dict(type="string")))))]
ANSWERS = [
    ("hermes", 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>', [("weather", {"city": "Rome"})], "Let me see."),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\n<tool_call>{"name": "weather", "arguments": {"city": "x"}}</tool_call>',
     [("add", {"a": 1}), ("weather", {"city": "x"})], ""),
    ("hermes", 'if a < b and <tool_call> is a tag', [], 'if a < b and <tool_call> is a tag'),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', [], '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    ("qwen_xml", '<tool_call>\n<function=add>\n<parameter=a>\n12\n</parameter>\n<parameter=s>\n34\n</parameter>\n</function>\n</tool_call>', [("add", {"a": 12, "s": "34"})], ""),
    ("qwen_xml", '<function=add><parameter=a>5</parameter></function>', [("add", {"a": 5})], ""),
    ("llama", '{"name": "weather", "parameters": {"city": "Oslo"}}', [("weather", {"city": "Oslo"})], ""),
    ("llama", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 2}}', [("add", {"a": 1}), ("add", {"a": 2})], ""),
    ("llama", '{"answer": 3}', [], '{"answer": 3}'), ("llama", "Plain {text}.", [], "Plain {text}."),
    ("gemma", '```tool_code\nprint(weather(city="Bern"))\n```', [("weather", {"city": "Bern"})], ""),
    ("gemma", '```json\n{"name": "add", "parameters": {"a": 3}}\n```', [("add", {"a": 3})], ""),
    ("gemma", '[weather(city="Bern"), add(a=2)]', [], '[weather(city="Bern"), add(a=2)]'),
    ("gemma", '```tool_code\nimport os\n```', [], '```tool_code\nimport os\n```'),
]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("form, text, calls, content", ANSWERS)
def test_tool_calls_are_found_however_the_text_comes(form, text, calls, content, size):
    from gpt_faster.server.parsing import TOOL_FORMATS, AnswerParser
    parser = AnswerParser(TOOL_FORMATS[form], TOOLS)
    deltas = [d for i in range(0, len(text), size) for d in parser.push(text[i:i + size])] + parser.finish("stop")
    found = [c["function"] for d in deltas for c in d.get("tool_calls", [])]
    assert [(f["name"], json.loads(f["arguments"])) for f in found] == calls
    assert "".join(d.get("content", "") for d in deltas).strip() == content


# What is no call of a tool: it is text.
NO_CALLS = [
    ("hermes", "[1, 2]"), ("hermes", "[]"), ("hermes", " ; "), ("hermes", '{"name": "add", "arguments": [1]}'), ("hermes", '{"name": "add", "arguments": "{"}'),
    ("hermes", '{"name": ["add"]}'), ("hermes", '{"name": "add", "arguments": ' + "[" * 100_000), ("hermes", '{"name": "add"'),
    ("qwen_xml", "<function=unknown></function>"), ("qwen_xml", "<function=>"), ("qwen_xml", "nothing"),
    ("llama", '{"name": "add", "parameters": 3}'), ("llama", "3"), ("llama", '{"name": null}'),
    ("gemma", "unknown(a=1)"), ("gemma", "add(1)"), ("gemma", "add(a=b)"), ("gemma", "add(**{})"), ("gemma", "print()"), ("gemma", "add.add.a=1"),
    ("gemma", "(" * 100_000), ("gemma", "add(a=" + "-" * 100_000 + "1)"), ("gemma", "\0"), ("gemma", '[{"name": "no"}]'),
]


@pytest.mark.parametrize("form, text", NO_CALLS, ids=[f"{form}-{i}" for i, (form, _) in enumerate(NO_CALLS)])
def test_what_is_no_call_stays_text(form, text):
    from gpt_faster.server.parsing import TOOL_FORMATS, AnswerParser
    begin, end = next(iter(TOOL_FORMATS[form].markers.items()))
    parser = AnswerParser(TOOL_FORMATS[form], TOOLS)
    deltas = [*parser.push(begin + text + end), *parser.finish("stop")]
    assert not any("tool_calls" in delta for delta in deltas)
    assert "".join(delta.get("content", "") for delta in deltas) == begin + text + end


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize("inside, text", [(False, "<think>\nHm, 1 < 2.\n</think>\n\nYes."), (True, "Hm, 1 < 2.\n</think>\n\nYes.")])
def test_thinking_is_apart(inside, text, size):
    from gpt_faster.text.reasoning import PairSplitter, ThoughtFormat
    splitter = PairSplitter(ThoughtFormat({"<think>": "</think>"}, {}), "<think>\n" if inside else "")
    parts = [p for i in range(0, len(text), size) for p in splitter.push(text[i:i + size])] + [*splitter.finish()]
    assert "".join(t for is_thought, t in parts if is_thought) == "Hm, 1 < 2."
    assert "".join(t for is_thought, t in parts if not is_thought) == "Yes."
