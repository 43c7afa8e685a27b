"""The page of serve.py in a headless Chromium: a conversation, a stop, an answer full of HTML, a narrow screen.

Needs playwright (requirements-dev.txt) and a Chromium of the system, on the path: apt-get install chromium.
"""

import json
import shutil
import time

import pytest
from test_serve import Process

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]
NASTY = ("# Title <img src=x onerror=alert(1)>\n<script>alert(2)</script> **bold <b>x</b>** `code <i>` [a](javascript:alert(3)) "
         "[ok](https://example.org/)\n\n```html\n<script>alert(4)</script>\n```\n\n| a | b |\n|---|---|\n| 1 | <svg onload=alert(5)> |\n")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    if not CHROMIUM:
        pytest.skip("no Chromium on the path: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(browser):
    """browser: nothing is started where there is none."""
    server = Process(n_rows=2)
    yield server
    server.stop()


@pytest.fixture
def page(browser, server):
    """Loaded anew, in a profile of its own; no test may leave an error in its console."""
    context = browser.new_context()
    page = context.new_page()
    wrong = []
    page.on("console", lambda m: wrong.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda e: wrong.append(str(e)))
    page.on("dialog", lambda d: (wrong.append(d.message), d.dismiss()))
    page.goto(f"http://127.0.0.1:{server.port}/")
    until(page, "document.title != 'gpt-faster'")          # it knows the model
    yield page
    context.close()
    assert wrong == []


def until(page, condition, seconds=60):
    """By evaluate(): the page's policy lets nothing else in."""
    end = time.time() + seconds
    while not page.evaluate(condition):
        assert time.time() < end, condition
        time.sleep(0.05)


def say(page, text, max_tokens=12):
    if not page.is_visible("#max_tokens"):
        page.click("#show")
    page.fill("#max_tokens", str(max_tokens))
    page.fill("#text", text)
    page.keyboard.press("Enter")


def idle(page, n):
    """Until n answers are there and the next may be asked for."""
    until(page, f"document.querySelector('#send').textContent == 'Send' && document.querySelectorAll('.figures').length == {n}")


def answer_nastily(page):
    """The server's next answers, in pieces of seven characters."""
    events = [dict(choices=[dict(delta=dict(content=NASTY[i:i + 7]), finish_reason=None)]) for i in range(0, len(NASTY), 7)]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=200, content_type="text/event-stream", body=body))


def test_a_conversation(page):
    requests = []
    page.on("request", lambda r: requests.append(r.post_data_json) if r.url.endswith("/v1/chat/completions") else None)
    page.click("#show")
    page.fill("#system", "You are terse.")
    say(page, "Hello")
    idle(page, 1)
    say(page, "And again")
    idle(page, 2)
    bodies = page.locator(".body").all_inner_texts()
    assert len(bodies) == 2 and all(len(body) > 1 for body in bodies)
    assert "tok/s" in page.locator(".figures").last.inner_text()
    roles = [[m["role"] for m in request["messages"]] for request in requests]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"]]
    assert requests[1]["messages"][0]["content"] == "You are terse." and requests[1]["max_tokens"] == 12


def test_an_answer_is_stopped(page, server):
    """By Escape: the text so far stays, and the server's slot is free again."""
    say(page, "Tell me a long story.", 300)
    until(page, "document.querySelectorAll('.body').length == 1 && document.querySelector('.body').textContent.length > 9")
    page.keyboard.press("Escape")
    idle(page, 1)
    assert "stopped" in page.locator(".figures").inner_text() and len(page.locator(".body").inner_text()) > 9
    server.wait_until((0, 0), 5)


def test_html_in_an_answer_is_text(page):
    """Markdown becomes elements that the page makes itself; nothing of the answer is executed or fetched."""
    answer_nastily(page)
    say(page, "Something nasty")
    idle(page, 1)
    assert page.locator("#log script, #log img, #log svg, #log b, #log i").count() == 0
    assert [a.get_attribute("href") for a in page.locator("#log a").all()] == ["https://example.org/"]
    assert "<script>alert(4)</script>" in page.locator("#log pre").last.inner_text()


def test_a_narrow_screen_has_no_side_scroll(page):
    answer_nastily(page)
    say(page, "Something nasty")
    idle(page, 1)
    page.set_viewport_size(dict(width=360, height=640))
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
