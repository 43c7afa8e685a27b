"""The page of serve.py in a headless Chromium: a conversation, a stop, an answer full of HTML, a narrow screen.

Needs `pip install playwright` and a chromium on the path (apt-get install chromium), which the test scripts do not install.
"""

import json
import shutil
import time

import pytest
from test_serve import Process

playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not CHROMIUM, reason="no chromium")]
NASTY = ("# Title <img src=x onerror=alert(1)>\n<script>alert(2)</script> **bold <b>x</b>** `code <i>` [a](javascript:alert(3)) "
         "[ok](https://example.org/)\n\n```html\n<script>alert(4)</script>\n```\n\n| a | b |\n|---|---|\n| 1 | <svg onload=alert(5)> |\n")


@pytest.fixture(scope="module")
def page():
    server = Process(n_rows=2)
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.wrong = []
        page.on("console", lambda m: page.wrong.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda e: page.wrong.append(str(e)))
        page.on("dialog", lambda d: (page.wrong.append(d.message), d.dismiss()))
        page.goto(f"http://127.0.0.1:{server.port}/")
        page.served = server
        yield page
        browser.close()
    server.stop()


def until(page, condition, seconds=60):
    """By evaluate(): the page's policy lets nothing else in."""
    end = time.time() + seconds
    while not page.evaluate(condition):
        assert time.time() < end, condition
        time.sleep(0.05)


def say(page, text):
    page.fill("#text", text)
    page.keyboard.press("Enter")


def idle(page, n):
    until(page, f"document.querySelector('#send').textContent == 'Send' && document.querySelectorAll('.figures').length == {n}")


def test_the_page(page):
    until(page, "document.title != 'gpt-faster'")
    page.click("#show")
    page.fill("#system", "You are terse.")
    page.fill("#max_tokens", "12")
    say(page, "Hello")
    idle(page, 1)
    say(page, "And again")
    idle(page, 2)
    assert "tok/s" in page.locator(".figures").last.inner_text() and len(page.locator(".body").last.inner_text()) > 1
    page.fill("#max_tokens", "300")
    say(page, "Tell me a long story.")
    until(page, "document.querySelectorAll('.body').length == 3 && document.querySelectorAll('.body')[2].textContent.length > 9")
    page.keyboard.press("Escape")
    idle(page, 3)
    assert "stopped" in page.locator(".figures").last.inner_text()
    page.served.wait_until((0, 0), 5)
    events = [dict(choices=[dict(delta=dict(content=NASTY[i:i + 7]), finish_reason=None)]) for i in range(0, len(NASTY), 7)]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=200, content_type="text/event-stream", body=body))
    say(page, "Something nasty")
    idle(page, 4)
    assert page.locator("#log script, #log img, #log svg, #log b, #log i").count() == 0
    assert [a.get_attribute("href") for a in page.locator("#log a").all()] == ["https://example.org/"]
    assert "<script>alert(4)</script>" in page.locator("#log pre").last.inner_text()
    page.set_viewport_size(dict(width=360, height=640))
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.wrong == []
