"""The page of serve.py in a headless Chromium, most of it against scripted answers whose text is known (scripted_page.py).

Needs playwright (requirements-dev.txt) and a Chromium of the system, on the path: apt-get install chromium.
"""

import json
import shutil
import time

import pytest
from scripted_page import ScriptedServer
from test_serve import Process

from gpt_faster.server.markdown import render

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]
NASTY = ("# Title <img src=x onerror=alert(1)>\n<script>alert(2)</script> **bold <b>x</b>** `code <i>` [a](javascript:alert(3)) "
         "[ok](https://example.org/ \"<b onclick=alert(6)>\") ![i](https://example.org/i.png)\n\n```html\"><script>alert(7)</script>\n<script>alert(4)</script>\n```\n\n"
         "| a | b |\n|---|---|\n| 1 | <svg onload=alert(5)> |\n")
CODE = "def f(x):\n    if x:\n\n        return [x]\n    return '<b>&amp;'"
LONG = ("An answer with *lists*, **code** and a table.\n\n1. First:\n\n   ```python\n" + "".join(f"   {line}\n" if line else "\n" for line in CODE.split("\n"))
        + "   ```\n\n2. Second\n\n   goes on.\n   - [x] done\n   - [ ] open\n3. Third\n\n---\n\n| a | b | c |\n|:--|--:|---|\n| `x \\| y` | 2 | "
        + "wide " * 30 + "|\n\n## More\n\n" + "A paragraph of the answer, with a word.\n\n" * 40 + "```\n" + "x" * 300 + "\n```\n\n***The*** ~~end~~: https://example.org/a\n")
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
def scripted_server(browser):
    """browser: nothing is started where there is none."""
    server = ScriptedServer()
    yield server
    server.stop()


@pytest.fixture
def scripted(scripted_server):
    scripted_server.reset()
    return scripted_server


@pytest.fixture
def visit(browser):
    """A URL -> its page, in a profile of its own. No test may leave an error in its console or ask another host."""
    contexts, wrong = [], []

    def watch(page, url):
        def check(message):
            if message.type == "error" and "Failed to load resource" not in message.text:
                wrong.append(message.text)

        page.on("console", check)
        page.on("pageerror", lambda e: wrong.append(str(e)))
        page.on("dialog", lambda d: (wrong.append(d.message), d.dismiss()))
        page.on("request", lambda r: None if r.url.startswith(url) else wrong.append(r.url))

    def open_page(url, **options):
        context = browser.new_context(permissions=["clipboard-read", "clipboard-write"], **options)
        contexts.append(context)
        context.on("page", lambda page: watch(page, url))
        page = context.new_page()
        page.goto(url)
        return page

    open_page.wrong = wrong
    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


@pytest.fixture
def page(visit, scripted):
    page = visit(scripted.url)
    until(page, "document.title == 'scripted'")
    return page


def until(page, condition, seconds=60):
    """By evaluate(): the page's policy lets nothing else in."""
    end = time.time() + seconds
    while not page.evaluate(condition):
        assert time.time() < end, condition
        time.sleep(0.02)


def say(page, text):
    page.fill("#text", text)
    page.press("#text", "Enter")


def idle(page, n):
    """Until n answers are there and the next may be asked for."""
    until(page, f"document.querySelector('#send').textContent == 'Send' && document.querySelectorAll('.turn.assistant').length == {n}")


def chat(page, *texts):
    for i, text in enumerate(texts):
        say(page, text)
        idle(page, i + 1)


def bodies(page):
    return [text.strip() for text in page.locator(".turn.assistant .body").all_inner_texts()]


def sent(server, i=-1):
    return [(m["role"], m["content"]) for m in server.requests[i]["messages"]]


def copied(page, button):
    button.click()
    until(page, "document.querySelector('#status').textContent == 'Copied.'")
    return page.evaluate("navigator.clipboard.readText()")


# ---- Answers ------------------------------------------------------------------------------------

