"""Small routes, paths as clients write them, CORS, the description of the API, request ids, comments in silent streams, thoughts.

The server of a tiny model runs in this process (tests/test_serve_safety.py), without sockets.
"""

import asyncio
import copy
import html.parser
import json
import random
import re
import time
from types import SimpleNamespace

import openai
import pytest
import torch
from test_serve_safety import CHAT, COMPLETIONS, LENGTH, TEMPLATE, InProcess

from generate import Batch, generate
from gpt_faster.cli import flags
from gpt_faster.cli.options import Options
from gpt_faster.decoding.logits_processors import Processor
from gpt_faster.server import app, main, openapi
from gpt_faster.server.model_card import fingerprint, model_card
from gpt_faster.server.protocol import CompletionRequest, Strict, parse
from gpt_faster.server.version import VERSION, commit
from sampling import RANGES, Sampler, SamplingParams

HI = [dict(role="user", content="Hi é")]
APP, EVIL = "https://app.example", "https://evil.example"


@pytest.fixture(scope="module")
def server():
    server = InProcess("--max_queue", "100")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def open_server():
    """With a key, and for the pages of APP."""
    server = InProcess("--api_key", "sesame", "--allowed_origins", APP, "http://localhost:3000/")
    yield server
    server.stop()


def send(server, method, path, body=None, **headers):
    headers = {"content-type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}

    async def one():
        async with server.client() as client:
            return await client.request(method, path, content=None if body is None else json.dumps(body), headers=headers)
    return server.http.loop.run_until_complete(one())


def post(server, path, **fields):
    response = send(server, "POST", path, fields)
    assert response.status_code == 200, response.text
    return response.json()


# ---- Tokens and templates ------------------------------------------------------------------------

def test_tokenize_as_vllm_and_as_llama_cpp(server):
    text = "Hé <|im_end|>"
    ids = [*"Hé ".encode(), 257]
    expected = dict(tokens=ids, count=len(ids), max_model_len=LENGTH, token_strs=None)
    assert post(server, "/tokenize", prompt=text) == post(server, "/tokenize", content=text, model=None) == expected
    assert post(server, "/tokenize", prompt=text, return_token_strs=True)["token_strs"] == ["H", "Ã", "©", "Ġ", "<|im_end|>"]
    pieces = post(server, "/tokenize", content=text, with_pieces=True)["tokens"]
    assert pieces == [dict(id=72, piece="H"), dict(id=195, piece=[195]), dict(id=169, piece=[169]), dict(id=32, piece=" "),
                      dict(id=257, piece="<|im_end|>")]
    assert post(server, "/tokenize", content=text, parse_special=False)["tokens"] == [*text.encode()]


def test_what_begins_a_text_is_added_as_asked(server, monkeypatch):
    monkeypatch.setattr(server.tokenizer, "prefix", [256])
    monkeypatch.setattr(server.tokenizer, "add_bos", True)
    for fields, adds in ((dict(prompt="a"), True), (dict(content="a"), False), (dict(prompt="a", add_special_tokens=False), False),
                         (dict(content="a", add_special=True), True), (dict(content="a", add_special=True, add_special_tokens=True), True)):
        assert post(server, "/tokenize", **fields)["tokens"] == [256] * adds + [97], fields
    assert "differ" in server.refused(400, "/tokenize", dict(prompt="a", add_special=True, add_special_tokens=False))["message"]


def test_a_chats_tokens_are_those_of_its_answer(server):
    """Of the very body that goes to /v1/chat/completions."""
    body = dict(messages=[dict(role="system", content="Be <|im_end|> terse."), *HI], max_tokens=2, temperature=0, chat_template_kwargs=dict(x=1))
    counted, answered = post(server, "/tokenize", **body), post(server, CHAT, **body)
    assert counted["count"] == answered["usage"]["prompt_tokens"] == len(counted["tokens"])
    assert counted["tokens"].count(257) == 2       # the message's own is plain text
    prompt = post(server, "/apply-template", **body)["prompt"]
    assert prompt.startswith("<|im_start|>system\nBe <|im_end|> terse.<|im_end|>\n") and prompt.endswith("<|im_start|>assistant")
    assert post(server, "/detokenize", tokens=counted["tokens"])["prompt"] == prompt


def test_a_template_without_the_generation_prompt(server, monkeypatch):
    monkeypatch.setattr(server.tokenizer, "chat_template", TEMPLATE.replace("<|im_start|>assistant", "{% if add_generation_prompt %}BEGIN{% endif %}"))
    for asked, is_there in ((True, True), (None, True), (False, False)):
        fields = dict(messages=HI, add_generation_prompt=asked)
        assert ("BEGIN" in post(server, "/apply-template", **fields)["prompt"]) == is_there
        assert (ord("B") in post(server, "/tokenize", **fields)["tokens"]) == is_there


def test_detokenize(server):
    ids = [*"Hé ".encode(), 256, *"x🙂".encode(), 257]
    assert post(server, "/detokenize", tokens=ids) == dict(prompt="Hé <|im_start|>x🙂<|im_end|>", content="Hé <|im_start|>x🙂<|im_end|>")
    assert post(server, "/detokenize", tokens=ids, skip_special_tokens=True)["content"] == "Hé x🙂"
    assert post(server, "/detokenize", tokens=[])["content"] == ""
    assert "\ufffd" in post(server, "/detokenize", tokens=[195])["content"]
    g = random.Random(0)
    for _ in range(50):
        text = "".join(g.choice(["a", " ", "é", "<|im_start|>", "🙂", "\n", "<"]) for _ in range(g.randint(0, 12)))
        assert post(server, "/detokenize", tokens=post(server, "/tokenize", content=text)["tokens"])["content"] == text


@pytest.mark.parametrize("path, body, match", [
    ("/tokenize", {}, "exactly one of prompt, content and messages, got none"), ("/tokenize", dict(prompt="a", content="b"), "got prompt and content"),
    ("/tokenize", dict(prompt=None), "got none"), ("/tokenize", dict(prompt=3), "prompt"), ("/tokenize", dict(content=["a"]), "content"),
    ("/tokenize", dict(prompt="\ud83d"), "lone surrogate"), ("/tokenize", dict(prompt="a" * 5000), "bytes exceed"),
    ("/tokenize", dict(messages=[dict(role="user", content="a" * 5000)]), "bytes exceed"), ("/tokenize", dict(messages=[]), "messages"),
    ("/detokenize", {}, "tokens"), ("/detokenize", dict(tokens=[10 ** 30]), "out of range"), ("/detokenize", dict(tokens=[-1]), "out of range"),
    ("/detokenize", dict(tokens=[260]), "out of range"), ("/detokenize", dict(tokens=[1.0]), "tokens"), ("/detokenize", dict(tokens=[True]), "tokens"),
    ("/detokenize", dict(tokens="a"), "tokens"), ("/apply-template", {}, "messages"), ("/apply-template", dict(messages=[dict(role="x")]), "role"),
    ("/apply-template", dict(messages=HI, chat_template_kwargs=dict(messages=[])), "cannot replace"),
    ("/apply-template", dict(messages=HI, tools=[dict(type="function", function=dict(name="f"))]), "does not support tools")])
def test_what_is_wrong_is_named(server, path, body, match):
    assert re.search(match, server.refused(400, path, body)["message"])


def test_a_wrong_content_type_and_a_wrong_model_are_refused_there_too(server):
    for path in ("/tokenize", "/detokenize", "/apply-template"):
        assert send(server, "POST", path, {}, content_type="text/plain").status_code == 415
        body = dict(model="gpt-4", tokens=[1]) if path == "/detokenize" else dict(model="gpt-4", messages=HI)
        assert server.refused(404, path, body)["code"] == "model_not_found"


# ---- Paths ---------------------------------------------------------------------------------------

def test_paths_as_clients_write_them(server):
    """Without /v1, with a slash at the end, with two after the host: all are counted as the one path."""
    def count():
        found = re.search(rb'gpt_faster_requests_total\{path="/v1/chat/completions",status="200"\} (\S+)', send(server, "GET", "/metrics").content)
        return float(found[1]) if found else 0
    before = count()
    ways = ["/v1/chat/completions", "/chat/completions", "/v1/chat/completions/", "/chat/completions/", "http://localhost//v1/chat/completions"]
    for path in ways:
        assert post(server, path, messages=HI, max_tokens=1)["object"] == "chat.completion", path
    assert count() - before == len(ways)
    for path in ("/v1/models", "/models", "/v1/models/", "/v1/models/tiny", "/models/tiny", "/health/", "/version", "/docs/", "/openapi.json"):
        for method in ("GET", "HEAD"):
            response = send(server, method, path)
            assert response.status_code == 200 and bool(response.content) == (method == "GET"), path
    text = send(server, "GET", "/metrics").text
    assert 'path="/models"' not in text and 'path="/v1/models/{name:path}"' in text


def test_what_is_not_there_says_what_is(server):
    for path in ("/v1/embeddings", "/api/chat", "/api/tags", "/v1/v1/chat/completions", "/nowhere"):
        error = server.refused(404, path, {})
        assert error["code"] == "route_not_found" and "this server has /," in error["message"]
        assert all(f" {there}," in error["message"] + "," for there in ("/v1/chat/completions", "/tokenize", "/v1/models/{name}"))
    for method, path, allowed in (("GET", CHAT, "POST"), ("POST", "/v1/models", "GET"), ("PUT", "/tokenize", "POST"), ("OPTIONS", CHAT, "POST")):
        response = send(server, method, path)
        assert response.status_code == 405 and response.json()["error"]["message"].endswith(f"use {allowed}")
    long = server.refused(404, "/" + "a" * 5000, {})["message"]
    assert len(long) < 1000


def test_version(server):
    assert send(server, "GET", "/version").json() == dict(version=VERSION, commit=commit())
    assert re.fullmatch(r"\d+\.\d+\.\d+", VERSION)


@pytest.mark.parametrize("files, expected", [
    ({}, None), ({"HEAD": "a" * 40 + "\n"}, "a" * 40), ({"HEAD": "ref: refs/heads/x\n", "refs/heads/x": "b" * 40 + "\n"}, "b" * 40),
    ({"HEAD": "ref: refs/heads/x\n", "packed-refs": f"# pack-refs\n{'c' * 40} refs/heads/y\n{'d' * 40} refs/heads/x\n"}, "d" * 40),
    ({"HEAD": "ref: refs/heads/x\n"}, None), ({"HEAD": "<script>"}, None), ({"HEAD": "\0"}, None)])
def test_the_commit_is_read_without_git(tmp_path, files, expected):
    for name, text in files.items():
        path = tmp_path / ".git" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert commit.__wrapped__(tmp_path) == expected


# ---- The model's name ----------------------------------------------------------------------------

def test_what_the_fingerprint_and_the_entry_depend_on(tmp_path):
    """No flag of the server itself counts, least of all the key, which a digest would let others guess."""
    snapshot = tmp_path / "hub/models--org--some-name/snapshots/abc123"
    snapshot.mkdir(parents=True)

    def session(*argv, path=snapshot):
        options = Options.parse(main.build_parser(), ["-m", str(path), *argv])
        return SimpleNamespace(options=options, source=SimpleNamespace(path=path), length=7, dtype="d", device="cpu", engine="e")
    prints = {fingerprint(session(*argv)) for argv in ([], ["--api_key", "x"], ["--port", "1"], ["--served_name", "y"])}
    others = {fingerprint(session("--quantize", "int8")), fingerprint(session("--temperature", "0.1")), fingerprint(session(path=tmp_path))}
    assert len(prints) == 1 and len(prints | others) == 4
    card = model_card(session("--served_name", "mine"), "mine")
    assert card["id"] == "mine" and card["root"] == "org/some-name" and card["max_model_len"] == 7


def test_the_models_entry(server):
    [entry] = send(server, "GET", "/v1/models").json()["data"]
    created = entry.pop("created")
    assert entry == dict(id="tiny", object="model", owned_by="gpt-faster", root="tiny", parent=None, max_model_len=LENGTH)
    assert abs(created - time.time()) < 1000
    assert post(server, COMPLETIONS, prompt="a", max_tokens=1)["system_fingerprint"] == server.http.preparer.fingerprint


# ---- Other origins' pages ------------------------------------------------------------------------

PREFLIGHT = dict(access_control_request_method="POST",
                 access_control_request_headers="authorization,content-type,x-api-key,anthropic-version,x-stainless-os,x-request-id")


def test_a_page_of_an_allowed_origin(open_server):
    """A preflight needs no key; answers and errors can be read, with their request id."""
    for origin in (APP, "http://localhost:3000"):
        for path in (CHAT, "/chat/completions", "/v1/models", "/tokenize"):
            response = send(open_server, "OPTIONS", path, origin=origin, **PREFLIGHT, access_control_request_private_network="true")
            assert response.status_code == 200 and response.headers["access-control-allow-origin"] == origin
            assert {"authorization", "x-stainless-os"} <= set(response.headers["access-control-allow-headers"].split(","))
            assert "POST" in response.headers["access-control-allow-methods"] and "Origin" in response.headers["vary"]
            assert response.headers["access-control-allow-private-network"] == "true"
            assert "access-control-allow-credentials" not in response.headers
        key = dict(authorization="Bearer sesame", origin=origin)
        body = dict(messages=HI, max_tokens=2)
        cases = [(200, CHAT, body, key), (200, CHAT, dict(body, stream=True), key), (400, CHAT, {}, key), (401, CHAT, body, dict(origin=origin)),
                 (404, "/nowhere", {}, key), (415, CHAT, body, dict(key, content_type="text/plain"))]
        for status, path, fields, headers in cases:
            response = send(open_server, "POST", path, fields, **headers)
            assert response.status_code == status and response.headers["access-control-allow-origin"] == origin, response.text
            assert "x-request-id" in response.headers["access-control-expose-headers"] and response.headers["x-request-id"]
            assert "Origin" in response.headers["vary"]


def test_a_fault_of_the_server_can_be_read_by_the_page_too(open_server, monkeypatch):
    def fails(*args):
        raise OverflowError
    monkeypatch.setattr(open_server.http.preparer, "build", fails)
    response = send(open_server, "POST", CHAT, dict(messages=HI), authorization="Bearer sesame", origin=APP)
    assert response.status_code == 500 and response.headers["access-control-allow-origin"] == APP


@pytest.mark.parametrize("origin", [EVIL, "https://app.example.evil.example", "http://app.example", "https://app.example:8443", "null", ""])
def test_a_page_of_another_origin(open_server, server, origin):
    """It gets no permission: its preflight fails, and what it sends without one is refused by its type."""
    for one in (open_server, server):              # server: without the flag
        response = send(one, "OPTIONS", CHAT, origin=origin, **PREFLIGHT)
        assert response.status_code in (400, 405) and "access-control-allow-origin" not in response.headers
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/plain; application/json", ""):
            response = send(one, "POST", CHAT, dict(messages=HI), origin=origin, content_type=kind, authorization="Bearer sesame")
            assert response.status_code == 415 and "access-control-allow-origin" not in response.headers
        response = send(one, "GET", "/v1/models", origin=origin, authorization="Bearer sesame")
        assert response.status_code == 200 and "access-control-allow-origin" not in response.headers


def test_any_origin_is_allowed_without_credentials():
    server = InProcess("--allowed_origins", "*")
    try:
        response = send(server, "OPTIONS", CHAT, origin=EVIL, **PREFLIGHT)
        assert response.status_code == 200 and response.headers["access-control-allow-origin"] == "*"
        response = send(server, "POST", COMPLETIONS, dict(prompt="a", max_tokens=1), origin=EVIL, cookie="a=b")
        assert response.headers["access-control-allow-origin"] == "*" and "access-control-allow-credentials" not in response.headers
    finally:
        server.stop()


@pytest.mark.parametrize("text", ["app.example", "https://", "https://a.example/path", "https://a b", "a,b", "", "https://user@a.example", "https://*.a.example"])
def test_what_is_no_origin(text, capsys):
    with pytest.raises(SystemExit) as e:
        main.build_parser().parse_args(["--allowed_origins", text])
    assert e.value.code == 2 and "is not an origin" in capsys.readouterr().err
    parsed = main.build_parser().parse_args(["--allowed-origins", "HTTPS://A.example/", "*", "null", "http://[::1]:80", "chrome-extension://abc"])
    assert parsed.allowed_origins == ["https://a.example", "*", "null", "http://[::1]:80", "chrome-extension://abc"]


# ---- The description -----------------------------------------------------------------------------

class Outside(html.parser.HTMLParser):
    """What a page would fetch or execute."""

    def __init__(self, text):
        super().__init__()
        self.found, self.ids, self.links = [], set(), []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag in ("script", "img", "iframe", "link", "object", "form") or "src" in attrs or any(name.startswith("on") for name in attrs):
            self.found.append(tag)
        self.ids |= {attrs["id"]} if "id" in attrs else set()
        self.links += [attrs["href"]] if "href" in attrs else []


def test_the_description_is_of_all_routes(server):
    description = send(server, "GET", "/openapi.json").json()
    paths = {(method.upper(), path) for path, methods in description["paths"].items() for method in methods}
    assert paths == {(method, route.path.replace(":path", "")) for route in server.http.routes for method in route.methods - {"HEAD"}}
    text = json.dumps(description)
    refs = set(re.findall(r'"\$ref": "#/components/schemas/([^"]+)"', text))
    assert refs <= set(description["components"]["schemas"]) and len(refs) > 8
    assert all(operation["summary"] for methods in description["paths"].values() for operation in methods.values())
    fields = description["components"]["schemas"]["ChatRequest"]["properties"]
    for name, allowed in RANGES.items():
        if name == "top_n_sigma":
            continue
        [number] = [each for each in fields[name].get("anyOf", [fields[name]]) if each["type"] != "null"]
        low = "exclusiveMinimum" if allowed.above else "minimum"
        assert number["type"] == {int: "integer", float: "number"}[allowed.kind] and number["maximum"] == allowed.maximum
        assert number[low] == (-1 if name == "top_k" else allowed.minimum) and fields[name]["description"]
        assert name == "seed" or fields[name]["default"] == getattr(server.session.options, name)
    schemas = description["components"]["schemas"]
    assert schemas["CompletionRequest"]["required"] == ["prompt"]
    for name in ("ChatRequest", "CompletionRequest", "TokenizeRequest", "DetokenizeRequest"):
        assert [field for field, about in schemas[name]["properties"].items() if "description" not in about] == []
    assert fields["stop"]["anyOf"][:2] == [dict(type="string"), dict(type="array", items=dict(type="string"))]


def test_a_new_endpoint_is_described(server):
    """From its schema alone: other APIs' routes need no entry here."""
    class NewRequest(Strict):
        """Something new"""
        size: int
    description = openapi.describe([], [app.Query("/v1/new", NewRequest, None)], {})
    assert description["paths"]["/v1/new"]["post"]["summary"] == "Something new"
    assert "<code>size</code>" in openapi.as_page(description)


def test_examples_are_answered(server):
    for path, body in openapi.EXAMPLES.items():
        assert send(server, "POST", path, body).status_code == 200, path


def test_the_page_refers_to_no_other_host(open_server):
    """It needs no key, as a browser sends none; it has no script; links lead to what is there."""
    response = send(open_server, "GET", "/docs")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/html")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and response.headers["x-content-type-options"] == "nosniff"
    page = Outside(response.text)
    assert page.found == [] and {link[1:] for link in page.links if link.startswith("#")} <= page.ids
    assert [link for link in page.links if not link.startswith("#")] == ["openapi.json"]
    for there in ("temperature", "0 to 1,000,000.0", "above 0 to 1", "curl ", "/apply-template", "Message"):
        assert there in response.text, there
    assert send(open_server, "GET", "/openapi.json").status_code == 200
    assert send(open_server, "GET", "/version").status_code == send(open_server, "GET", "/v1/models").status_code == 401


# ---- Request ids ---------------------------------------------------------------------------------

def test_each_response_has_a_request_id(server, capsys):
    ids = [send(server, method, path, body).headers["x-request-id"] for method, path, body in (
        ("GET", "/health", None), ("GET", "/nowhere", None), ("POST", COMPLETIONS, {}), ("POST", COMPLETIONS, dict(prompt="a", max_tokens=1)),
        ("POST", COMPLETIONS, dict(prompt="a", max_tokens=1, stream=True)))]
    response = send(server, "GET", "/health")
    assert response.headers["request-id"] == response.headers["x-request-id"]
    assert len(set(ids)) == 5 and all(re.fullmatch("req_[0-9a-f]{24}", one) for one in ids)
    for own in ("a", "0f8fad5b-d9cb-469f-a165-70867728950e", "trace:1/2+3=@x._-", "a" * 128):
        assert send(server, "GET", "/health", x_request_id=own).headers["x-request-id"] == own
    for bad in ("", " ", "a b", "a\tb", '"', "<script>", "é".encode(), "a" * 129, "-x", "a;b"):
        assert send(server, "GET", "/health", x_request_id=bad).headers["x-request-id"].startswith("req_"), bad


def test_the_log_names_the_request(server, monkeypatch, capsys):
    def fails(*args):
        raise OverflowError("too large")
    with monkeypatch.context() as patch:
        patch.setattr(server.http.preparer, "build", fails)
        send(server, "POST", COMPLETIONS, dict(prompt="a"), x_request_id="mine-1")
    with monkeypatch.context() as patch:
        patch.setattr(server.tokenizer.backend, "encode", fails)
        send(server, "POST", COMPLETIONS, dict(prompt="a"), x_request_id="mine-2")
    server.session.batch.sampler.processors.append(Slow(0, fails=True))
    try:
        send(server, "POST", COMPLETIONS, dict(prompt="a", max_tokens=2), x_request_id="mine-3")
    finally:
        server.session.batch.sampler.processors.pop(-1)
    lines = capsys.readouterr().err.splitlines()
    assert [re.search(r"\[(mine-\d)\]$", line)[1] for line in lines if "mine" in line] == ["mine-1", "mine-2", "mine-3"]


# ---- Silent streams ------------------------------------------------------------------------------

class Slow(Processor):
    """Each call of the model takes some seconds, or fails."""

    def __init__(self, seconds, fails=False):
        super().__init__()
        self.seconds, self.fails = seconds, fails

    def forward(self, logits, rows, draft_tokens=None):
        time.sleep(self.seconds)
        if self.fails:
            raise RuntimeError("on purpose")
        return logits


@pytest.fixture
def slow(server, monkeypatch):
    monkeypatch.setattr(app, "KEEP_ALIVE", 0.02)
    server.session.batch.sampler.processors.append(Slow(0.09))
    yield server
    server.session.batch.sampler.processors.pop(-1)


def test_a_silent_stream_gets_comments(slow):
    response = send(slow, "POST", CHAT, dict(messages=HI, max_tokens=2, stream=True, temperature=0))
    assert response.headers["cache-control"] == "no-cache" and response.headers["x-accel-buffering"] == "no"
    frames = response.text.split("\n\n")
    assert frames.count(": keep-alive") >= 3 and frames[-2:] == ["data: [DONE]", ""]
    assert all(frame == ": keep-alive" or frame.startswith("data: ") for frame in frames[:-1])
    assert json.loads(frames[0].removeprefix("data: "))["choices"][0]["delta"]["role"] == "assistant"    # at once


def test_openais_client_reads_over_comments(slow):
    async def run():
        async with slow.client() as http:
            client = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=0)
            asked = dict(model="tiny", messages=HI, max_tokens=3, temperature=0)
            stream = await client.chat.completions.create(**asked, stream=True)
            text = "".join([event.choices[0].delta.content or "" async for event in stream])
            whole = await client.chat.completions.create(**asked)
            assert whole._request_id.startswith("req_")
            return text, whole.choices[0].message.content
    text, whole = slow.http.loop.run_until_complete(run())
    assert text == whole and text


