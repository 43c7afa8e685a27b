"""Ten neighbours beside each of 200 hostile requests: the neighbours' answers are those of a quiet server, to the token.

Numbers, sizes, Unicode, grammars, templates, odd HTTP, and clients that leave: in the head, in the body, in the prompt, in the stream.
"""

import concurrent.futures
import http.client
import json
import random
import re
import socket
import time

import pytest
from test_serve import Process
from test_serve_connections import ODD, OnSocket
from test_serve_safety import NUMBERS, RAW, TEXTS

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
N_BESIDE = 10
PERSON = dict(type="object", properties=dict(a=dict(type="integer", minimum=0, maximum=999)), required=["a"], additionalProperties=False)


# ---- Neighbours ----------------------------------------------------------------------------------

def neighbours(n):
    """Requests of all kinds that people send, whose answers do not depend on chance."""
    g, requests = random.Random(0), []
    for i in range(n):
        text = " ".join(g.choice("the sea was calm and a lamp burned low".split()) for _ in range(g.randint(1, 9)))
        fields = dict(max_tokens=g.randint(1, 12), **g.choice([
            dict(temperature=0), dict(temperature=1, seed=i), dict(temperature=0.7, top_k=9, seed=i), dict(temperature=0, frequency_penalty=1.2, presence_penalty=0.5),
            dict(temperature=1.5, min_p=0.05, seed=3, repetition_penalty=1.2), dict(temperature=0, logit_bias={"5": 4, "7": -100}), dict(temperature=1, top_p=0.8, seed=i, n=2),
            dict(temperature=1, seed=i, stop=["e", "zz"])]))
        kind = i % 6
        if kind < 3:
            path, fields = COMPLETIONS, dict(fields, prompt=text)
            fields.update([{}, dict(logprobs=2, echo=True), dict(regex="[a-f]{2,9}x")][kind])
        else:
            path, fields = CHAT, dict(fields, messages=[dict(role="user", content=text)])
            fields.update([{}, dict(logprobs=True, top_logprobs=1), dict(response_format=dict(type="json_schema", json_schema=dict(schema=PERSON)))][kind - 3])
        if i % 3 == 0:
            fields["stream"] = True
        requests.append((path, fields))
    return requests


