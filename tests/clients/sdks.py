"""Clients in Python, as their documentation uses them. Runs in an environment that has them: `sdks.py URL NAME...`
does what the names say, and prints `ok NAME` for each. The server calls a tool once and then says what it said.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODEL, QUESTION, THOUGHT, ANSWER = "ensemble", "What is the weather in Rome?", "Hm.", "It is warm."
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather now",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def langchain_loop(url: str) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool  # type: ignore[untyped-decorator]
    def get_weather(city: str) -> str:
        """Weather now"""
        return f"20 degrees in {city}"

    model = ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="none", max_retries=0).bind_tools([get_weather])
    messages: list[Any] = [HumanMessage(QUESTION)]
    made = model.invoke(messages)
    assert [(call["name"], call["args"]) for call in made.tool_calls] == [("get_weather", {"city": "Rome"})]
    call = made.tool_calls[0]
    messages += [made, ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])]
    assert model.invoke(messages).content == ANSWER


def langchain_stream(url: str) -> None:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="none", max_retries=0)
    whole: Any = None
    for chunk in model.bind_tools([TOOL]).stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    assert [(call["name"], call["args"]) for call in whole.tool_calls] == [("get_weather", {"city": "Rome"})]
    assert "".join(chunk.content for chunk in model.stream("tool_response")) == ANSWER


def langchain_responses(url: str) -> None:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="none", max_retries=0, use_responses_api=True)
    made = model.bind_tools([TOOL]).invoke(QUESTION)
    assert [(call["name"], call["args"]) for call in made.tool_calls] == [("get_weather", {"city": "Rome"})]
    assert model.invoke("tool_response").text == ANSWER


def langchain_structured(url: str) -> None:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="none", max_retries=0)
    made = model.with_structured_output(TOOL, method="function_calling").invoke(QUESTION)
    assert made == {"city": "Rome"}


def litellm_loop(url: str) -> None:
    import litellm

    asked: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "none", "tools": [TOOL]}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    made = litellm.completion(messages=messages, **asked)
    (call,) = made.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Rome"})
    assert made.choices[0].message.reasoning_content == THOUGHT
    messages += [made.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "20 degrees"}]
    again = litellm.completion(messages=messages, **asked)
    assert (again.choices[0].message.content, again.choices[0].finish_reason) == (ANSWER, "stop")


def litellm_stream(url: str) -> None:
    import litellm

    asked: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "none", "tools": [TOOL]}
    messages = [{"role": "user", "content": QUESTION}]
    chunks = [*litellm.completion(messages=messages, stream=True, **asked)]
    whole: Any = litellm.stream_chunk_builder(chunks, messages=messages)
    (call,) = whole.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Rome"})
    assert whole.choices[0].message.reasoning_content == THOUGHT


def litellm_anthropic(url: str) -> None:
    import litellm

    asked: dict[str, Any] = {"model": f"anthropic/{MODEL}", "api_base": url, "api_key": "none", "max_tokens": 500}
    messages = [{"role": "user", "content": QUESTION}]
    made = litellm.completion(messages=messages, tools=[TOOL], **asked)
    (call,) = made.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Rome"})


def litellm_ollama(url: str) -> None:
    import litellm

    asked: dict[str, Any] = {"model": f"ollama_chat/{MODEL}", "api_base": url}
    made = litellm.completion(messages=[{"role": "user", "content": "tool_response"}], **asked)
    assert made.choices[0].message.content == ANSWER


def get_weather(city: str) -> str:
    """Weather now

    Args:
        city: where
    """
    return f"20 degrees in {city}"


def openai_stream(url: str) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "tools": [TOOL]}
    with client.chat.completions.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        made: Any = stream.get_final_completion()
    (call,) = made.choices[0].message.tool_calls
    assert "tool_calls.function.arguments.delta" in kinds
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Rome"})


def openai_parse(url: str) -> None:
    import openai
    from pydantic import create_model

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    arguments = create_model("get_weather", city=(str, ...))
    tool = openai.pydantic_function_tool(arguments)
    asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "tools": [tool]}
    made: Any = client.chat.completions.parse(**asked)
    (call,) = made.choices[0].message.tool_calls
    assert call.function.parsed_arguments == arguments(city="Rome")


def openai_responses(url: str) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    assert client.responses.create(model=MODEL, instructions="Be brief.", input="tool_response").output_text == ANSWER
    with client.responses.stream(model=MODEL, input="tool_response") as stream:
        told = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert told == stream.get_final_response().output_text == ANSWER


def anthropic_stream(url: str) -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": "tool_response"}]
    with client.messages.stream(model=MODEL, max_tokens=500, messages=messages) as stream:
        assert "".join(stream.text_stream) == ANSWER
        assert stream.get_final_message().stop_reason == "end_turn"


def anthropic_runner(url: str) -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    tool = anthropic.beta_tool(get_weather)
    messages: Any = [{"role": "user", "content": QUESTION}]
    asked: Any = {"model": MODEL, "max_tokens": 500, "messages": messages, "tools": [tool]}
    *_, last = client.beta.messages.tool_runner(**asked)
    assert [block.text for block in last.content if block.type == "text"] == [ANSWER]


def instructor_model(url: str) -> None:
    import instructor
    import openai
    from pydantic import create_model

    wanted = create_model("get_weather", city=(str, ...))
    plain = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    client = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
    messages = [{"role": "user", "content": QUESTION}]
    assert client.chat.completions.create(model=MODEL, response_model=wanted, messages=messages).city == "Rome"


def instructor_partial(url: str) -> None:
    import instructor
    import openai
    from pydantic import create_model

    wanted = create_model("get_weather", city=(str, ...))
    plain = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": QUESTION}]
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON):
        client = instructor.from_openai(plain, mode=mode)
        asked = client.chat.completions.create_partial(model=MODEL, response_model=wanted, messages=messages)
        cities = [each.city for each in asked]
        assert (cities[0], cities[-1]) == (None, "Rome")
        assert "R" in cities


def pydantic_ai_agent(url: str) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        agent = Agent(kind(MODEL, provider=provider), instructions="Be brief.", tools=[get_weather])
        assert agent.run_sync(QUESTION).output == ANSWER

    async def streamed() -> str:
        async with Agent(OpenAIChatModel(MODEL, provider=provider)).run_stream("tool_response") as run:
            return "".join([text async for text in run.stream_text(delta=True)])

    assert asyncio.run(streamed()) == ANSWER


def pydantic_ai_anthropic(url: str) -> None:
    import anthropic
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    client = anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0)
    agent = Agent(AnthropicModel(MODEL, provider=AnthropicProvider(anthropic_client=client)), tools=[get_weather])
    assert agent.run_sync(QUESTION).output == ANSWER


def openai_agents(url: str) -> None:
    import openai
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )  # fmt: skip

    set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = kind(model=MODEL, openai_client=client)
        agent = Agent(name="weather", instructions="Be brief.", model=model, tools=[function_tool(get_weather)])
        assert Runner.run_sync(agent, QUESTION).final_output == ANSWER


def ollama_loop(url: str) -> None:
    import ollama

    client = ollama.Client(host=url)
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    made = client.chat(MODEL, messages=messages, tools=[get_weather])
    (call,) = made.message.tool_calls or ()
    told = get_weather(**call.function.arguments)
    messages += [made.message, {"role": "tool", "content": told, "tool_name": call.function.name}]
    assert client.chat(MODEL, messages=messages, tools=[get_weather]).message.content == ANSWER
    pieces = client.chat(MODEL, messages=[{"role": "user", "content": "tool_response"}], stream=True)
    assert "".join(piece.message.content or "" for piece in pieces) == ANSWER


def llm_chain(url: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LLM_USER_PATH"] = folder
        models = [{
            "model_id": "served", "model_name": MODEL, "api_base": f"{url}/v1", "supports_tools": True,
        }]  # fmt: skip
        (Path(folder) / "extra-openai-models.yaml").write_text(json.dumps(models))
        import llm

        model = llm.get_model("served")
        assert model.prompt("tool_response").text() == ANSWER
        assert model.chain(QUESTION, tools=[get_weather]).text().endswith(ANSWER)


SCENARIOS: dict[str, Callable[[str], None]] = {
    each.__name__: each
    for each in (
        langchain_loop, langchain_stream, langchain_responses, langchain_structured, litellm_loop, litellm_stream,
        litellm_anthropic, litellm_ollama, openai_stream, openai_parse, openai_responses, anthropic_stream,
        anthropic_runner, instructor_model, instructor_partial, pydantic_ai_agent, pydantic_ai_anthropic,
        openai_agents, ollama_loop, llm_chain,
    )
}  # fmt: skip

if __name__ == "__main__":
    for name in sys.argv[2:]:
        SCENARIOS[name](sys.argv[1])
        print(f"ok {name}", flush=True)
