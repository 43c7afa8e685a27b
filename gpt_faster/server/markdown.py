r"""Markdown -> HTML for the chat page, in a process of its own (server/renderer.py).

It owns the dialect and the HTML; the page owns the styles. It knows no HTTP and no model. The text
is a model's: raw HTML stays text, links have a known protocol, and images become links. Formulas
stay as written.

    render("# Title\n\n- a\n- b")       # Rendered(done="<h2>Title</h2>\n", open="<ul>…", length=9)
"""

import json
import os
import re
import signal
import sys
import time
from functools import cache, lru_cache
from html import escape
from typing import NamedTuple

import pygments
from markdown_it import MarkdownIt
from mdit_py_plugins.gfm_autolink import gfm_autolink_plugin
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

MAX_NESTING = 100                                  # markdown-it drops what is nested deeper
PROTOCOLS = re.compile(r"(?:https?|mailto|tel|xmpp):", re.I)
MATH_ENDS = {"$$": "$$", r"\[": r"\]"}             # of a formula on lines of its own
MAX_MATH_LINES = 100
INLINE_MATH = re.compile(r"""
      \\\( .{1,2000}? \\\)                         # \(x\)
    | \\\[ .{1,2000}? \\\]                         # \[x\]
    | \$\$ [^$]{1,2000} \$\$                       # $$x$$
    | \$ (?! [\s$] | \d[\d.,]*\s+[a-zA-Z(*] ) [^$\n]{1,500} (?<![\s\\]) \$ (?!\d)  # $x$, no price
    """, re.S | re.X)


class Rendered(NamedTuple):
    """HTML in two parts: top-level blocks that more text cannot change, and the rest.

    length: how much of the text the first part is, in UTF-16 units, as JavaScript counts.
    """

    done: str
    open: str
    length: int