def test_a_long_answer_streams(page, scripted):
    """Its lists, code and table are there while it streams; at the end it is what markdown.py makes of the whole text."""
    scripted.answers, scripted.pace = [LONG], 0.01
    say(page, "Say something long.")
    until(page, "document.querySelector('.body ol li .code .k')")
    assert page.inner_text("#send") == "Stop" and page.get_attribute("#log", "aria-busy") == "true"
    page.evaluate("window.early = document.querySelector('.body em')")
    idle(page, 1)
    assert page.evaluate("window.early.isConnected")            # blocks that are done are not made again
    assert page.get_attribute("#log", "aria-busy") == "false" and page.inner_text("#status") == "The answer is complete."
    rendered = render(LONG)
    html = page.evaluate("[...document.querySelectorAll('.body > div')].map((part) => part.innerHTML).join('')")
    assert html == page.evaluate("(html) => { const e = document.createElement('div'); e.innerHTML = html; return e.innerHTML; }", rendered.done + rendered.open)
    assert page.locator(".body > div > ol > li").count() == 3 and page.locator(".body li input:checked").count() == 1
    assert page.locator("td code").inner_text() == "x | y" and page.locator(".body hr, .body s, .body em strong").count() == 3
    assert len(scripted.renders) > 3 and sum(scripted.renders) < 6 * len(LONG)
    figures = page.inner_text(".figures")
    assert "tok/s" in figures and "prompt 9 (4 cached)" in figures and f"{-(-len(LONG) // 7)} tokens" in figures


def test_code_and_answers_are_copied_exactly(page, scripted):
    scripted.answers = [LONG]
    chat(page, "Say something long.")
    assert copied(page, page.locator(".copy-code").first) == CODE
    page.evaluate("document.querySelector('#status').textContent = ''")
    assert copied(page, page.locator(".assistant .row").get_by_text("Copy")) == LONG
    page.evaluate("document.querySelector('#status').textContent = ''")
    assert copied(page, page.locator(".user .row").get_by_text("Copy")) == "Say something long."


def test_copying_without_a_clipboard(page, scripted):
    """As over plain HTTP from another machine."""
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    page.evaluate("document.execCommand = () => { window.last = document.activeElement.value; return true; }")
    scripted.answers = [LONG]
    chat(page, "Say something long.")
    page.locator(".copy-code").first.click()
    assert page.evaluate("window.last") == CODE and page.locator("body > textarea").count() == 0


def test_html_in_an_answer_is_text(page, scripted):
    """Nothing of a model's or a user's text is executed or fetched: answers, thoughts, calls of tools, errors, titles."""
    call = dict(index=0, function=dict(name="<img src=x onerror=alert(8)>", arguments="<script>alert(9)</script>"))
    scripted.answers = [[dict(reasoning_content=NASTY), *[dict(content=NASTY[i:i + 7]) for i in range(0, len(NASTY), 7)], dict(tool_calls=[call])],
                        [dict(content="x"), RuntimeError(NASTY)]]
    chat(page, NASTY, NASTY)
    page.click("#show-chats")
    for _ in range(2):
        assert page.locator("body img, #log script, #log svg, #log b, #log i, nav script, nav b").count() == 0
        links = page.locator("#log a")
        assert [a.get_attribute("href") for a in links.all()] == ["https://example.org/", "https://example.org/i.png"]
        assert {a.get_attribute("rel") for a in links.all()} == {"noopener noreferrer nofollow"}
        assert "<script>alert(4)</script>" in page.locator("#log .body pre").first.inner_text()
        assert page.locator(".turn.assistant > pre").first.inner_text() == "<img src=x onerror=alert(8)>(<script>alert(9)</script>)"
        page.reload()
        until(page, "document.querySelector('.body .code')")


def test_the_policy_lets_no_other_script_or_style_in(page, visit):
    policy = page.request.get(page.url).headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "connect-src 'self'" in policy
    for element, directive in [("script", "script-src-elem"), ("style", "style-src-elem")]:
        refused = page.evaluate("""(tag) => new Promise((done) => {
          document.addEventListener("securitypolicyviolation", (e) => done(e.effectiveDirective), { once: true });
          const element = document.createElement(tag);
          element.textContent = "var ran = 1;";
          document.body.append(element);
        })""", element)
        assert refused == directive
    assert page.evaluate("typeof ran") == "undefined"
    assert len(visit.wrong) == 2 and all("Content Security Policy" in line for line in visit.wrong)
    visit.wrong.clear()


def test_thoughts_are_folded(page, scripted):
    scripted.answers, scripted.pace = [[*[dict(reasoning_content=f"step {i}\n") for i in range(20)], dict(content="Done.")]], 0.02
    say(page, "Think.")
    until(page, "document.querySelector('summary')?.textContent == 'Thinking…'")
    idle(page, 1)
    assert page.inner_text("summary") == "Thoughts" and not page.is_visible("details div")
    page.click("summary")
    assert page.inner_text("details div").startswith("step 0\nstep 1\n") and bodies(page) == ["Done."]


