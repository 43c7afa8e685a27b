"""What a chat takes as a message: text that begins with "/", pasted blocks, several lines; and how an answer ended."""

import os
import re
from types import SimpleNamespace

import pytest
from test_chat import HELP, Talk, assistant, terminal, user  # noqa: F401

from gpt_faster.cli import chat
from gpt_faster.text.reasoning import AnswerDetokenizer


@pytest.mark.parametrize("text", [
    "/etc/passwd: what is in it?", "/usr is full, why?", "/ is the root", "/2 + 3", "/s", "/r/python", "/translate this text", "/***/",
    "/\u00e9t\u00e9", "/helpless", "/system\nis a line of many", "/save\tx\nand y", " /stats", "What does /stats do?"])
def test_text_that_begins_with_a_slash_is_sent(text, monkeypatch):
    talk = Talk(monkeypatch, [text])
    if text == "/ is the root":                            # a command of its own, "/"
        assert talk.notes[1:] == [HELP]
    else:
        assert talk.said[0] == text and talk.notes[1:] == []


@pytest.mark.parametrize("command", chat.COMMANDS)
def test_two_slashes_send_what_looks_like_a_command(command, monkeypatch):
    talk = Talk(monkeypatch, [f"/{command} x", "//", "///x"])
    assert talk.said[::2] == [f"{command} x", "/", "//x"] and talk.notes[1:] == []


@pytest.mark.parametrize("text, name", [("/sytem You are terse", "/system"), ("/stat", "/stats"), ("/quit", None), ("/clea", "/clear"), ("/exi", "/exit"),
                                        ("/hlep", "/help"), ("/Save x", "/save"), ("/reset", None)])
def test_a_misspelt_command_is_named_and_not_sent(text, name, monkeypatch):
    talk = Talk(monkeypatch, [text, "/" + text])
    if name is None:
        assert talk.said[0] == text
        return
    assert talk.notes[1:] == [f"no command {text.split()[0]}, did you mean {name}? Begin with // to send it as a message"]
    assert talk.said[0] == text


@pytest.mark.parametrize("lines, message", [
    (['"""', "a", "", "/stats", '"""'], "a\n\n/stats"), (['"""a', 'b"""'], "a\nb"), (['"""a"""'], "a"), (['"""', "  a", '  b  """  '], "  a\n  b  "),
    (['"""', "never closed", EOFError], "never closed"),
    ([f"{chat.PASTE_START}a", "", "/exit", f"b{chat.PASTE_END} c"], "a\n\n/exit\nb c"), ([f"x {chat.PASTE_START}a{chat.PASTE_END}"], "x a"),
    ([f"{chat.PASTE_START}/save x", f"b{chat.PASTE_END}"], "/save x\nb"), (["a\nb\n"], "a\nb\n")])
def test_several_lines_are_one_message(lines, message, monkeypatch):
    talk = Talk(monkeypatch, lines)
    assert talk.said == [message, "Yo"] and talk.notes[1:] == []


def test_ctrl_c_leaves_a_begun_block(monkeypatch):
    talk = Talk(monkeypatch, ['"""', "a", KeyboardInterrupt, "b"])
    assert talk.said == ["b", "Yo"]


@pytest.mark.parametrize("n, note", [(3, "(cut off after 3 tokens: --max_new_tokens)"), (2, "(cut off: the context of 9 tokens is full; "
                                     "/clear starts over, --max_seq_length sets its size)")])
def test_a_cut_answer_names_what_cut_it(n, note, monkeypatch):
    talk = Talk(monkeypatch, [], max_new=3)
    row = SimpleNamespace(ids=[1] * n, text="Yo", finish_reason="length")
    talk.chat.answer = lambda ids, n_cached: (row, "")
    talk.chat.turn("Hi")
    assert talk.notes[1:] == [note]


@pytest.mark.parametrize("template, key", [("{{ m.reasoning_content }}", "reasoning_content"), ("{{ m.thinking }}", "thinking"), ("{{ m.content }}", None)])
def test_the_next_turn_gets_the_answer_and_what_the_template_reads(template, key, monkeypatch):
    class Row(SimpleNamespace):
        detokenizer = AnswerDetokenizer.__new__(AnswerDetokenizer)
    Row.detokenizer.thoughts = "Hm."
    talk = Talk(monkeypatch, [])
    talk.chat.thoughts_key = chat.thoughts_key(template)
    talk.chat.answer = lambda ids, n_cached: (Row(ids=[1, 2], text="Yo", finish_reason="stop"), "")
    talk.chat.turn("Hi")
    assert talk.chat.messages == [user("Hi"), {**assistant("Yo"), **({key: "Hm."} if key else {})}]


def test_a_block_pasted_into_a_terminal_is_one_message(terminal):  # noqa: F811
    terminal.until(r"(?m)^> $")
    os.write(terminal.fd, b"\x1b[200~Remember:\n/exit\n\nthe word is tree.\x1b[201~")
    terminal.until("tree\\.")
    os.write(terminal.fd, b" Say ok.\n")
    terminal.until("Say ok\\.")                   # before it, the pasted lines are drawn anew, with a prompt
    assert terminal.until(r"(?m)^> $").strip()
    assert re.match("2 messages, ", terminal.say("/stats"))
    assert terminal.say('"""\nOne\ntwo\n"""') is not None
    assert re.search("4 messages, ", terminal.say("/stats"))
