"""The environment of chat templates offers what the installed transformers' does: each construct renders alike."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import ROOT

from gpt_faster.text import chat_template
from gpt_faster.text.chat_template import render

sys.path.insert(0, str(ROOT / "scripts/dev"))
import templates as reference  # noqa: E402

MESSAGES = [dict(role="user", content="Hi é <b> & 'x'"), dict(role="assistant", content="Yo", reasoning_content="I think")]
TOOL = reference.TOOLS[0]
CONSTRUCTS = """
{{ x | tojson }}
{{ x | tojson(ensure_ascii=False) }}
{{ x | tojson(ensure_ascii=True) }}
{{ x | tojson(True) }}
{{ x | tojson(False, 2) }}
{{ x | tojson(False, None, (',', ':'), True) }}
{{ x | tojson(indent=4) }}
{{ x | tojson(indent='\t') }}
{{ x | tojson(separators=(',', ':'), sort_keys=True) }}
{{ x | tojson(indent=2, separators=(',', ' : '), sort_keys=true, ensure_ascii=true) }}
{{ missing | tojson }}
{{ x | tojson(no_such=1) }}
{{ missing | default(12845056) }} {{ '' | default(99999999999, true) }} {{ missing | d(12845056) }}
{{ 'x' | int(12845056) }} {{ 'x' | float(12845056.5) }} {{ [1, 2] | sum(start=12845056) }} {{ [12845056, 3] | max }}
{{ [2000000, 4] | select('gt', 1048577) | list }} {{ x.keys() | first | replace('b', '1', 12845056) }} {{ 'a b' | truncate(12845056) }}
{{ 'abc'.find('c', -12845056) }} {{ 'a b'.split(' ', 12845056) }} {{ 'aa'.replace('a', 'b', 99999999) }} {{ [1, 2].index(2, 0, 99999999) }}
{{ '{}'.format(12845056) }} {{ '%d' % 12845056 }} {{ 'id 12345678 %s' % 'x' }} {{ '{} 12345678'.format(3) }} {{ "%s" | format(99999999) }}
{{ (12845056).bit_length() }} {{ 12845056 | filesizeformat }} {{ 12845056 | string | length }} {{ range(3, 2000000, 1999990) | list }}
{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 5 %}{% break %}{% endif %}{{ i }}{% else %}none{% endfor %}
{% generation %}{% set y = 3 %}{{ y }}{% endgeneration %}{{ y is defined }}
{%- for m in messages -%}{%- generation -%}{{ m.content }}{{ loop.index }}{%- endgeneration -%}{%- endfor -%}
{{ strftime_now('%Y') | length }} {{ strftime_now('%d %b %Y') | length > 8 }}
{{ raise_exception('no: ' + messages[0].content) }}
{% if x %}
  yes
{% endif %}
   {% set z = 1 %}
{{ z }}
{{ missing }}|{{ missing is defined }}|{{ missing is none }}|{{ x.missing is undefined }}|{{ x['no'] is defined }}
{{ missing.deeper }}
{{ missing + 'x' }}
{{ none + 'x' }}
{{ missing[0] }}
{{ missing == none }} {{ not missing }} {{ missing | length }} {% for y in missing %}{% else %}empty{% endfor %}
{{ none | default('d') }} {{ none | trim }} {{ 3 | trim }}
{{ x is mapping }} {{ x is iterable }} {{ x is sequence }} {{ 'a' is string }} {{ 3 is number }} {{ true is boolean }} {{ 3 is integer }} {{ 3.0 is float }} {{ [] is sequence }} {{ none is none }} {{ 3 is odd }} {{ 4 is divisibleby 2 }} {{ 'a' in x }} {{ 3 is in [3] }} {{ x is callable }} {{ 'a' is eq 'a' }} {{ true is true }} {{ 1 is true }} {{ 'tojson' is filter }} {{ 'odd' is test }}
{{ x | items | list }} {{ x.items() | list }} {{ x | dictsort }} {{ messages | map(attribute='role') | join(', ') }} {{ messages | selectattr('role', 'equalto', 'user') | list | length }} {{ messages | rejectattr('role', 'eq', 'user') | map(attribute='content') | first }}
{{ messages | groupby('role') | map('first') | list }} {{ [3, 1, 2] | sort(reverse=true) }} {{ [1, 1] | unique | list }} {{ 'a-b' | upper | title | capitalize | lower }} {{ ' a ' | trim }}{{ 'x' | indent(4, true) }}{{ [1, 2, 3] | batch(2) | list }}{{ [1, 2, 3] | slice(2) | list }} {{ 'ab' | list }} {{ 'ab' | reverse }} {{ 3.7 | round }} {{ -3 | abs }} {{ '<b>' | e }} {{ '<b>' | safe }} {{ 'a b' | urlencode }} {{ 'a b c' | wordcount }} {{ '<i>x</i>' | striptags }} {{ {'a': 1} | xmlattr }} {{ 'word ' * 3 | wordwrap(5) }} {{ x | pprint }} {{ 'b' | center(9) }} {{ x | attr('keys') is callable }} {{ messages | last | string }}
{% set ns = namespace(a=1, b=[]) %}{% for m in messages %}{% set ns.a = ns.a + 1 %}{% set ns.b = ns.b + [m.role] %}{% endfor %}{{ ns.a }}{{ ns.b }}
{% macro f(a, b=2, **kwargs) %}{{ a }}{{ b }}{{ kwargs }}{{ caller() if caller else '' }}{% endmacro %}{{ f(1, c=3) }}{% call f(1) %}body{% endcall %}
{{ dict(a=1, b=2) }} {{ dict(x, z=3) }} {{ dict.fromkeys(['a']) }} {{ cycler('a', 'b').next() }} {% set j = joiner(',') %}{{ j() }}{{ j() }} {{ range(3) | list }} {{ lipsum(1, false, 3, 4) | length > 3 }}
{% set c %}block {{ 1 }}{% endset %}{{ c }} {% filter upper %}x{% endfilter %} {% with a = 3 %}{{ a }}{% endwith %} {% raw %}{{ x }}{% endraw %} {# comment #}
{{ messages.append(1) }}
{{ x.update(a=1) }}
{{ x.pop('a') }}
{{ ''.__class__ }}
{{ messages[0].__class__.__mro__ }}
{% set m = messages[0] %}{% do m %}
{% set m.role = 'x' %}
{{ messages[::-1] | length }} {{ messages[1:] | length }} {{ messages[-1].content[:1] }} {{ messages[0]['content'][2:] }}
{{ loop }} {% for m in messages %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.cycle('a', 'b') }}{{ loop.previtem is defined }}{{ loop.nextitem is defined }}{{ loop.changed(m.role) }}{{ loop.depth }}{% endfor %}
{% for k, v in x.items() recursive %}{{ k }}{% endfor %} {% for a in 'abc' if a != 'b' %}{{ loop.index }}{{ a }}{% endfor %}
{{ 7 // 2 }} {{ 7 % 3 }} {{ 2 ** 5 }} {{ 7 / 2 }} {{ 'a' ~ 1 ~ none }} {{ 'a' * 3 }} {{ 1 if missing else 2 }} {{ 1 if false }} {{ 'é' | length }}
{{ 'a' 'b' }} {{ "x\\n" }} {{ '\\u00e9' }} {{ 'abc'.startswith(('a', 'b')) }} {{ ' a '.strip() }} {{ 'a,b'.split(',')[-1] }} {{ 'A'.lower() }} {{ 'a'.rjust(3) }} {{ '{:>4}'.format('b') }} {{ '%05.1f' % 2.5 }} {{ 'ab'.encode('utf-8') | string }}
{{ messages[1].reasoning_content }} {{ messages[1].thinking }} {{ messages[1].reasoning is defined }} {{ messages[0].thinking is defined }}
{{ bos_token }}{{ eos_token }} {{ sep_token is defined }} {{ tools is none }} {{ documents is none }} {{ add_generation_prompt }} {{ custom }}
{% include 'x' %}
{% import 'x' as y %}
{% extends 'x' %}
{{ gettext('x') }}
{% trans %}x{% endtrans %}
{{ _('x') }}
{{ x | nosuchfilter }}
{{ x is nosuchtest }}
{{ nosuchfunction() }}
{{ 1 / 0 }}
""".strip("\n").split("\n{{ ")
CONSTRUCTS = [CONSTRUCTS[0], *("{{ " + text for text in CONSTRUCTS[1:])]


@pytest.mark.parametrize("template", CONSTRUCTS)
def test_a_construct_renders_as_in_transformers(template):
    pytest.importorskip("transformers")
    settings = dict(x={"b": "é <b> ' \"", "a": [1, None, {"ü": True}]}, custom=12845056)
    expected, got = reference.theirs(template, MESSAGES, settings), reference.ours(template, MESSAGES, settings)
    assert expected[0] == got[0] and (expected == got or expected[0] == "error"), (expected, got)


def test_names_are_transformers():
    """Filters, tests, globals, extensions and white space settings: none is missing, none has another value."""
    pytest.importorskip("transformers")
    from transformers.utils import chat_template_utils
    theirs = chat_template_utils._compile_jinja_template("x").environment
    ours = chat_template._compiled("x").environment
    for kind in ("filters", "tests", "globals"):
        assert set(getattr(theirs, kind)) <= set(getattr(ours, kind)), kind
    for name in ("trim_blocks", "lstrip_blocks", "keep_trailing_newline", "newline_sequence", "undefined", "autoescape",
                 "block_start_string", "variable_start_string", "line_statement_prefix", "finalize"):
        assert getattr(theirs, name) == getattr(ours, name), name
    tags = [{tag for e in env.extensions.values() for tag in e.tags} for env in (theirs, ours)]
    assert tags[0] == tags[1]


@pytest.mark.parametrize("settings", reference.SETTINGS, ids=str)
def test_a_template_with_tools_and_thoughts(settings):
    pytest.importorskip("transformers")
    template = Path(__file__).with_name("tools_and_thoughts.jinja").read_text()
    for name, messages in reference.CHATS.items():
        if not reference.is_compared(name, settings):
            continue
        expected, got = reference.theirs(template, messages, settings), reference.ours(template, messages, settings)
        assert expected[0] == got[0] and (expected == got or expected[0] == "error"), (name, expected, got)


@pytest.mark.parametrize("template", [
    "{{ 'a'.center(12845056) }}", "{{ 'a' | indent(12845056) }}", "{{ [1] | batch(12845056, 0) | list }}", "{{ x | tojson(indent=12845056) }}",
    "{{ x | tojson(False, 12845056) }}", "{{ '%*d' % (12845056, 1) }}", "{{ '{:{}}'.format(1, 12845056) }}", "{{ '{:{x[0]}}'.format(1, x=[12845056]) }}",
    "{{ '{:{w}}'.format_map({'w': 12845056, '': 1}) }}", "{{ '%12845056d' % 1 }}", "{{ '{:12845056}'.format(1) }}", "{{ (5).to_bytes(12845056, 'big') | string }}",
    "{{ 5 | round(12845056) }}", "{{ lipsum(99, false, 20, 99999) }}"])
def test_a_size_has_a_limit(template):
    with pytest.raises(ValueError, match="with a number above|too large a width|too long a text"):
        render(SimpleNamespace(tool_template=None, chat_template=template, names={}), MESSAGES, x=[1])


def test_a_long_conversation_renders():
    messages = [dict(role="user", content="word " * 1_000_000)]
    text = render(SimpleNamespace(tool_template=None, chat_template="{{ messages[0].content | trim }}{{ messages | tojson | length }}", names={}), messages)
    assert len(text) > 4_999_999