def test_without_the_renderer_the_text_is_shown(page, scripted):
    page.route("**/render", lambda route: route.fulfill(status=422, json=dict(error=dict(message="no"))))
    scripted.answers = ["**a**\n  b <i>", "c"]
    chat(page, "Hello")
    assert page.locator(".body").inner_text() == "**a**\n  b <i>"
    page.unroute("**/render")
    page.reload()
    until(page, "document.querySelector('.body strong')")


# ---- The conversation ---------------------------------------------------------------------------

def test_an_answer_is_regenerated(page, scripted):
    scripted.answers = ["One.", "Two.", "Three."]
    chat(page, "a", "b")
    assert page.get_by_text("Regenerate").locator("visible=true").count() == 1      # of the last answer
    page.get_by_text("Regenerate").last.click()
    until(page, "document.querySelector('.turn:last-child .body').textContent.trim() == 'Three.'")
    idle(page, 2)
    assert bodies(page) == ["One.", "Three."] and sent(scripted) == sent(scripted, -2) == [("user", "a"), ("assistant", "One."), ("user", "b")]


def test_a_message_is_edited(page, scripted):
    """What follows it goes, and the conversation goes on from there; Escape leaves all as it was."""
    scripted.answers = ["One.", "Two.", "Three."]
    chat(page, "first", "second")
    page.locator(".edit").first.click()
    assert page.evaluate("document.activeElement.value") == "first"
    page.keyboard.press("Escape")
    assert page.locator(".said").all_inner_texts() == ["first", "second"]
    page.locator(".edit").first.click()
    page.keyboard.type(" of all")
    page.keyboard.press("Enter")
    until(page, "document.querySelectorAll('.turn').length == 2")
    idle(page, 1)
    assert sent(scripted) == [("user", "first of all")] and bodies(page) == ["Three."]
    page.reload()
    until(page, "document.querySelectorAll('.turn').length == 2")
    assert page.locator(".said").all_inner_texts() == ["first of all"]


@pytest.mark.parametrize("how", ["Escape", "button"])
def test_an_answer_is_stopped(page, scripted, how):
    scripted.answers, scripted.pace = ["word " * 500, "Yes."], 0.02
    say(page, "Go on.")
    until(page, "document.querySelector('.body').textContent.length > 20")
    page.keyboard.press("Escape") if how == "Escape" else page.click("#send")
    idle(page, 1)
    [text] = bodies(page)
    assert text.startswith("word word") and len(text) < 2000 and "stopped" in page.inner_text(".figures") and page.inner_text("#status") == "Stopped."
    say(page, "And?")
    idle(page, 2)
    assert sent(scripted)[1][1].strip() == text


def test_a_reload_keeps_what_came(page, scripted):
    scripted.answers, scripted.pace = ["**word** " * 500, "Whole."], 0.02
    page.click("#show")
    for name, value in dict(system="Be terse.", temperature="0.5", max_tokens="77", key="k").items():
        page.fill(f"#{name}", value)
    page.press("#key", "Tab")
    say(page, "Go on.")
    until(page, "document.querySelector('.body strong')")
    page.reload()
    until(page, "document.querySelector('.body strong')")
    assert bodies(page)[0].startswith("word") and page.inner_text(".figures") == "interrupted"
    assert page.input_value("#system") == "Be terse." and page.input_value("#key") == "k"
    page.get_by_text("Regenerate").click()
    until(page, "document.querySelector('.body').textContent.trim() == 'Whole.'")
    assert sent(scripted) == [("system", "Be terse."), ("user", "Go on.")]
    assert scripted.requests[-1]["temperature"] == 0.5 and scripted.requests[-1]["max_tokens"] == 77


def test_conversations_are_listed(page, scripted):
    """New, choose, delete; another tab of the browser sees them too."""
    scripted.answers = ["One.", "Two."]
    chat(page, "first question")
    page.click("#new")
    assert page.locator(".turn").count() == 0
    chat(page, "second question\nof two lines")
    page.click("#show-chats")
    assert page.locator(".choose").all_inner_texts() == ["second question", "first question"]
    page.locator(".choose").last.click()
    until(page, "document.querySelector('.body')?.textContent.trim() == 'One.'")
    assert page.locator(".said").all_inner_texts() == ["first question"] and page.locator("[aria-current]").inner_text() == "first question"
    other = page.context.new_page()
    other.goto(scripted.url)
    until(other, "document.querySelector('.body')?.textContent.trim() == 'Two.'")          # the newest
    page.get_by_label("Delete first question").click()
    assert page.locator(".choose").count() == 2
    page.get_by_label("Delete first question").click()
    assert page.locator(".choose").all_inner_texts() == ["second question"] and page.locator(".turn").count() == 0
    until(other, "document.querySelectorAll('.choose').length == 1")