def render(text: str) -> Rendered:
    r"""Render what has come of an answer; its line ends are \n. The next call may omit the part
    that is done, so that a long answer costs linear time. ValueError if it is nested too deeply.
    """
    md, env = parser(), {}
    tokens = md.parse(text, env)
    if any(token.level >= MAX_NESTING - 2 for token in tokens):
        raise ValueError("nested too deeply")
    first_open_line = last_block_line(text)
    n_done = len(tokens)
    for i, token in enumerate(tokens):
        if token.level == 0 and token.map and token.map[0] >= first_open_line:
            n_done = i
            break
    done = "".join(line + "\n" for line in text.split("\n")[:first_open_line])
    return Rendered(md.renderer.render(tokens[:n_done], md.options, env),
                    md.renderer.render(tokens[n_done:], md.options, env),
                    len(done.encode("utf-16-le")) // 2)


def last_block_line(text: str) -> int:
    """The line where the last top-level block of the complete lines starts: only this block can
    still grow. The line that is still being written may yet become part of it, or not."""
    md = parser()
    tokens = []
    md.block.parse(text[:text.rfind("\n") + 1], md, {}, tokens)
    return max((token.map[0] for token in tokens if token.level == 0 and token.map), default=0)


# ---- The dialect --------------------------------------------------------------------------------

class PageMarkdown(MarkdownIt):
    def validateLink(self, url: str) -> bool:
        """Links without a protocol would be the server's own paths."""
        return bool(PROTOCOLS.match(url))


@cache
def parser() -> MarkdownIt:
    """CommonMark with GitHub's tables, strikethrough, task lists and bare links. A line break in a
    paragraph is one in the HTML too, as models mean it."""
    md = PageMarkdown("commonmark", dict(html=False, breaks=True, tasklists=True,
                                         maxNesting=MAX_NESTING))
    md.enable(["table", "strikethrough"])
    md.use(gfm_autolink_plugin)
    md.inline.ruler.before("escape", "math", inline_math)
    md.block.ruler.before("fence", "math", block_math,
                          dict(alt=["paragraph", "reference", "blockquote", "list"]))
    md.core.ruler.push("for_page", adapt)
    for name, rule in dict(fence=code_block, code_block=code_block, image=image_link,
                           math_inline=math_text, math_block=math_text, table_open=table_open,
                           table_close=table_close).items():
        md.add_render_rule(name, rule)
    return md


def inline_math(state, silent: bool) -> bool:
    """A formula within a line: Markdown would read its backslashes, asterisks and underscores."""
    match = INLINE_MATH.match(state.src, state.pos, state.posMax)
    if not match:
        return False
    if not silent:
        state.push("math_inline", "", 0).content = match[0]
    state.pos = match.end()
    return True


def block_math(state, start: int, end: int, silent: bool) -> bool:
    """A formula on lines of its own, none of them blank: they may look like lists or headings. The
    text may end within it, as while it streams."""
    def text_of(line):
        return state.src[state.bMarks[line] + state.tShift[line]:state.eMarks[line]].rstrip()

    opening, first = text_of(start)[:2], text_of(start)[2:]
    if opening not in MATH_ENDS or state.is_code_block(start):
        return False
    line, indent = start, min(state.blkIndent, state.sCount[start])
    while not (first if line == start else text_of(line)).endswith(MATH_ENDS[opening]):
        line += 1
        if line == end and not first:
            line -= 1
            break
        if (line == end or line == start + MAX_MATH_LINES or not text_of(line)
                or state.sCount[line] < indent):
            return False
    if not silent:
        token = state.push("math_block", "", 0)
        token.content = state.getLines(start, line + 1, state.blkIndent, False).strip()
        token.map = [start, line + 1]
        state.line = line + 1
    return True


def adapt(state) -> None:
    """Headings start below the page's own; the page's policy forbids style attributes; links open
    a new tab."""
    for token in state.tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{min(6, int(token.tag[1]) + 1)}"
        if "style" in token.attrs:                 # of table cells: text-align:right
            token.attrs["class"] = token.attrs.pop("style").removeprefix("text-align:")
        for child in token.children or ():
            if child.type == "link_open":
                child.attrs.update(LINK)


# ---- HTML ---------------------------------------------------------------------------------------

LINK = dict(target="_blank", rel="noopener noreferrer nofollow")
FORMATTER = HtmlFormatter(nowrap=True)             # <span class="k">: classes, no styles


def code_block(self, tokens, i, options, env) -> str:
    words = tokens[i].info.split()
    name = words[0] if words else ""
    return (f'<div class="code"><div class="bar"><span>{escape(name[:40])}</span>'
            '<button type="button" class="copy-code">Copy</button></div>'
            f"<pre><code>{highlight(tokens[i].content, name)}</code></pre></div>\n")


@lru_cache(256)
def highlight(code: str, name: str) -> str:
    """HTML whose text is exactly the code, whatever its lexer does."""
    lexer = find_lexer(name)
    if lexer is None:
        return escape(code)
    tokens = list(lexer.get_tokens(code))
    if "".join(text for _, text in tokens) != code:
        return escape(code)
    html = pygments.format(tokens, FORMATTER)      # ends with a line end
    return html if code.endswith("\n") else html.removesuffix("\n")


@lru_cache(256)
def find_lexer(name: str):
    try:
        return get_lexer_by_name(name, stripnl=False, ensurenl=False) if name else None
    except ClassNotFound:
        return None


def image_link(self, tokens, i, options, env) -> str:
    """A link: the page loads nothing from other hosts."""
    alt = escape(self.renderInlineAsText(tokens[i].children, options, env) or "image")
    if sum(token.nesting for token in tokens[:i] if token.type.startswith("link_")):
        return alt                                 # within a link
    attrs = "".join(f' {name}="{value}"' for name, value in LINK.items())
    return f'<a href="{escape(tokens[i].attrs["src"])}"{attrs}>{alt}</a>'


def math_text(self, tokens, i, options, env) -> str:
    tag = "div" if tokens[i].type == "math_block" else "span"
    return f'<{tag} class="math">{escape(tokens[i].content)}</{tag}>'


def table_open(self, tokens, i, options, env) -> str:
    return '<div class="wide"><table>\n'


def table_close(self, tokens, i, options, env) -> str:
    return "</table></div>\n"


def main() -> None:
    """Answer lines of JSON until standard input ends, as it does when the server ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(10)                                    # the model comes first
    for line in sys.stdin:
        start = time.process_time()
        try:
            reply = render(json.loads(line))._asdict()
            reply["seconds"] = time.process_time() - start     # the page paces itself by them
        except Exception:                          # any lexer's: the page shows the text
            reply = None
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
