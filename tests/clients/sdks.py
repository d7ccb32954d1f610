"""LangChain and LiteLLM, as their documentation uses them. Runs in an environment that has them: `sdks.py URL NAME...`
does what the names say, and prints `ok NAME` for each. The server calls a tool once and then says what it said.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
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


SCENARIOS: dict[str, Callable[[str], None]] = {
    each.__name__: each
    for each in (
        langchain_loop, langchain_stream, langchain_responses, langchain_structured, litellm_loop, litellm_stream,
        litellm_anthropic, litellm_ollama,
    )
}  # fmt: skip

if __name__ == "__main__":
    for name in sys.argv[2:]:
        SCENARIOS[name](sys.argv[1])
        print(f"ok {name}", flush=True)
