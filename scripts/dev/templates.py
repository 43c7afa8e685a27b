"""Compare our rendering of chat templates with the installed transformers'.

    python scripts/dev/templates.py FOLDER         # *.jinja, *.gguf and tokenizer_config.json in it

Each template renders the chats below, with several settings. A line for each difference: another
text, or an error on one side only. Status 1 if there is one.
"""

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[2]))

from gpt_faster.text.chat_template import render

CALL = dict(id="abcdefghi", type="function",
            function=dict(name="weather", arguments=dict(city="Zürich <b>", days=3, deep=[None])))
TOOLS = [dict(type="function", function=dict(
    name=name, description="It's \"the\" weather é <b>", parameters=dict(
        type="object", required=["city"], properties=dict(
            city=dict(type="string", description="A city"),
            days=dict(type="integer", enum=[1, 2, 3]),
            deep=dict(type="array", items=dict(type="number"))))))
    for name in ("weather", "forecast")]


def user(text):
    return dict(role="user", content=text)


def assistant(text, **more):
    return dict(role="assistant", content=text, **more)


SYSTEM = dict(role="system", content="Be brief. é <|im_end|>")
RESULT = dict(role="tool", name="weather", tool_call_id="abcdefghi", content='{"t": 20}')
CHATS = {
    "one": [user("Hi & <bye>")],
    "system": [SYSTEM, user("Hi"), assistant("Yo"), user("  Well?\n")],
    "developer": [dict(role="developer", content="Be brief."), user("Hi")],
    "parts": [user([dict(type="text", text="Hi"), dict(type="text", text=" there")])],
    "call": [user("Weather?"), assistant("", tool_calls=[CALL]), RESULT],
    "called": [SYSTEM, user("Weather?"), assistant("I look.", tool_calls=[CALL]), RESULT,
               assistant("20 degrees."), user("Thanks")],
    "two calls": [user("Weather?"), assistant(None, tool_calls=[CALL, CALL]), RESULT, RESULT],
    "thoughts": [user("2+2?"), assistant("4", reasoning_content="I add."), user("And 3+3?")],
    "thoughts last": [user("2+2?"), assistant("4", reasoning_content="I add.")],
    "thinking": [user("2+2?"), assistant("4", thinking="I add."), user("And 3+3?")],
    "thoughts and a call": [user("Weather?"), assistant(
        "", reasoning_content="I look.", tool_calls=[CALL]), RESULT],
    "in the text": [user("2+2?"), assistant("<think>\nI add.\n</think>\n\n4"), user("And?")],
    "empty": [user("")],
    "none": [],
}
SETTINGS = [dict(), dict(enable_thinking=False), dict(enable_thinking=True, thinking=True),
            dict(tools=TOOLS), dict(tools=TOOLS, enable_thinking=True, reasoning_effort="high"),
            dict(add_generation_prompt=False),
            dict(continue_final_message=True, add_generation_prompt=False),
            dict(documents=[dict(title="T", text="A text", contents="A text")])]
NAMES = dict(bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>")


def is_compared(chat: str, settings: dict) -> bool:
    """The server joins parts to a string, and continues nothing else."""
    return chat != "parts" or "continue_final_message" not in settings


def templates(folder: Path) -> dict[str, str]:
    """name -> template."""
    found = {path.name: path.read_text(encoding="utf-8")
             for path in sorted(folder.rglob("*.jinja"))}
    for path in sorted(folder.rglob("tokenizer_config.json")):
        value = json.loads(path.read_text(encoding="utf-8")).get("chat_template")
        for i, entry in enumerate(value if isinstance(value, list) else [value] if value else []):
            template = entry["template"] if isinstance(entry, dict) else entry
            found[f"{path.parent.name}-{i}"] = template
    for path in sorted(folder.rglob("*.gguf")):
        from gguf import GGUFReader
        for name, entry in GGUFReader(path).fields.items():
            if name.startswith("tokenizer.chat_template"):
                found[f"{path.name}-{name}"] = entry.contents()
    return found


def theirs(template: str, messages: list[dict], settings: dict) -> tuple[str, str]:
    """-> "text" and the rendered text, or "error" and its first line."""
    from transformers.utils import chat_template_utils as reference
    settings = dict(add_generation_prompt=True) | settings
    try:
        messages = [{key: value for key, value in message.items() if value is not None}
                    for message in messages]       # as apply_chat_template does
        [text], _ = reference.render_jinja_template([messages], chat_template=template, **NAMES,
                                                    **settings)
        return "text", text
    except Exception as e:
        return "error", str(e).splitlines()[0] if str(e) else type(e).__name__


def ours(template: str, messages: list[dict], settings: dict) -> tuple[str, str]:
    try:
        tokenizer = SimpleNamespace(chat_template=template, tool_template=None, names=NAMES)
        return "text", render(tokenizer, messages, **settings)
    except ValueError as e:
        return "error", str(e)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    n_same = n_error = n_different = 0
    found = templates(args.folder)
    for name, template in found.items():
        for chat, messages in CHATS.items():
            for settings in SETTINGS:
                if not is_compared(chat, settings):
                    continue
                expected = theirs(template, messages, settings)
                got = ours(template, messages, settings)
                fails = expected[0] == got[0] == "error"
                n_error += fails
                if expected == got or fails:
                    n_same += 1
                    continue
                n_different += 1
                at = next((i for i, (a, b) in enumerate(zip(expected[1], got[1])) if a != b), 0)
                print(f"{name}: {chat}, {list(settings)}: expected {expected[0]} "
                      f"{expected[1][max(0, at - 30):at + 60]!r}, got {got[0]} "
                      f"{got[1][max(0, at - 30):at + 60]!r}")
    print(f"{len(found)} templates: {n_same} of {n_same + n_different} renderings are equal "
          f"({n_error} of them an error in both)")
    return 1 if n_different else 0


if __name__ == "__main__":
    sys.exit(main())
