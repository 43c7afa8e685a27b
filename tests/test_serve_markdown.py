"""The chat page's Markdown: server/markdown.py case by case, whole and as it streams, and the route that renders it."""

import http.client
import json
import random
import re
import threading
import time
from html.parser import HTMLParser

import pytest
from scripted_page import ScriptedServer

from gpt_faster.server import renderer
from gpt_faster.server.markdown import highlight, render
from gpt_faster.server.renderer import Renderer, RenderError

LINK = dict(target="_blank", rel="noopener noreferrer nofollow")


class Tree(HTMLParser):
    """HTML as nested text, `ol[li[p["a"]]]`: highlighting and layout elements leave their content."""

    def __init__(self, html):
        super().__init__()
        self.out, self.stack, self.tags, self.links, self.preformatted = [], [], [], [], 0
        self.feed(html)
        assert not self.stack, "an element is not closed"
        self.tree = "".join(self.out)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "a":
            self.links.append(dict(attrs)["href"])
        if tag in ("br", "hr", "input"):
            checked = "x" if "checked" in dict(attrs) else ""
            self.out.append({"br": "<br>", "hr": "hr", "input": f"box{checked}"}[tag])
            return
        of_class = dict(attrs).get("class")
        name = tag
        if tag in ("div", "span", "button"):
            name = of_class if of_class in ("math", "bar") else ""
        elif self.preformatted and tag == "code":
            name = ""
        self.stack.append((tag, name))
        self.preformatted += tag == "pre"
        if name and name != "bar":
            self.out.append(f"{name}[")

    def handle_endtag(self, tag):
        opened, name = self.stack.pop()
        assert opened == tag
        self.preformatted -= tag == "pre"
        if name and name != "bar":
            self.out.append("]")

    def handle_data(self, data):
        if self.preformatted or data.strip("\n") and not self.in_bar():
            self.out.append(data if self.preformatted else data.strip("\n"))

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)

    def in_bar(self):
        return any(name == "bar" for _, name in self.stack)


def html_of(text):
    rendered = render(text)
    return rendered.done + rendered.open


def tree(text):
    return Tree(html_of(text)).tree