def test_anthropics_client_reads_over_comments():
    """Between the named events of its wire format."""
    anthropic, httpx2 = pytest.importorskip("anthropic"), pytest.importorskip("httpx2")
    message = dict(id="m", type="message", role="assistant", model="x", content=[], stop_reason=None, stop_sequence=None,
                   usage=dict(input_tokens=1, output_tokens=1))
    events = [dict(type="message_start", message=message), dict(type="content_block_start", index=0, content_block=dict(type="text", text="")),
              dict(type="content_block_delta", index=0, delta=dict(type="text_delta", text="Hi")), dict(type="content_block_stop", index=0),
              dict(type="message_delta", delta=dict(stop_reason="end_turn", stop_sequence=None), usage=dict(output_tokens=1)), dict(type="message_stop")]
    comment = app.OPENAI.keep_alive
    body = comment + "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n{comment}" for event in events)

    def handle(request):
        return httpx2.Response(200, content=body.encode(), headers={"content-type": "text/event-stream"})
    client = anthropic.Anthropic(api_key="none", base_url="http://localhost", max_retries=0, http_client=httpx2.Client(transport=httpx2.MockTransport(handle)))
    with client.messages.stream(model="x", max_tokens=5, messages=[dict(role="user", content="Hi")]) as stream:
        assert "".join(stream.text_stream) == "Hi"


