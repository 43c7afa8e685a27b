"""Connections that harm: odd HTTP, slow and endless heads and bodies, clients that do not read, too many of them; keys and hosts.

A tiny model's server in this process, on a socket of loopback.
"""

import json
import socket
import threading
import time

import pytest
from test_serve_safety import InProcess

from gpt_faster.server import app, connections
from gpt_faster.server import main as serve


class OnSocket(InProcess):
    """With uvicorn as serve() configures it."""

    def __init__(self, *argv):
        super().__init__(*argv)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        started = threading.Event()
        self.uvicorn = app.Server(self.http.config(), started)
        self.http.loop.set_exception_handler(lambda loop, context: self.errors.append(context))
        self.errors = []
        self.http_thread = threading.Thread(target=lambda: self.http.loop.run_until_complete(self.uvicorn.serve([self.listener])), daemon=True)
        self.http_thread.start()
        assert started.wait(10)

    def stop(self):
        self.uvicorn.should_exit = True
        self.http_thread.join(10)
        super().stop()
        assert not self.errors

    def connect(self):
        connection = socket.create_connection(("127.0.0.1", self.port))
        connection.settimeout(20)
        return connection

    def raw(self, *parts, pause=0.0):
        """Send bytes -> status, headers and body of the first response; (0, "", "") if there was none."""
        with self.connect() as connection:
            try:
                for part in parts:
                    connection.sendall(part)
                    time.sleep(pause)
            except OSError:
                pass
            return read(connection)

    def n_open(self):
        return len(self.uvicorn.server_state.connections)


def read(connection):
    received = b""
    try:
        while b"\r\n\r\n" not in received or not is_whole(received):
            if not (part := connection.recv(1 << 16)):
                break
            received += part
    except OSError:
        pass
    if not received:
        return 0, "", ""
    head, _, body = received.decode("latin-1").partition("\r\n\r\n")
    return int(head.split()[1]), head.lower(), body


def is_whole(received):
    head, _, body = received.lower().partition(b"\r\n\r\n")
    if b" 100 " in head.split(b"\r\n")[0]:
        return b"\r\n\r\n" in body and is_whole(body)
    at = head.find(b"content-length:")
    return at >= 0 and len(body) >= int(head[at + 15:].split(b"\r\n")[0])


@pytest.fixture(scope="module")
def server():
    server = OnSocket("--max_connections", "40", "--max_body_mb", "0.5")
    yield server
    server.stop()


HOST = b"Host: localhost\r\n"
CLOSE = b"Connection: close\r\n"
BODY = b'{"prompt": "a", "max_tokens": 1}'
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n"


def get(target, more=b"", method=b"GET", version=b"1.1"):
    return method + b" " + target + b" HTTP/" + version + b"\r\n" + HOST + CLOSE + more + b"\r\n"


def post(more=LENGTH, body=BODY, close=CLOSE):
    return b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\n" + close + more + b"\r\n" + body


