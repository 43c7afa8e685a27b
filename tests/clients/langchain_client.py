"""LangChain: ChatOpenAI (chat and responses), ChatAnthropic and create_agent."""

import anthropic
import openai
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from steps import ASK, MODEL, QUESTIONS, TOO_LONG, Trip, main, raises, step

chat = ChatOpenAI(model=MODEL)
responses = ChatOpenAI(model=MODEL, use_responses_api=True)
messages = ChatAnthropic(model=MODEL)
APIS = {"chat": chat, "responses": responses, "messages": messages}


@tool
def book(trip: Trip, urgent: bool = False) -> str:
    """Book a trip."""
    return "booked"


def conversation(model):
    history = [SystemMessage("Answer in one word.")]
    for question in QUESTIONS:
        history.append(HumanMessage(question))
        answer = model.invoke(history)
        assert answer.text and answer.usage_metadata["total_tokens"] > 0
        history.append(answer)


def stream(model):
    chunks = list(model.stream(QUESTIONS[0]))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.text and (model is chat or whole.usage_metadata["output_tokens"] > 0)     # stream_usage is off beside a base URL


def tool_loop(model):
    history = [HumanMessage(ASK)]
    for choice in ("any", "book"):
        answer = model.bind_tools([book], tool_choice=choice).invoke(history)
        call = answer.tool_calls[0]
        Trip.model_validate(call["args"]["trip"])
        result = book.invoke(call)
        assert isinstance(result, ToolMessage) and result.content == "booked"
        history += [answer, result]
    history.append(HumanMessage(QUESTIONS[0]))
    assert model.invoke(history).text


def structured(model, *methods):
    for method in methods:
        assert isinstance(model.with_structured_output(Trip, method=method).invoke(ASK), Trip), method


def errors(model, not_found, bad_request):
    wrong = type(model)(model="gpt-9")
    raises(not_found, lambda: wrong.invoke("Hello"), "gpt-9")
    raises(bad_request, lambda: model.invoke(TOO_LONG), "tokens")


for api, model in APIS.items():
    step(api, "chat")(lambda model=model: conversation(model)).__name__ = "a_conversation_with_usage"
    step(api, "stream")(lambda model=model: stream(model)).__name__ = "a_stream"
    step(api, "tools")(lambda model=model: tool_loop(model)).__name__ = "a_tool_loop"


@step("chat", "structured")
def with_structured_output():
    structured(chat, "json_schema", "function_calling")
    try:                                               # any object, which a small model may not end
        content = chat.with_structured_output(Trip, method="json_mode", include_raw=True).invoke(ASK)["raw"].content
    except openai.LengthFinishReasonError as e:
        content = e.completion.choices[0].message.content
    assert content.startswith("{")


@step("responses", "structured")
def with_structured_output_by_responses():
    structured(responses, "json_schema", "function_calling")


@step("messages", "structured")
def with_structured_output_by_messages():
    structured(messages, "json_schema", "function_calling")


@step("chat", "errors")
def a_wrong_name_and_a_long_prompt():
    errors(chat, openai.NotFoundError, openai.BadRequestError)


@step("messages", "errors")
def a_wrong_name_and_a_long_prompt_by_messages():
    errors(messages, anthropic.NotFoundError, anthropic.BadRequestError)


@step("chat", "structured")
def an_agent_with_a_structured_answer():
    agent = create_agent(model=chat, tools=[], response_format=Trip)
    result = agent.invoke({"messages": [HumanMessage(ASK)]}, {"recursion_limit": 8})
    assert isinstance(result["structured_response"], Trip)


main("langchain-openai", "langchain-openai")