def test_clients_that_leave_a_silent_stream_or_the_queue(slow):
    """Each row is busy, and others wait: all of them leave, and nothing is left."""
    async def leave():
        async def ask(stream):
            body = json.dumps(dict(prompt="a" * 60, max_tokens=30, temperature=0, ignore_eos=True, stream=stream))
            await asked_and_left(slow, body, 0.15)
        await asyncio.gather(*(ask(i % 2 == 0) for i in range(12)))
    before = slow.engine.metrics.new_tokens._value.get()
    slow.http.loop.run_until_complete(leave())
    end = time.monotonic() + 10
    while slow.engine.load() != (0, 0):
        assert time.monotonic() < end, slow.engine.load()
        time.sleep(0.02)
    assert slow.engine.metrics.new_tokens._value.get() - before < 100, "of 360 that were asked for"


async def asked_and_left(server, body, seconds):
    """A request to the application whose client disconnects after so many seconds."""
    sent, left = [dict(type="http.request", body=body.encode(), more_body=False)], []

    async def receive():
        if sent:
            return sent.pop()
        await asyncio.sleep(max(0, start + seconds - time.monotonic()))
        left.append(1)
        return dict(type="http.disconnect")

    async def send(message):
        if left:
            raise OSError("the client has left")
    start = time.monotonic()
    scope = dict(type="http", method="POST", path=COMPLETIONS, raw_path=COMPLETIONS.encode(), query_string=b"", root_path="", scheme="http",
                 http_version="1.1", server=("localhost", 80), client=("127.0.0.1", 1), asgi=dict(version="3.0", spec_version="2.3"),
                 headers=[(b"host", b"localhost"), (b"content-type", b"application/json")])
    await server.http.app(scope, receive, send)
    assert time.monotonic() - start < seconds + 10, "it went on to the end"


