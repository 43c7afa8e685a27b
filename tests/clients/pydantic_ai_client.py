"""pydantic-ai: text, nested output types, tools, streams, with OpenAIChatModel and OpenAIResponsesModel."""

from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.exceptions import ModelHTTPError, UsageLimitExceeded
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.usage import UsageLimits
from steps import ASK, MODEL, QUESTIONS, TOO_LONG, Trip, main, raises, step


def conversation(model):
    agent, history = Agent(model, instructions="Answer in one word."), []
    for question in QUESTIONS:
        result = agent.run_sync(question, message_history=history)
        assert result.output and result.usage.output_tokens > 0
        history = result.all_messages()


async def stream(model):
    async with Agent(model).run_stream(QUESTIONS[0]) as result:
        texts = [text async for text in result.stream_text()]
    assert texts[-1] and result.usage.output_tokens > 0


def tool_loop(model):
    """The model must call a tool, `book` or the output's; a small one may book until the limit of requests."""
    booked = []
    agent = Agent(model, output_type=ToolOutput(Trip, name="answer"))

    @agent.tool_plain
    def book(trip: Trip, urgent: bool = False) -> str:
        """Book a trip."""
        booked.append(trip)
        return "booked"

    try:
        result = agent.run_sync(ASK, usage_limits=UsageLimits(request_limit=3))
        assert isinstance(result.output, Trip)
    except UsageLimitExceeded:
        assert len(booked) == 3


def structured(model):
    for output in (Trip, NativeOutput(Trip)):
        assert isinstance(Agent(model, output_type=output, retries=0).run_sync(ASK).output, Trip), output


def errors(model, other):
    raises(ModelHTTPError, lambda: Agent(other).run_sync("Hello"), "gpt-9")
    raises(ModelHTTPError, lambda: Agent(model).run_sync(TOO_LONG), "tokens")


for api, kind in (("chat", OpenAIChatModel), ("responses", OpenAIResponsesModel)):
    step(api, "chat")(lambda kind=kind: conversation(kind(MODEL))).__name__ = "a_conversation_with_usage"
    step(api, "stream")(lambda kind=kind: stream(kind(MODEL))).__name__ = "a_stream"
    step(api, "tools")(lambda kind=kind: tool_loop(kind(MODEL))).__name__ = "an_agent_with_a_tool"
    step(api, "structured")(lambda kind=kind: structured(kind(MODEL))).__name__ = "output_types"
    step(api, "errors")(lambda kind=kind: errors(kind(MODEL), kind("gpt-9"))).__name__ = "a_wrong_name_and_a_long_prompt"

main("pydantic-ai", "pydantic-ai-slim")