ODD = {
    "plain": (200, post()), "chunked": (200, post(CHUNKED, b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY))), "expect": (100, post(b"Expect: 100-continue\r\n" + LENGTH)),
    "another expectation": (200, post(b"Expect: 200-maybe\r\n" + LENGTH)), "header in capitals": (200, post(b"CONTENT-LENGTH: %d\r\n" % len(BODY))),
    "Java offers HTTP/2": (200, post(b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABk\r\n" + LENGTH, close=b"")),
    "websocket": (200, get(b"/health", b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: AQID\r\nSec-WebSocket-Version: 13\r\n")),
    "body cut by its length": (400, post(b"Content-Length: 5\r\n")), "no length": (400, post(b"")), "negative length": (400, post(b"Content-Length: -5\r\n")),
    "length in words": (400, post(b"Content-Length: five\r\n")), "length of 10^30": (400, post(b"Content-Length: 1" + b"0" * 30 + b"\r\n")),
    "10 GB announced": (413, post(b"Content-Length: 9999999999\r\n")), "two lengths": (400, post(LENGTH + b"Content-Length: 5\r\n")),
    "length and chunks": (400, post(CHUNKED + LENGTH)), "bad chunk": (400, post(CHUNKED, b"zz\r\n")), "unknown coding": (400, post(b"Transfer-Encoding: gzip\r\n")),
    "compressed": (415, post(b"Content-Encoding: gzip\r\n" + LENGTH)), "0.6 MB": (413, post(b"Content-Length: 600000\r\n", b"a" * 600_000)),
    "0.6 MB in chunks": (413, post(CHUNKED, b"10000\r\n" + b"a" * 65536 + b"\r\n" + b"90000\r\n" + b"a" * 0x90000 + b"\r\n0\r\n\r\n")),
    "HTTP/2": (400, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), "HTTP/1.0": (200, get(b"/health", version=b"1.0")), "HTTP/3.7": (400, get(b"/health", version=b"3.7")),
    "TLS": (400, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"), "noise": (400, b"noise\r\n\r\n"), "HEAD": (200, get(b"/health", method=b"HEAD")),
    "OPTIONS": (405, get(b"/v1/completions", method=b"OPTIONS")), "OPTIONS *": (404, get(b"*", method=b"OPTIONS")), "CONNECT": (400, get(b"evil:80", method=b"CONNECT")),
    "BREW": (400, get(b"/health", method=b"BREW")), "DELETE": (405, get(b"/v1/models/x", method=b"DELETE")), "GET with a body": (200, get(b"/health", LENGTH) + BODY),
    "absolute target": (200, get(b"http://localhost/health")), "no slash": (400, get(b"health")), "two slashes": (404, get(b"//health")), "escaped": (200, get(b"/%68ealth")),
    "NUL": (400, get(b"/\x00")), "escaped NUL": (404, get(b"/%00")), "escaped surrogate": (404, get(b"/%ed%a0%bd")), "bad escapes": (404, get(b"/%ff%zz")),
    "not ASCII": (400, get("/café".encode())), "bytes of a model": (404, get(b"/v1/models/%ff%00/x")), "long target": (404, get(b"/v1/models/" + b"a" * 5000)),
    "NUL in a header": (400, get(b"/health", b"X:\x00\r\n")), "folded header": (400, get(b"/health", b"X: a\r\n b\r\n")), "60 kB header": (200, get(b"/health", b"X: " + b"a" * 60_000 + b"\r\n")),
    "empty lines first": (200, b"\r\n\r\n" + get(b"/health"))}


@pytest.mark.parametrize("name", ODD)
def test_odd_http_gets_json_or_its_answer_and_never_500(server, name):
    status, request = ODD[name]
    got, head, body = server.raw(request)
    if name == "HEAD":
        assert got == 200 and not body
        return
    assert got == status, (got, head, body)
    if status == 100:
        assert "http/1.1 200" in body.lower()
    else:
        assert isinstance(json.loads(body).get("error", {}).get("message", ""), str) and (status == 200) == ("error" not in json.loads(body))


def test_a_request_before_noise_is_answered(server):
    with server.connect() as connection:
        connection.sendall(post(close=b"") + post(close=b"") + b"noise\r\n\r\n")
        assert read(connection)[0] == 200


def test_a_client_that_leaves_pipelined_requests_frees_its_slot(server, caplog):
    """uvicorn tells the last of them that the client has left; the first one is being answered."""
    body = json.dumps(dict(prompt="a", max_tokens=80, ignore_eos=True, stream=True, temperature=0)).encode()
    step = server.session.batch.step
    server.session.batch.step = lambda: (time.sleep(0.05), step())[1]
    try:
        with server.connect() as connection:
            connection.sendall(post(b"Content-Length: %d\r\n" % len(body), body, close=b"") * 3)
            assert connection.recv(300).startswith(b"HTTP/1.1 200")
        end = time.monotonic() + 2                 # 80 steps take 4 seconds
        while server.engine.load() != (0, 0):
            assert time.monotonic() < end
            time.sleep(0.01)
    finally:
        server.session.batch.step = step
    assert not caplog.records


@pytest.mark.parametrize("drip", [b"GET /health HT", b"GET /health HTTP/1.1\r\nX: ", b"\r\n", b""])
def test_a_head_that_does_not_end_in_time(server, monkeypatch, drip):
    """A byte now and then is not enough; on a connection that was in use, too."""
    monkeypatch.setattr(connections, "HEAD_TIMEOUT", 0.3)
    for first in (b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"):
        with server.connect() as connection:
            start = time.monotonic()
            connection.sendall(first)
            if first:
                assert read(connection)[0] == 200
                if not drip:
                    continue                       # idle: uvicorn's timeout_keep_alive
            connection.sendall(drip)
            for _ in range(30):
                time.sleep(0.05)
                try:
                    connection.sendall(b"\r\n" if drip == b"\r\n" else b"a" if drip else b"")
                except OSError:
                    break
                if not server_has(server, connection):
                    break
            assert time.monotonic() - start < 1.2 and not server_has(server, connection)


def server_has(server, connection):
    name = connection.getsockname()
    return any(c.client == tuple(name) for c in list(server.uvicorn.server_state.connections))


def test_the_answer_to_a_slow_head_is_json(server, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_TIMEOUT", 0.1)
    status, _, body = server.raw(b"GET /health HTTP/1.1\r\n")
    assert status == 408 and "within" in json.loads(body)["error"]["message"]


def test_an_endless_head_is_refused(server):
    status, _, body = server.raw(b"GET /health HTTP/1.1\r\n", *[b"X%d: " % i + b"a" * 20_000 + b"\r\n" for i in range(6)], pause=0.02)
    assert status == 431 and "65,536 bytes" in body


def test_a_slow_body_and_the_rest_of_a_refused_one(server, monkeypatch):
    monkeypatch.setattr(app, "BODY_TIMEOUT", 0.2)
    assert server.raw(post(b"Content-Length: 500\r\n"))[0] == 408
    monkeypatch.setattr(connections, "REST_TIMEOUT", 0.2)
    with server.connect() as connection:           # refused at once, and the rest of it never comes
        connection.sendall(b"POST /none HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n\r\n{")
        assert read(connection)[0] == 404 and server_has(server, connection)
        time.sleep(0.5)
        assert not server_has(server, connection)
    with server.connect() as connection:           # it comes: the connection is used again
        connection.sendall(b"POST /none HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\n{")
        assert read(connection)[0] == 404
        connection.sendall(b"   " + get(b"/health"))
        assert read(connection)[0] == 200


def test_a_client_that_does_not_read_is_cut_off(server, monkeypatch):
    monkeypatch.setattr(connections, "UNREAD_TIMEOUT", 0.3)
    with server.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 400)
        time.sleep(0.1)
        assert server_has(server, connection)
        end = time.monotonic() + 5
        while server_has(server, connection) and time.monotonic() < end:
            time.sleep(0.05)
        assert not server_has(server, connection)


def test_connections_beyond_the_limit_get_503(server):
    many = [server.connect() for _ in range(40)]
    try:
        while server.n_open() < 40:
            time.sleep(0.01)
        status, head, body = server.raw(get(b"/v1/models"))
        assert status == 503 and json.loads(body)["error"]["code"] == "too_many_connections" and "retry-after" in head and "connection: close" in head
        more = [server.connect() for _ in range(connections.SPARE_CONNECTIONS + 20)]
        time.sleep(0.3)
        assert server.n_open() <= 41 + connections.SPARE_CONNECTIONS
        for connection in more:
            connection.close()
    finally:
        for connection in many:
            connection.close()
    while server.n_open():
        time.sleep(0.01)
    assert server.raw(get(b"/v1/models"))[0] == 200


def test_all_bodies_together_are_limited(server, monkeypatch):
    """Four clients that have sent most of a body each; a fifth is told to come again, and when they have left it is answered."""
    monkeypatch.setattr(app, "MAX_BODIES", 2)
    half = [server.connect() for _ in range(4)]
    for connection in half[:3]:
        connection.sendall(post(b"Content-Length: 400000\r\n", b"a" * 330_000))
    end = time.monotonic() + 5
    while server.http.n_body_bytes < 980_000 and time.monotonic() < end:
        time.sleep(0.01)
    large = json.dumps(dict(prompt="a", max_tokens=1, user="b" * 30_000)).encode()
    status, head, body = server.raw(post(b"Content-Length: %d\r\n" % len(large), large))
    assert status == 429 and "bodies together" in body and "retry-after" in head
    for connection in half:
        connection.close()
    while server.http.n_body_bytes:
        time.sleep(0.01)
    assert server.raw(post(b"Content-Length: %d\r\n" % len(large), large))[0] == 200


# ---- Keys ----------------------------------------------------------------------------------------

def with_key(server, *headers, path="/v1/models"):
    return server.raw(get(path.encode(), b"".join(h if isinstance(h, bytes) else h.encode() for h in headers)))[0]


def test_keys_as_clients_send_them(server, monkeypatch):
    monkeypatch.setattr(server.http, "options", server.http.options.replaced(api_key="se cret"))
    right = ["Authorization: Bearer se cret\r\n", "authorization: bearer se cret\r\n", "Authorization: BEARER   se cret  \r\n", "x-api-key: se cret\r\n", "X-API-Key:se cret\r\n"]
    wrong = ["", "Authorization: Bearer\r\n", "Authorization: se cret\r\n", "Authorization: Basic se cret\r\n", "x-api-key: \r\n", "api-key: se cret\r\n", "Authorization: Bearer se cre\r\n",
             "Authorization: Bearer se cret2\r\n", "Authorization: Bearer SE CRET\r\n", b"Authorization: Bearer \xff\xe9\r\n", "Authorization: Bearer Bearer se cret\r\n"]
    assert [with_key(server, header) for header in right] == [200] * len(right)
    assert [with_key(server, header) for header in wrong] == [401] * len(wrong)
    assert with_key(server, wrong[6], right[0]) == with_key(server, right[0], wrong[6]) == with_key(server, "x-api-key: none\r\n", right[0]) == 200
    for route in [*server.http.paths, "/none", "//", "/health/", "/%2F", "//health"]:
        expected = 200 if route in ("/", "/health") else 401
        assert with_key(server, path=route.replace("{name:path}", "x")) == expected, route


def test_keys_that_no_client_could_send(monkeypatch, capsys):
    monkeypatch.setattr(serve, "open_model", lambda *a: pytest.fail("it went on"))
    for key in ("café", "a\nb", "\x7f"):
        with pytest.raises(SystemExit):
            serve.main(["--port", "0", "--api_key", key])
        assert "printable ASCII" in capsys.readouterr().err
    args = serve.check_options(serve.Options.parse(serve.build_parser(), ["--api_key", " secret "]))
    assert args.api_key == "secret"


def test_hosts_in_odd_forms(server, monkeypatch):
    monkeypatch.setattr(server.http, "loopback", True)

    def status(*hosts, target=b"/health"):
        lines = b"".join(b"Host: " + host + b"\r\n" for host in hosts)
        return server.raw(b"GET " + target + b" HTTP/1.1\r\n" + CLOSE + lines + b"\r\n")[0]
    right = [b"localhost", b"LocalHost.:80", b"127.0.0.1:", b"[::1]:1", b"[0:0:0:0:0:0:0:1]", b"  localhost  "]
    wrong = [b"", b"evil", b"localhost, evil", b"localhost@evil", b"evil#localhost", b"[::1", b"[::1]x", b"127.0.0.1.nip.io", b"0x7f.1", b"2130706433", b"localhost:80:80", b"evil:80\tlocalhost"]
    assert [status(host) for host in right] == [200] * len(right)
    assert [status(host) for host in wrong] == [403] * len(wrong)
    assert status(b"localhost", b"evil") == status(b"evil", b"localhost") == 403 and status(b"localhost", b"localhost") == 200
    assert status(b"localhost", target=b"http://evil/health") == 403 and status(b"localhost", target=b"http://localhost:80/health") == 200


# ---- What one request's preparation holds ---------------------------------------------------------

def test_preparing_kinds_do_not_wait_for_each_other(server, monkeypatch):
    """While a grammar, a long text and three short ones take their time, a short one is answered."""
    encode, released, entered = server.tokenizer.encode, threading.Event(), []

    def slowly(text, *more):
        if "slow" in text:
            entered.append(text)
            assert released.wait(20)
        return encode(text.replace("slow", "")[:9], *more)
    monkeypatch.setattr(server.tokenizer, "encode", slowly)
    monkeypatch.setattr(server.http.preparer, "max_bytes", 1 << 30)
    slow = [dict(prompt="slow" + "a" * 20_000), *[dict(prompt=f"slow{i}") for i in range(3)], *[dict(prompt="slow b", regex="[ab]*") for _ in range(3)]]
    answers = []

    def send(fields):
        body = json.dumps(dict(fields, max_tokens=1)).encode()
        answers.append(server.raw(post(b"Content-Length: %d\r\n" % len(body), body))[0])
    threads = [threading.Thread(target=send, args=(fields,)) for fields in slow]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 10
    while len(entered) < 6 and time.monotonic() < end:         # two of the three grammars
        time.sleep(0.01)
    try:
        assert server.raw(post())[0] == 200 and len(entered) == 6 and not answers
    finally:
        released.set()
        for thread in threads:
            thread.join()
    assert answers == [200] * 7


def test_a_panic_in_preparation_is_a_500_in_json(server, monkeypatch):
    class PanicException(BaseException):
        pass

    def panics(*args):
        raise PanicException("called `Option::unwrap()` on a `None` value")
    monkeypatch.setattr(server.http.preparer, "build", panics)
    status, _, body = server.raw(post())
    assert status == 500 and json.loads(body)["error"]["code"] == "internal" and "unwrap" not in body
    monkeypatch.undo()
    assert server.raw(post())[0] == 200