# ---- The distribution ----------------------------------------------------------------------------

class Coarse(Processor):
    """Makes many logits tie."""

    def __init__(self, step):
        super().__init__()
        self.step = step

    def forward(self, logits, rows, draft_tokens=None):
        return (logits / self.step).round() * self.step


def some_fields(g):
    """A request's sampling parameters, some absent or null."""
    values = dict(temperature=g.choice([0, 1e-9, 0.3, 0.8, 1, 1.5, 20]), top_k=g.choice([-1, 0, 1, 2, 5, 40, 200, 259, 260, 5000]),
                  top_p=g.choice([1, g.uniform(0.01, 1)]), min_p=g.choice([0, g.random()]), repetition_penalty=g.choice([1, g.uniform(0.5, 2)]))
    fields = {name: g.choice([value, value, value, None]) for name, value in values.items()}
    return {**{name: value for name, value in fields.items() if value is not None or g.random() < 0.5}, "seed": g.randrange(1 << 40)}


@pytest.fixture(scope="module")
def one_row():
    server = InProcess("--batch_size", "1", "--top_k", "30")
    yield server
    server.stop()


@pytest.mark.parametrize("step", [1.0, 4.0, 16.0])
def test_served_tokens_are_generate_pys_where_logits_tie(one_row, monkeypatch, step):
    """Of random parameters through HTTP: as the core's loop and sampler draw with the same flags."""
    g, submitted = random.Random(step), []
    model = copy.deepcopy(one_row.session.model)
    model.setup_cache(1, LENGTH, LENGTH)
    submit = one_row.engine.submit
    monkeypatch.setattr(one_row.engine, "submit", lambda new: (submitted.extend(new), submit(new)))
    one_row.session.batch.sampler.processors.insert(0, Coarse(step))
    n_tied = 0
    try:
        for _ in range(40):
            fields, ids = some_fields(g), [g.randrange(256) for _ in range(g.randint(1, 12))]
            post(one_row, COMPLETIONS, prompt=ids, max_tokens=6, ignore_eos=True, **fields)
            values = {**dict(temperature=0.8, top_k=30), **{name: value for name, value in fields.items() if value is not None}}
            sampler = Sampler([SamplingParams(**values | dict(top_k=max(0, values["top_k"])))], 260)
            sampler.processors.insert(0, Coarse(step))
            expected = [token.item() for token in generate(Batch(model, sampler), [ids], 6)]
            assert submitted[-1].ids == expected, fields
            with torch.inference_mode():
                logits = (model(torch.tensor([ids]), torch.arange(len(ids)))[0, -1] / step).round()
            n_tied += (logits == logits.max()).sum().item() > 1
    finally:
        one_row.session.batch.sampler.processors.pop(0)
    assert n_tied >= (20 if step == 16 else 0)