CASES = {
    # lists
    "- a\n- b": "ul[li[a]li[b]]",
    "* a\n* b\n+ c": "ul[li[a]li[b]]ul[li[c]]",
    "1. a\n2. b": "ol[li[a]li[b]]",
    "3) a\n4) b": "ol[li[a]li[b]]",
    "- a\n  - b\n    - c\n- d": "ul[li[aul[li[bul[li[c]]]]]li[d]]",
    "1. a\n   - b\n   - c\n2. d": "ol[li[aul[li[b]li[c]]]li[d]]",
    "- a\n\n  more\n- b": "ul[li[p[a]p[more]]li[p[b]]]",
    "1. a\n\n   > q\n\n2. b": "ol[li[p[a]blockquote[p[q]]]li[p[b]]]",
    "1. a\nlazy\n2. b": "ol[li[a<br>lazy]li[b]]",
    "text\n- a": "p[text]ul[li[a]]",
    "text\n2. a": "p[text<br>2. a]",
    "-\n- a": "ul[li[]li[a]]",
    "- # a\n- b": "ul[li[h2[a]]li[b]]",
    "- a\n\n\n- b": "ul[li[p[a]]li[p[b]]]",
    "10. a\n    - b": "ol[li[aul[li[b]]]]",
    "- a\n\nend": "ul[li[a]]p[end]",
    "- [ ] a\n- [x] b\n- [X] c\n- [y] d": "ul[li[box a]li[boxx b]li[boxx c]li[[y] d]]",
    "1. [x] a\n   - [ ] b": "ol[li[boxx aul[li[box b]]]]",
    # code
    "```\na\n  b\n```": "pre[a\n  b\n]",
    "1. a\n\n   ```python\n   def f():\n       return 1\n   ```\n2. b": "ol[li[p[a]pre[def f():\n    return 1\n]]li[p[b]]]",
    "- a\n  ```\n  x\n   y\n  ```\n  c": "ul[li[apre[x\n y\n]c]]",
    "- a\n  - b\n\n    ```js\n    if (x) {\n      y();\n    }\n    ```": "ul[li[aul[li[p[b]pre[if (x) {\n  y();\n}\n]]]]]",
    "> ```\n> a\n> ```": "blockquote[pre[a\n]]",
    "~~~text\n```\n~~~": "pre[```\n]",
    "````\n```\na\n```\n````": "pre[```\na\n```\n]",
    "    a\n      b\n\n    c": "pre[a\n  b\n\nc\n]",
    "```python\nx = 1": "pre[x = 1]",
    "```\n\n\na\n\n```": "pre[\n\na\n\n]",
    "```\n\ta\n```": "pre[\ta\n]",
    "`a``b` and ``c`d``": "p[code[a``b] and code[c`d]]",
    "`a\\`b": "p[code[a\\]b]",
    "`<b>&amp;`": "p[code[<b>&amp;]]",
    # emphasis
    "*a* _b_ **c** __d__": "p[em[a] em[b] strong[c] strong[d]]",
    "***x***": "p[em[strong[x]]]",
    "**a *b* c**": "p[strong[a em[b] c]]",
    "~~x~~ and ~~ y": "p[s[x] and ~~ y]",
    "snake_case_name and 2*3*4": "p[snake_case_name and 2em[3]4]",
    "a * b * c": "p[a * b * c]",
    "**bold:**text": "p[**bold:**text]",
    "\\*a\\*": "p[*a*]",
    # blocks
    "a\n\n---\n\nb": "p[a]hrp[b]",
    "***\n___\n- - -": "hrhrhr",
    "# a\n## b\n###### c": "h2[a]h3[b]h6[c]",
    "a\n===\nb\n---": "h2[a]h3[b]",
    "#a": "p[#a]",
    "> a\n> > b\n\nc": "blockquote[p[a]blockquote[p[b]]]p[c]",
    "a\nb  \nc": "p[a<br>b<br>c]",
    # tables
    "| a | b |\n|---|---|\n| 1 | 2 |": "table[thead[tr[th[a]th[b]]]tbody[tr[td[1]td[2]]]]",
    "a|b\n-|-\n1|2\n\nend": "table[thead[tr[th[a]th[b]]]tbody[tr[td[1]td[2]]]]p[end]",
    "| a |\n|---|\n| `x \\| y` |\n| **z** |": "table[thead[tr[th[a]]]tbody[tr[td[code[x | y]]]tr[td[strong[z]]]]]",
    "| a | b |\n|---|---|\n| 1 |": "table[thead[tr[th[a]th[b]]]tbody[tr[td[1]td[]]]]",
    "- a\n\n  | b |\n  |---|\n  | c |": "ul[li[p[a]table[thead[tr[th[b]]]tbody[tr[td[c]]]]]]",
    "text\n| a |\n|---|\n| b |": "p[text]table[thead[tr[th[a]]]tbody[tr[td[b]]]]",
    # links, and images as links
    "[a](https://x.y)": "p[a[a]]",
    "[a][1]\n\n[1]: https://x.y": "p[a[a]]",
    "see https://x.y/a_b?c=1, and <https://z.w>.": "p[see a[https://x.y/a_b?c=1], and a[https://z.w].]",
    "(www.x.org) me@x.org": "p[(a[www.x.org]) a[me@x.org]]",
    "![alt](https://x.y/z.png)": "p[a[alt]]",
    "[![alt](https://x.y/z.png)](https://x.y)": "p[a[alt]]",
    "`https://x.y`": "p[code[https://x.y]]",
    # formulas as written
    r"\(a_1 * b_1*c\) and $x_i*y*z$": r"p[math[\(a_1 * b_1*c\)] and math[$x_i*y*z$]]",
    "\\[\na\n- b\n= c\n\\]": "math[\\[\na\n- b\n= c\n\\]]",
    "text\n$$\na\n+ b\n$$\nmore": "p[text]math[$$\na\n+ b\n$$]p[more]",
    "1. a\n   \\[\n   b\n   \\]": "ol[li[amath[\\[\nb\n\\]]]]",
    "$5, $10 and US$": "p[$5, $10 and US$]",
    "\\[\na\n\n- b": "p[[<br>a]ul[li[b]]",
    "\\[\na\n- b": "math[\\[\na\n- b]",
    r"`\(a\)` and \[not a link](x)": r"p[code[\(a\)] and [not a link](x)]",
    # text that is not Markdown
    "<b>x</b> <!-- y -->": "p[<b>x</b> <!-- y -->]",
    "<div>\n*a*\n</div>": "p[<div><br>em[a]<br></div>]",
    "&lt;b&gt; &copy;": "p[<b> ©]",
    "": "",
}


@pytest.mark.parametrize("text", CASES)
def test_a_case(text):
    assert tree(text) == CASES[text]


def test_start_of_a_list_and_alignment_of_a_table():
    assert '<ol start="3">' in html_of("3. a")
    html = html_of("| a | b | c |\n|:--|:-:|--:|\n| 1 | 2 | 3 |")
    assert [attrs.get("class") for tag, attrs in Tree(html).tags if tag == "td"] == ["left", "center", "right"]


# ---- As an answer streams -----------------------------------------------------------------------

def stream(pieces):
    """As the page does: what is done is not sent again. -> the HTML, and how many characters were rendered."""
    shown, rest, n = "", "", 0
    for piece in pieces:
        rest += piece
        n += len(rest)
        rendered = render(rest)
        shown += rendered.done
        rest = rest.encode("utf-16-le")[2 * rendered.length:].decode("utf-16-le")
    return shown + rendered.open, n


