"""llm: its command line with extra-openai-models.yaml; a conversation, a stream, tools and a schema."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

from steps import ASK, BASE_URL, KEY, MODEL, QUESTIONS, TOO_LONG, Trip, main, step

FOLDER = tempfile.TemporaryDirectory()
os.environ.update(LLM_USER_PATH=FOLDER.name, OPENAI_API_KEY=KEY)
Path(FOLDER.name, "extra-openai-models.yaml").write_text("".join(f"""
- model_id: {name}
  model_name: {model}
  api_base: {BASE_URL}
  supports_tools: true
  supports_schema: true
""" for name, model in (("ours", MODEL), ("wrong", "gpt-9"))))
FUNCTION = '''
def book(city: str) -> str:
    "Book a trip."
    return "booked"
'''


def llm(*arguments, fails=False):
    done = subprocess.run(["llm", *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert (done.returncode != 0) == fails, done.stderr[-600:]
    return done.stderr if fails else done.stdout.strip()


@step("chat", "chat")
def a_conversation_with_usage():
    assert llm("-m", "ours", "--no-stream", "-s", "Answer in one word.", QUESTIONS[0])
    for question in QUESTIONS[1:]:
        assert llm("-c", "--no-stream", question)
    logged = json.loads(llm("logs", "--json", "-n", "1"))
    assert logged[0]["input_tokens"] > 0 < logged[0]["output_tokens"]


@step("chat", "stream")
def a_stream():
    assert llm("-m", "ours", QUESTIONS[0])


@step("chat", "tools")
def tools():
    """The model decides whether it calls one; there is no option that forces it."""
    assert llm("-m", "ours", "--functions", FUNCTION, "--chain-limit", "2", ASK) is not None


@step("chat", "structured")
def a_nested_and_recursive_schema():
    Trip.model_validate_json(llm("-m", "ours", "--no-stream", "--schema", json.dumps(Trip.model_json_schema()), ASK))
    Trip.model_validate_json(llm("-m", "ours", "--schema", json.dumps(Trip.model_json_schema()), ASK))


@step("chat", "errors")
def a_wrong_name_and_a_long_prompt():
    assert "gpt-9" in llm("-m", "wrong", "Hello", fails=True)
    assert "tokens" in llm("-m", "ours", TOO_LONG, fails=True)


main("llm", "llm")
