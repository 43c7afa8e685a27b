"""SIGTERM and Ctrl-C at any time: what runs is finished, what is prepared or sent gets 503, and the process ends soon."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from conftest import ROOT, SMOLLM2
from test_serve_connections import post, read
from test_serve_safety import InProcess

from gpt_faster.decoding.scheduler import Scheduler
from gpt_faster.server import app, engine
from gpt_faster.server import main as serve


def run(script, monkeypatch, *argv, step_seconds=0.02):
    """serve() in this thread, as in a process; script(port, http) in another one -> seconds from the first signal to the end, serve()'s error."""
    monkeypatch.setattr(engine.Engine, "run", engine.Engine.run)
    made = InProcess(*argv)
    made.stop()                                    # its own threads; the session stays
    slots = Scheduler(made.session.batch, made.session.model.longest_call)
    step = made.session.batch.step
    made.session.batch.step = lambda: (time.sleep(step_seconds), step())[1]
    listener, servers, errors = socket.create_server(("127.0.0.1", 0)), [], []
    original = app.HttpServer.__init__

    def remember(self, *args):
        original(self, *args)
        servers.append(self)
    monkeypatch.setattr(app.HttpServer, "__init__", remember)

    def act():
        try:
            while not servers or servers[0].loop is None:
                time.sleep(0.01)
            script(listener.getsockname()[1], servers[0])
        except BaseException as e:
            errors.append(e)
            os.kill(os.getpid(), signal.SIGTERM)
    thread = threading.Thread(target=act)
    thread.start()
    error = None
    try:
        app.serve(made.session, slots, listener)
    except BaseException as e:
        error = e
    ended = time.monotonic()
    thread.join(20)
    listener.close()
    assert not errors, errors
    return ended, error


def signal_self(number=signal.SIGTERM):
    os.kill(os.getpid(), number)
    return time.monotonic()


def request(**fields):
    body = json.dumps({**dict(prompt="a", max_tokens=60, temperature=0, ignore_eos=True), **fields}).encode()
    return post(b"Content-Length: %d\r\n" % len(body), body, close=b"")


def connect(port, data=b""):
    connection = socket.create_connection(("127.0.0.1", port))
    connection.settimeout(20)
    connection.sendall(data)
    return connection


def all_of(connection):
    received = b""
    while part := connection.recv(1 << 16):
        received += part
    return received


def test_streams_are_finished_and_new_requests_refused(monkeypatch):
    seen = {}

    def script(port, http):
        stream, whole, idle = connect(port, request(stream=True)), connect(port, request()), connect(port, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        stream.recv(10)
        read(idle)
        while http.engine.load()[0] < 2:           # until both are prepared
            time.sleep(0.01)
        seen["signal"] = signal_self()
        time.sleep(0.1)
        seen["new"] = read(connect(port, request()))
        seen["health"] = read(connect(port, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"))
        seen["stream"], seen["whole"] = all_of(stream), read(whole)
        seen["idle"] = idle.recv(100)
    ended, error = run(script, monkeypatch)
    assert error is None and 0.3 < ended - seen["signal"] < 4
    assert seen["new"][0] == 503 and "shutting down" in seen["new"][2] and seen["health"][0] == 503 and '"stopping"' in seen["health"][2]
    assert b"[DONE]" in seen["stream"] and seen["whole"][0] == 200 and seen["idle"] == b""


def test_a_request_that_is_being_prepared_gets_503(monkeypatch):
    seen, entered = {}, threading.Event()

    def script(port, http):
        def slowly(*args):
            entered.set()
            time.sleep(0.5)
            return prepare(*args)
        prepare, http.preparer.check_prompt = http.preparer.check_prompt, slowly
        connection = connect(port, request())
        assert entered.wait(5)
        seen["signal"] = signal_self()
        seen["answer"] = read(connection)
    ended, error = run(script, monkeypatch)
    assert error is None and ended - seen["signal"] < 3 and seen["answer"][0] == 503


def test_a_second_signal_ends_streams_with_an_error(monkeypatch):
    seen = {}

    def script(port, http):
        stream, whole = connect(port, request(stream=True)), connect(port, request())
        stream.recv(10)
        signal_self()
        time.sleep(0.1)
        seen["signal"] = signal_self(signal.SIGINT)
        seen["stream"], seen["whole"] = all_of(stream), read(whole)
    ended, error = run(script, monkeypatch, step_seconds=0.2)
    assert isinstance(error, KeyboardInterrupt) and ended - seen["signal"] < 3
    assert b"the_server_has_stopped" in seen["stream"] and b"[DONE]" not in seen["stream"] and seen["whole"][0] == 503


def test_a_client_in_the_middle_of_its_body_holds_nothing_up(monkeypatch):
    seen = {}

    def script(port, http):
        seen["connections"] = [connect(port, request()[:-5]), connect(port, b"POST /v1/comp"), connect(port)]
        time.sleep(0.2)
        seen["signal"] = signal_self()
    ended, error = run(script, monkeypatch)
    assert error is None and ended - seen["signal"] < 2 * app.LAST_RESPONSES
    assert [read(connection)[0] in (0, 503) for connection in seen["connections"]] == [True] * 3


def test_a_port_that_two_servers_took_while_they_loaded(monkeypatch):
    """Both were bound, and one listens: the other's error names the port."""
    first = serve.listen("127.0.0.1", 0)
    second = serve.listen("127.0.0.1", first.getsockname()[1])
    first.listen()
    made = InProcess()
    made.stop()
    with pytest.raises(OSError, match="cannot listen on 127.0.0.1, port .* in use: try another --port"):
        app.serve(made.session, Scheduler(made.session.batch, 32), second)
    first.close()
    second.close()


@pytest.mark.slow
@pytest.mark.parametrize("number, status", [(signal.SIGINT, {-2, 130}), (signal.SIGTERM, {-15})])
@pytest.mark.parametrize("seconds", [0.3, 1.5, 2.5])
def test_a_signal_while_it_loads(number, status, seconds):
    command = [sys.executable, "serve.py", "-m", str(SMOLLM2), "--device", "cpu", "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    time.sleep(seconds)
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    assert "Traceback" not in errors and process.returncode in (status | {0} if "Serving" in errors else status), errors