def cut(text, rng):
    while text:
        n = rng.choice([1, 2, 3, 7, 20])
        yield text[:n]
        text = text[n:]


def test_a_stream_ends_as_the_whole_text():
    """Random documents of the cases' parts, cut anywhere: at the end the HTML is the whole text's, but for references."""
    rng = random.Random(0)
    parts = [text for text in CASES if "]: " not in text and text] + ["\U0001f642 and \U0001f600\u2028x", "\t- tab"]
    for _ in range(60):
        text = "".join(rng.choice(parts) + rng.choice(["\n", "\n\n", "\n\n\n"]) for _ in range(rng.randint(1, 5)))
        assert stream(cut(text, rng))[0] == html_of(text), text


@pytest.mark.parametrize("text", ["1. a\n\n2. b\n\n3. c", "a\nb | c\n--|--\nd | e", "text\n---\nmore", "- a\n\n\n  b\n- c", "```\na\n\n\nb\n```\nc",
                                  "> a\nb\n\n> c", "\\[\na\n\\]\nb\n\n\\[\nc\n\\]"])
def test_every_cut_of_what_grows(text):
    for i in range(len(text)):
        assert stream([text[:i], text[i:]])[0] == html_of(text), text[:i]
    assert stream(text)[0] == html_of(text)


def test_a_long_answer_costs_linear_time():
    """200 paragraphs, lists and blocks of code in pieces of 100 characters: each character is rendered a few times."""
    text = "Some words of a paragraph. " * 5 + "\n\n" + "- an item\n" * 5 + "\n```python\n" + "x = f(1)\n" * 10 + "```\n\n"
    text *= 66
    html, n = stream(text[i:i + 100] for i in range(0, len(text), 100))
    assert html == html_of(text) and n < 4 * len(text)


# ---- What a model must not be able to do --------------------------------------------------------

NASTY = [
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "<svg/onload=alert(1)>", "<a href='javascript:alert(1)'>x</a>",
    "[x](javascript:alert(1))", "[x](JaVaScRiPt:alert(1))", "[x](java&#115;cript:alert(1))", "[x](&#x6A;avascript:alert(1))", "[x](\tjavascript:alert(1))",
    "[x](<java\nscript:alert(1)>)", "[x](data:text/html,<script>alert(1)</script>)", "[x](vbscript:x)", "[x](file:///etc/passwd)", "[x](blob:https://a/b)",
    "<javascript:alert(1)>", "<data:text/html;base64,PHNjcmlwdD4=>", "![x](javascript:alert(1))", "![x](data:image/svg+xml,<svg>)", "[x](//evil.example)",
    "[x](/metrics)", "[x](../v1/models)", "[x][1]\n\n[1]: javascript:alert(1)", '[x](https://a.b "\\" onmouseover=alert(1) \\"")', "[x](https://a.b/\"onclick=alert(1))",
    "![x\" onerror=\"alert(1)](https://a.b)", "```<script>alert(1)</script>\nx\n```", "```\" onclick=\"alert(1)\nx\n```", "```html\n</code></pre><script>alert(1)</script>\n```",
    "~~~'><img src=x onerror=alert(1)>\nx\n~~~", "`</code><script>alert(1)</script>`", "| <script> |\n|---|\n| <img src=x onerror=alert(1)> |", "# <script>alert(1)</script>",
    "\\(<script>alert(1)</script>\\)", "$$\n<img src=x onerror=alert(1)>\n$$", "$<svg onload=alert(1)>$", "https://a.b/<script>alert(1)</script>", "http://a.b/\"onclick=alert(1)",
    "&lt;script&gt;alert(1)&lt;/script&gt;", "- [ ] <input autofocus onfocus=alert(1)>", "<style>*{display:none}</style>", "<iframe srcdoc='x'>", "[x](https://a.b'onclick='x)",
    "<https://a.b/\"onclick=x>", "www.a.b/\"><script>", "xmpp:a@b.c/javascript:x", "\u0000<script>", "[<img src=x onerror=alert(1)>](https://a.b)",
]
ATTRIBUTES = {"a": {"href", "target", "rel", "title"}, "ol": {"start"}, "input": {"class", "type", "disabled", "checked"}, "button": {"type", "class"},
              "div": {"class"}, "span": {"class"}, "th": {"class"}, "td": {"class"}, "ul": {"class"}, "li": {"class"}}
TAGS = {*ATTRIBUTES, "p", "em", "strong", "s", "code", "pre", "blockquote", "hr", "br", "table", "thead", "tbody", "tr", "h2", "h3", "h4", "h5", "h6"}


