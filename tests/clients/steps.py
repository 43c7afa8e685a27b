"""What every client's script shares: the server's address, how a step is reported, and the nested types.

    python tests/clients/openai_python.py http://127.0.0.1:8000     # one JSON line for each step
"""

import asyncio
import importlib.metadata
import inspect
import json
import os
import sys
import time
import traceback
import urllib.request
from enum import Enum
from typing import Optional

from pydantic import BaseModel, Field

SERVER = sys.argv[1].rstrip("/")
BASE_URL = SERVER + "/v1"
KEY = os.environ.get("GPT_FASTER_API_KEY", "none")
os.environ.update(OPENAI_BASE_URL=BASE_URL, OPENAI_API_KEY=KEY, ANTHROPIC_BASE_URL=SERVER, ANTHROPIC_API_KEY=KEY)

with urllib.request.urlopen(urllib.request.Request(BASE_URL + "/models", headers={"Authorization": "Bearer " + KEY})) as answer:
    MODEL = json.load(answer)["data"][0]["id"]
TOO_LONG = "The boats turned slowly on their ropes. " * 600         # more tokens than the server's slots have


class Unit(str, Enum):
    celsius = "celsius"
    fahrenheit = "fahrenheit"


class Place(BaseModel):
    city: str = Field(max_length=12)
    unit: Unit


class Trip(BaseModel):
    """A trip to one or two places, and the trip after it."""

    places: list[Place] = Field(min_length=1, max_length=2)
    days: int | None = Field(None, ge=1, le=9)
    then: Optional["Trip"] = None


# A model of 135M parameters repeats an object; asked to invent one it does not end.
ASK = 'Repeat: {"places": [{"city": "Oslo", "unit": "celsius"}], "days": 2, "then": null}'
QUESTIONS = "What is the capital of France?", "And of Italy?", "And of Spain?"


STEPS = []


def step(api: str, column: str):
    """A step of this script: the API that it uses (chat, responses, messages, completions) and its column in docs/clients.md."""
    def add(function):
        STEPS.append((api, column, function))
        return function
    return add


def raises(kind, call, *names):
    """The call raises the client's exception, whose text has one of the names."""
    try:
        call()
    except kind as e:
        assert any(name in str(e) for name in names), f"{type(e).__name__}: {e}"
        return
    raise AssertionError(f"no {kind}")


async def raises_async(kind, awaitable, *names):
    try:
        await awaitable
    except kind as e:
        assert any(name in str(e) for name in names), f"{type(e).__name__}: {e}"
        return
    raise AssertionError(f"no {kind}")


def main(client: str, package: str) -> None:
    """Run the steps in their order; arguments after the address choose some by name."""
    print(json.dumps(dict(client=client, version=importlib.metadata.version(package))), flush=True)
    for api, column, function in STEPS:
        if sys.argv[2:] and not any(name in f"{api} {column} {function.__name__}" for name in sys.argv[2:]):
            continue
        line, start = dict(api=api, column=column, step=function.__name__), time.monotonic()
        try:
            result = function()
            if inspect.isawaitable(result):
                asyncio.run(result)
            line["ok"] = True
        except BaseException as e:
            where = traceback.extract_tb(e.__traceback__)
            own = [frame for frame in where if frame.filename == sys.argv[0] or "clients" in os.path.dirname(frame.filename)[-8:]]
            line.update(ok=False, line=own[-1].lineno if own else None, error=f"{type(e).__name__}: {e}"[:1500])
        print(json.dumps(dict(line, seconds=round(time.monotonic() - start, 1))), flush=True)
