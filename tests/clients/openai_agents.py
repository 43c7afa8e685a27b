"""openai-agents: the default (responses) model and the chat model; tools, a handoff, an output type, a stream."""

import agents
import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
)
from agents.agent import StopAtTools
from steps import ASK, MODEL, QUESTIONS, TOO_LONG, Trip, main, raises_async, step

agents.set_tracing_disabled(True)                      # else it sends to api.openai.com
MODELS = {"responses": lambda name=MODEL: OpenAIResponsesModel(name, openai.AsyncOpenAI()),
          "chat": lambda name=MODEL: OpenAIChatCompletionsModel(name, openai.AsyncOpenAI())}


@function_tool
def book(trip: Trip, urgent: bool = False) -> str:
    """Book a trip."""
    return f"booked {len(trip.places)}"


async def conversation(model):
    agent, items = Agent("one", instructions="Answer in one word.", model=model), []
    for question in QUESTIONS:
        items.append({"role": "user", "content": question})
        result = await Runner.run(agent, items)
        assert result.final_output and result.context_wrapper.usage.total_tokens > 0
        items = result.to_input_list()


async def stream(model):
    result = Runner.run_streamed(Agent("one", model=model), QUESTIONS[0])
    deltas = [event.data.delta async for event in result.stream_events()
              if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"]
    assert "".join(deltas) == result.final_output


async def tool_loop(model):
    """A forced call; for the turn after it the agent resets the choice, and a small model may talk on."""
    agent = Agent("one", model=model, tools=[book], model_settings=ModelSettings(tool_choice="required", max_tokens=100))
    result = await Runner.run(agent, ASK, max_turns=4)
    assert any(item.type == "tool_call_output_item" and "booked" in item.output for item in result.new_items), result.new_items
    named = ModelSettings(tool_choice="book", parallel_tool_calls=False)
    again = Agent("two", model=model, tools=[book], model_settings=named, tool_use_behavior=StopAtTools(stop_at_tool_names=["book"]))
    assert (await Runner.run(again, result.to_input_list() + [{"role": "user", "content": ASK}])).final_output.startswith("booked")


async def handoff(model):
    second = Agent("second", instructions="Answer in one word.", model=model)
    first = Agent("first", model=model, handoffs=[second], model_settings=ModelSettings(tool_choice="transfer_to_second", max_tokens=100))
    result = await Runner.run(first, QUESTIONS[0], max_turns=4)
    assert result.last_agent is second and result.final_output


async def structured(model):
    result = await Runner.run(Agent("one", model=model, output_type=Trip), ASK)
    assert isinstance(result.final_output, Trip)


async def errors(model, other):
    await raises_async(openai.NotFoundError, Runner.run(Agent("one", model=other), "Hello"), "gpt-9")
    await raises_async(openai.BadRequestError, Runner.run(Agent("one", model=model), TOO_LONG), "tokens")


@step("responses", "chat")
async def the_default_model():
    assert (await Runner.run(Agent("one", model=MODEL), QUESTIONS[0])).final_output


for api, model in MODELS.items():
    step(api, "chat")(lambda model=model: conversation(model())).__name__ = "a_conversation_with_usage"
    step(api, "stream")(lambda model=model: stream(model())).__name__ = "a_stream"
    step(api, "tools")(lambda model=model: tool_loop(model())).__name__ = "a_tool_loop"
    step(api, "tools")(lambda model=model: handoff(model())).__name__ = "a_handoff"
    step(api, "structured")(lambda model=model: structured(model())).__name__ = "an_output_type"
    step(api, "errors")(lambda model=model: errors(model(), model("gpt-9"))).__name__ = "a_wrong_name_and_a_long_prompt"

main("openai-agents", "openai-agents")