def test_a_running_answer_ends_with_its_conversation(page, scripted):
    """A new chat stops it, and may ask at once; deleting it does not bring it back."""
    scripted.answers, scripted.pace = ["word " * 500, "word " * 500, "Yes."], 0.02
    say(page, "first")
    until(page, "document.querySelector('.body').textContent.length > 20")
    page.click("#new")
    say(page, "second")
    until(page, "document.querySelector('.body').textContent.length > 20")
    assert sent(scripted) == [("user", "second")]
    page.click("#show-chats")
    page.get_by_label("Delete second").click()
    page.get_by_label("Delete second").click()
    time.sleep(1)
    page.reload()
    until(page, "document.querySelector('.figures')")
    assert page.locator(".choose").all_inner_texts() == ["first"] and "stopped" in page.inner_text(".figures")


# ---- Errors -------------------------------------------------------------------------------------

def test_an_error_is_shown_where_it_occurs(page, scripted):
    """Before the stream and in it, with what came before; Retry asks again, and the failed answer is not sent."""
    scripted.answers = ["One.", [dict(content="Half"), RuntimeError("the request took longer")], "Two."]
    chat(page, "a", "b")
    assert page.inner_text(".turn:last-child .error").startswith("the request took longer") and bodies(page)[-1] == "Half"
    page.get_by_text("Retry").click()
    until(page, "document.querySelector('.turn:last-child .body').textContent.trim() == 'Two.'")
    assert sent(scripted) == [("user", "a"), ("assistant", "One."), ("user", "b")] and page.locator(".error:visible").count() == 0


@pytest.mark.parametrize("answer, message", [
    (dict(status=400, json=dict(error=dict(message="temperature: too hot"))), "temperature: too hot"),
    (dict(status=502, body="<html>"), "The server answered with status 502."),
    (dict(status=200, body="data: {\"choices\": []}\n\n"), "The connection ended before the answer did."),
    (None, "The server cannot be reached.")])
def test_errors_of_requests(page, scripted, answer, message):
    page.route("**/v1/chat/completions", lambda route: route.fulfill(**answer) if answer else route.abort())
    say(page, "Hello")
    idle(page, 1)
    assert page.inner_text(".error").startswith(message)
    page.unroute("**/v1/chat/completions")
    say(page, "Still there?")
    idle(page, 2)
    assert sent(scripted) == [("user", "Hello\n\nStill there?")] and page.get_by_text("Retry").locator("visible=true").count() == 0


def test_a_wrong_option_is_not_sent(page, scripted):
    page.click("#show")
    page.locator("#top_p").press_sequentially("3")
    say(page, "Hello")
    time.sleep(0.2)
    assert not scripted.requests and page.input_value("#text") == "Hello" and page.evaluate("document.activeElement.id") == "top_p"


def test_a_server_with_a_key(browser, visit):
    server = ScriptedServer(api_key="secret")
    page = visit(server.url)
    until(page, "!document.querySelector('#options').hidden && document.activeElement.id == 'key'")
    page.keyboard.type("secret")
    page.keyboard.press("Tab")
    until(page, "document.title == 'scripted'")
    server.answers = ["**Yes.**"]
    chat(page, "Hello")
    assert page.inner_text(".body strong") == "Yes."
    server.stop()


# ---- Keyboard, screens, themes ------------------------------------------------------------------