@pytest.mark.parametrize("text", NASTY)
def test_nothing_of_a_model_is_markup(text):
    for each in (text, f"- a\n\n  {text}", f"> {text}", f"**{text}**", text[:-1]):
        parsed = Tree(html_of(each))
        for tag, attrs in parsed.tags:
            assert tag in TAGS and set(attrs) <= ATTRIBUTES.get(tag, set()), (tag, attrs)
            if tag == "a":
                assert attrs.items() >= LINK.items() and re.match(r"(https?|mailto|tel|xmpp):", attrs["href"])


def test_what_is_shown_of_a_refused_link_is_the_text():
    assert tree("[x](javascript:alert(1)) ![y](data:image/png;base64,AA)") == "p[[x](javascript:alert(1)) ![y](data:image/png;base64,AA)]"


# ---- Code ---------------------------------------------------------------------------------------

CODE = "\n\n  def f(x):\t# <b> & \"q\" 'r'\n\n\treturn x  \n\\n @ $x `y` {{ z }} %> <?php ?> \ufeff\u00a0\U0001f642\n\n\n"


@pytest.mark.parametrize("name", "python py3 js ts tsx jsx html xml css c cpp c++ c# java kotlin swift go rust ruby php perl lua r sql bash sh console pycon "
                         "powershell json yaml toml ini diff make docker nginx latex markdown jinja haskell scala elixir text unknown-language".split())
def test_the_text_of_code_is_the_code(name):
    """Copying gives it: no lexer may add, drop or change a character."""
    for code in (CODE, CODE.strip(), "\ufeffx\n", "\n", ""):
        parsed = Tree(f"<pre><code>{highlight(code, name)}</code></pre>")
        assert "".join(parsed.out) == f"pre[{code}]"


def test_code_is_highlighted_by_classes():
    html = html_of("```python title=x\ndef f(): pass\n```")
    assert '<span class="k">def</span>' in html and "<span>python</span>" in html and "style" not in html


# ---- The process and the route ------------------------------------------------------------------

def test_a_text_that_takes_too_long_ends_its_process_only(monkeypatch):
    process = Renderer()
    assert process.render("*a*")["open"] == "<p><em>a</em></p>\n"
    monkeypatch.setattr(renderer, "TIMEOUT", 0.3)
    first, start = process.process, time.monotonic()
    with pytest.raises(RenderError):
        process.render("[" * 150_000)
    assert time.monotonic() - start < 5 and first.poll() is not None
    assert process.render("*a*")["open"] == "<p><em>a</em></p>\n"
    process.close()


def test_a_text_nested_too_deeply_is_refused_and_not_cut():
    process = Renderer()
    assert "deep" in process.render("> " * 40 + "deep")["open"]
    for text in ("> " * 500 + "deep", "- " * 100 + "deep", "\n".join("  " * i + "- deep" for i in range(200))):
        with pytest.raises(RenderError):
            process.render(text)
    assert process.process.poll() is None
    process.close()


@pytest.fixture(scope="module")
def server():
    server = ScriptedServer(api_key="secret")
    yield server
    server.stop()


def post(server, body, **headers):
    connection = http.client.HTTPConnection(server.url.split("/")[2], timeout=60)
    connection.request("POST", "/render", body, {"Content-Type": "application/json", "Authorization": "Bearer secret", **headers})
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def test_the_route_renders_with_the_key_only(server):
    status, rendered = post(server, json.dumps(dict(text="# a\n\n\U0001f642\n\nb\n")))
    assert 0 < rendered.pop("seconds") < 3
    assert (status, rendered) == (200, dict(done="<h2>a</h2>\n<p>\U0001f642</p>\n", open="<p>b</p>\n", length=9))
    assert post(server, "{}", Authorization="Bearer no")[0] == 401


@pytest.mark.parametrize("body, status", [
    ('{"text": 1}', 400), ("{}", 400), ("[]", 400), ("{", 400), (b"\xff", 400), ('{"text": "\\ud800"}', 400), ('{"text": null}', 400),
    (json.dumps(dict(text="a" * (renderer.MAX_TEXT + 1))), 400), (json.dumps(dict(text="> " * 500)), 422)])
def test_the_route_refuses(server, body, status):
    answer = post(server, body)
    assert answer[0] == status and "text" in answer[1]["error"]["message"] or answer[1]["error"]["message"].startswith("the body")


def test_other_content_types_are_refused(server):
    assert post(server, '{"text": "a"}', **{"Content-Type": "text/plain"})[0] == 415


def test_a_slow_text_holds_no_other_route(server):
    slow = threading.Thread(target=post, args=(server, json.dumps(dict(text="[" * 150_000))))
    slow.start()
    time.sleep(0.3)
    start = time.monotonic()
    connection = http.client.HTTPConnection(server.url.split("/")[2], timeout=60)
    connection.request("GET", "/")
    assert connection.getresponse().status == 200 and time.monotonic() - start < 1 and slow.is_alive()
    slow.join()