def test_defaults_are_the_models_then_flags_then_the_request(one_row):
    """generation_config.json's, as generate.py's; a null is an absent field."""
    def params(argv, model_defaults, **fields):
        options = Options.parse(main.build_parser(), argv).over(model_defaults)
        preparer = copy.copy(one_row.http.preparer)
        preparer.options = options
        request = parse(CompletionRequest, json.dumps(dict(prompt="a", **fields)).encode(), LENGTH)
        got = preparer.params(request, None, None)
        return got.temperature, got.top_k, got.top_p, got.min_p, got.repetition_penalty
    model = dict(temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, repetition_penalty=1.05)
    nulls = dict.fromkeys(model)
    flags_of_generate = Options.parse(flags.build_parser(), []).over(model)
    assert params([], {}) == params([], {}, **nulls) == (0.8, 200, 1.0, 0.0, 1.0)
    assert params([], model) == params([], model, **nulls) == (0.6, 20, 0.95, 0.1, 1.05) == tuple(getattr(flags_of_generate, name) for name in model)
    argv = ["--temperature", "0.8", "--top_k", "0"]            # a flag at its default is a flag, too
    assert params(argv, model) == params(argv, model, **nulls) == (0.8, 0, 0.95, 0.1, 1.05)
    assert params(argv, model, temperature=0, top_k=-1, top_p=1, min_p=None) == (0, 0, 1.0, 0.1, 1.05)