def test_the_keyboard(page, scripted):
    assert page.evaluate("document.activeElement.id") == "text"
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    idle(page, 1)
    assert sent(scripted) == [("user", "one\ntwo")] and page.evaluate("document.activeElement.id") == "text"
    page.click("#show")
    page.keyboard.press("Escape")
    assert not page.is_visible("#options") and page.get_attribute("#show", "aria-expanded") == "false"
    order = []
    page.evaluate("document.body.focus(); document.activeElement.blur()")
    page.focus("#show-chats")
    for _ in range(8):
        order.append(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
        page.keyboard.press("Tab")
    assert order == ["show-chats", "new", "show", "Edit", "Copy", "Copy", "Regenerate", "text"]


def test_everything_has_a_name(page, scripted):
    scripted.answers = [LONG]
    chat(page, "Hello")
    page.click("#show")
    page.click("#show-chats")
    unnamed = "[...document.querySelectorAll('button, textarea, select, input:not([disabled])')].filter((e) => !(e.textContent || e.ariaLabel || e.labels?.length))"
    assert page.evaluate(unnamed + ".length") == 0


@pytest.mark.parametrize("width", [320, 390])
def test_a_narrow_screen_has_no_side_scroll(visit, scripted, width):
    """Code, tables and formulas scroll in themselves."""
    page = visit(scripted.url, viewport=dict(width=width, height=700))
    scripted.answers = [LONG + "\n\n" + "long" * 100 + "\n\n\\[\n" + "x + " * 100 + "\n\\]\n"]
    chat(page, "unbroken" * 50)
    page.click("#show")
    assert page.evaluate("document.documentElement.scrollWidth") <= width and page.evaluate("document.querySelector('main').scrollWidth") <= width
    for wide in ("pre", ".wide", "div.math"):
        box = page.locator(f".body {wide}").last
        assert box.evaluate("(e) => e.scrollWidth > e.clientWidth && getComputedStyle(e).overflowX == 'auto'")
    page.click("#show-chats")
    page.locator(".choose").click()
    assert not page.is_visible("#chats")


def test_themes(visit, scripted):
    """The system's, or the one that was chosen."""
    page = visit(scripted.url, color_scheme="dark")
    colour = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(colour)
    page.emulate_media(color_scheme="light")
    light = page.evaluate(colour)
    assert dark == "rgb(23, 25, 29)" and light == "rgb(255, 255, 255)"
    page.click("#show")
    page.select_option("#theme", "dark")
    assert page.evaluate(colour) == dark
    page.reload()
    assert page.evaluate(colour) == dark


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(visit, scripted, scheme):
    """At least 4.5 : 1 between each colour of text and both backgrounds, as WCAG's AA asks."""
    page = visit(scripted.url, color_scheme=scheme)
    colours = page.evaluate("""Object.fromEntries("page soft own text dim accent on-accent bad keyword string number name type".split(" ").map((name) => {
      const e = document.body.appendChild(document.createElement("i"));
      e.style.color = `var(--${name})`;
      const found = getComputedStyle(e).color.match(/\\d+/g).map(Number);
      e.remove();
      return [name, found];
    }))""")

    def luminance(rgb):
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in rgb)]
        return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear))

    def contrast(a, b):
        low, high = sorted((luminance(colours[a]), luminance(colours[b])))
        return (high + 0.05) / (low + 0.05)

    for name in "text dim accent bad keyword string number name type".split():
        assert contrast(name, "page") >= 4.5 and contrast(name, "soft") >= 4.5, name
    assert contrast("text", "own") >= 4.5 and contrast("on-accent", "accent") >= 4.5


# ---- With a model -------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def server(browser):
    server = Process(n_rows=2)
    yield server
    assert server.stop() == 0 and not [line for line in server.lines if "rror" in line]


def test_a_conversation_with_a_model(visit, server):
    page = visit(f"http://127.0.0.1:{server.port}/")
    until(page, "document.title != 'gpt-faster'")
    requests = []
    page.on("request", lambda r: requests.append(json.loads(r.post_data)) if r.url.endswith("/v1/chat/completions") else None)
    page.click("#show")
    page.fill("#system", "You are terse.")
    page.fill("#max_tokens", "12")
    chat(page, "Hello", "And again")
    assert all(len(body) > 1 for body in bodies(page)) and "tok/s" in page.locator(".figures").last.inner_text()
    roles = [[m["role"] for m in request["messages"]] for request in requests]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"]]
    assert requests[1]["messages"][0]["content"] == "You are terse." and requests[1]["max_tokens"] == 12
    page.fill("#max_tokens", "300")
    say(page, "Tell me a long story.")
    until(page, "document.querySelector('.turn:last-child .body').textContent.length > 9")
    page.keyboard.press("Escape")
    idle(page, 3)
    assert "stopped" in page.locator(".figures").last.inner_text()
    server.wait_until((0, 0), 5)                               # its slot is free again