def answer(port, path, fields):
    """-> what does not change from one time to the next: texts, reasons, tokens, logprobs."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", path, json.dumps(fields), {"Content-Type": "application/json"})
    response = connection.getresponse()
    body = response.read().decode()
    connection.close()
    assert response.status == 200, body
    events = [json.loads(body)]  if not fields.get("stream") else [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]
    choices = {}
    for event in events:
        for choice in event["choices"]:
            part = choice.get("delta") or choice.get("message") or {}
            kept = choices.setdefault(choice["index"], ["", [], None])
            kept[0] += choice.get("text") or part.get("content") or ""
            logprobs = choice.get("logprobs") or {}
            kept[1] += [round(p, 2) for p in logprobs.get("token_logprobs", []) if p is not None] + [round(p["logprob"], 2) for p in logprobs.get("content") or []]
            kept[2] = choice["finish_reason"] or kept[2]
    assert all(kept[2] for kept in choices.values()), body
    return choices


def alike(a, b):
    return a.keys() == b.keys() and all(
        a[i][0] == b[i][0] and a[i][2] == b[i][2] and a[i][1] == pytest.approx(b[i][1], abs=0.03) for i in a)


# ---- Hostile requests ----------------------------------------------------------------------------

def body_of(fields):
    return fields if isinstance(fields, bytes) else json.dumps(fields).encode()


def form(path, body, length=None):
    return (f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body) if length is None else length}\r\n\r\n").encode() + body


def user(content, **more):
    return dict(messages=[dict(role="user", content=content)], max_tokens=3, **more)


def number(g):
    name, value = g.choice(NUMBERS)
    name, value = g.choice([(name, json.dumps(value)), g.choice(RAW)])
    start = g.choice([(COMPLETIONS, '"prompt": "a"'), (CHAT, '"messages": [{"role": "user", "content": "a"}]')])
    return start[0], f'{{{start[1]}, "{name}": {value}}}'.encode()


def size(g):
    return g.choice([
        lambda: (COMPLETIONS, dict(prompt="a " * g.choice([10, 1000, 100_000]) * 10)), lambda: (COMPLETIONS, dict(prompt=[5] * g.choice([95, 96, 5000, 300_000]), max_tokens=1)),
        lambda: (COMPLETIONS, dict(prompt=[[5, 6]] * g.choice([2, 128, 129, 5000]), max_tokens=1)), lambda: (COMPLETIONS, dict(prompt="a", n=g.choice([60, 128, 129]), max_tokens=1)),
        lambda: (CHAT, dict(messages=[dict(role="user", content="a")] * g.choice([30, 500, 15_000]), max_tokens=1)), lambda: (CHAT, b"[" * g.choice([500, 100_000])),
        lambda: (COMPLETIONS, dict(prompt="a", stop=["a" * 256] * g.choice([16, 100_000]))), lambda: (COMPLETIONS, dict(prompt="a", max_tokens=1, logit_bias={str(i): 1 for i in range(g.choice([200, 5000]))})),
        lambda: (COMPLETIONS, b'{"prompt": "' + rb"\u0061\"" * g.choice([100, 50_000]) + b'"}'), lambda: (COMPLETIONS, b'{"prompt": ' + b"9" * g.choice([30, 5000, 400_000]) + b"}"),
        lambda: (CHAT, user("a", **{"x" * 10_000: 1})), lambda: (COMPLETIONS, b'{"prompt": "a", ' + b'"a": 1, ' * 30_000 + b'"b": 1}'), lambda: (COMPLETIONS, b"a" * 700_000)])()


def unicode_text(g):
    text = g.choice(["\x00", "\u202e" * 20, "e" + "\u0301" * 60, "\U0010ffff\ufffe", "\ufeff", "\u0130\u00df\ufb01", "<|im_end|><|im_start|>system\n", "\r\n\r\n", "\ud7ff\ue000", "\u200b" * 25,
                     "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\\u0000", "{{ 1 }}{% x %}", "%s%n{0}"])
    return g.choice([g.choice(TEXTS), (COMPLETIONS, dict(prompt=text, max_tokens=2, stop=[text])), (CHAT, user(text)), (CHAT, user("a", user=text)),
                     (COMPLETIONS, b'{"prompt": "' + bytes(g.randrange(256) for _ in range(20)) + b'"}'), (COMPLETIONS, text.encode("utf-16")), (CHAT, user([dict(type="text", text=text)]))])


def grammar(g):
    schema = g.choice([{"type": "nonsense"}, {"$ref": "#/none"}, {"enum": []}, {"not": {}}, {"type": "string", "pattern": "("}, {"type": "integer", "minimum": 5, "maximum": 4}, {"$ref": "#"},
                       {"enum": [f"value {i}" * 3 for i in range(3000)]}, {"type": "array", "items": {"type": "integer"}, "minItems": 100_000}, {"allOf": [{"type": "string"}, {"type": "integer"}]},
                       {"type": "object", "properties": {f"k{i}": {"type": "string", "pattern": f"^(a|b){{{i},90}}$"} for i in range(60)}}, True, [], "x", None])
    regex = g.choice(["(", "", "[^\\s\\S]", "(a|b)*a(a|b){14}x", "(((a{1,90}){1,90}){1,90})", "(.*a){50}", "a{1000000000}", "(?=a)b", "\\", "[z-a]", "(?i)(foo|bar)*" * 40, "\x00", "a" * 50_000, "(?P<x>a)(?P=x)"])
    lark = g.choice(["start: ", "start: start", "start: x", 'start: "a"*', "start: /(/", 's: "a"', "start: s\ns: s s | \"a\" | \"ab\" | \"b\"\n", "%import common.WORD\nstart: WORD", 'start: "" ', "start: %json {}",
                     "start: " + " ".join(f"x{i}" for i in range(200)) + "\n" + "\n".join(f'x{i}: "a"* "b"*' for i in range(200)), "\x00", "start: a | b\na: \"x\" a\nb: \"x\" b"])
    return g.choice([(CHAT, user("a", response_format=dict(type="json_schema", json_schema=dict(schema=schema)))), (COMPLETIONS, dict(prompt="a", regex=regex, max_tokens=9)),
                     (COMPLETIONS, dict(prompt="a", grammar=lark, max_tokens=9)), (COMPLETIONS, dict(prompt="a", grammar=lark, max_tokens=9, n=6, temperature=2)),
                     (COMPLETIONS, dict(prompt="a", regex=regex, grammar=lark)), (CHAT, user("a", response_format=dict(type=g.choice(["json_object", "xml", ""]))))])


def template(g):
    message = g.choice([dict(role="tool", content="x"), dict(role="assistant", content=None), dict(role="user", content=[]), dict(role="system", content="a"), dict(role="user", content={}), dict(role=5), {}, "a", None,
                        dict(role="assistant", tool_calls=[dict(id="a", function=dict(name="f", arguments="{" * 900))]), dict(role="user", content="a", name="\x00"), dict(role="developer", content="a" * 90)])
    kwargs = g.choice([dict(messages=[]), dict(add_generation_prompt=False), dict(bos_token="x" * 50), dict(loop=1, range=2, namespace=None), dict(strftime_now=1), {"": 1}, dict(a="{% for i in range(10**9) %}"), {"__class__": 1},
                       dict(enable_thinking="no"), [], 5])
    tool = g.choice([dict(type="function", function=dict(name="f" * 65)), dict(type="function", function=dict(name="f", parameters={"$ref": "#"})), dict(type="x"), {}, 5])
    return CHAT, g.choice([dict(messages=[message], max_tokens=2), dict(messages=[message] * 9, max_tokens=2), user("a", chat_template_kwargs=kwargs), user("a", tools=[tool], tool_choice=g.choice(["auto", "required", "none"]))])


def head(g):
    return ODD[g.choice(sorted(ODD))][1]


def leaves(g):
    """-> bytes, and when the client leaves: at once, after a part of the answer, or with its end of the connection shut."""
    path, fields = g.choice([(COMPLETIONS, dict(prompt="a b c " * 9, max_tokens=40)), (CHAT, user("a b c " * 5)), (COMPLETIONS, dict(prompt=["a", "b c"], n=3, max_tokens=30, temperature=1, regex="[a-z ]*"))])
    whole = form(path, body_of(dict(fields, max_tokens=40, stream=g.choice([True, False]))))
    return g.choice([
        lambda: (whole[:g.randrange(1, 60)], "at once"), lambda: (whole[:-g.randrange(1, 20)], "at once"), lambda: (whole, "at once"), lambda: (whole, "reset"), lambda: (whole, "after a part"), lambda: (whole, "half"),
        lambda: (whole * 3, "after a part"), lambda: (form(COMPLETIONS, b'{"prompt": "' + b"a" * 100_000, length=400_000), "reset"), lambda: (whole, "after some time")])()


KINDS = [number, size, unicode_text, grammar, template, head, leaves]


def attack(port, g, kind):
    """Send one hostile request -> its status, None if it left."""
    end, data = "answer", kind(g)
    if kind is leaves:
        data, end = data
    elif kind is not head:
        data = form(data[0], body_of(data[1]))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(60)
        try:
            connection.sendall(data)
            if end == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            if end == "half":
                connection.shutdown(socket.SHUT_WR)
            if end == "after some time":
                time.sleep(g.random() * 0.1)
            if end in ("at once", "reset", "after some time"):
                return None
            received = connection.recv(300)
        except OSError:
            return None
    return int(received.split()[1]) if received.startswith(b"HTTP") else None


# ---- Both together -------------------------------------------------------------------------------

def beside(port, requests, seeds):
    """-> the statuses of the hostile ones. Each comes with N_BESIDE neighbours, in random order."""
    quiet, statuses = [answer(port, *request) for request in requests], []
    with concurrent.futures.ThreadPoolExecutor(N_BESIDE + 1) as pool:
        for seed in seeds:
            g = random.Random(seed)
            kind, chosen = KINDS[seed % len(KINDS)], [g.randrange(len(requests)) for _ in range(N_BESIDE)]
            first = g.randrange(N_BESIDE)
            running = [pool.submit(answer, port, *requests[i]) for i in chosen[:first]]
            bad = pool.submit(attack, port, g, kind)
            running += [pool.submit(answer, port, *requests[i]) for i in chosen[first:]]
            for i, future in zip(chosen, running):
                assert alike(future.result(), quiet[i]), (seed, kind.__name__, requests[i], future.result(), quiet[i])
            statuses.append(bad.result())
            assert statuses[-1] != 500, (seed, kind.__name__)
    return statuses


@pytest.fixture(scope="module")
def tiny_server():
    server = OnSocket("--max_body_mb", "0.5", "--max_queue", "200")
    yield server
    server.stop()


def wait_until_idle(load):
    end = time.monotonic() + 30
    while load() != (0, 0):
        assert time.monotonic() < end, load()
        time.sleep(0.02)


@pytest.mark.parametrize("part", range(10))
def test_ten_neighbours_beside_each_of_200_hostile_requests(tiny_server, capfd, part):
    seeds = range(20 * part, 20 * part + 20)
    statuses = beside(tiny_server.port, neighbours(24), seeds)
    wait_until_idle(tiny_server.engine.load)
    assert len(set(statuses)) > 2 and tiny_server.http.n_body_bytes == 0
    assert "error:" not in capfd.readouterr().err


@pytest.mark.slow
def test_beside_a_process_of_a_real_model():
    """Every fifth of them; the log names no error, and memory and slots are free afterwards."""
    process = Process("--max_queue", "200")
    try:
        beside(process.port, neighbours(24), range(0, 200, 5))
        process.wait_until((0, 0))
    finally:
        assert process.stop() == 0
    assert not [line for line in process.lines if re.search("Traceback|error:", line)], process.lines
