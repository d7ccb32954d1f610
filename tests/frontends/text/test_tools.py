"""Calls of tools, with the loops of the official clients' examples."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from anthropic import beta_tool

from llmserve.core import FinishReason
from tests.frontends.text.conftest import serving
from tests.frontends.text.talkers import ARGUMENTS, MODEL, TOOLS, WEATHER, Talker, talking

ASKED: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]
CALLED = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
BOTH = f'Let me see.\n{CALLED}\n<tool_call>\n{{"name": "get_time", "arguments": {{}}}}\n</tool_call>'
KINDS = {
    "qwen": CALLED,
    "llama": f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}',
    "plain": f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}',
    "mistral": f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {ARGUMENTS}}}]',
}
RESPONSE_TOOLS: list[Any] = [{"type": "function", "strict": None, **tool["function"]} for tool in TOOLS]
CLAUDES_TIME: Any = {"name": "get_time", "input_schema": {"type": "object", "properties": {}}}
CLAUDES_TOOLS: list[Any] = [{"name": "get_weather", "description": "Weather now", "input_schema": WEATHER}]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talker]:
    with talking(tmp_path_factory.mktemp("qwen"), "qwen") as talker:
        yield talker


@pytest.fixture(scope="module", params=KINDS)
def talker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talker]:
    with talking(tmp_path_factory.mktemp(request.param), request.param) as talker:
        talker.says(KINDS[request.param])
        yield talker


def test_openais_loop(talker: Talker) -> None:
    call_text = talker.engine.portions
    messages = [*ASKED]
    made = talker.openai.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
    assert '"description": "Weather now"' in talker.prompt
    message = made.choices[0].message
    assert (message.content, made.choices[0].finish_reason) == (None, "tool_calls")
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Rome"})
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "20 degrees"}]
    talker.says("It is warm.")
    again = talker.openai.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
    assert (again.choices[0].message.content, again.choices[0].finish_reason) == ("It is warm.", "stop")
    assert ARGUMENTS in talker.prompt
    assert "20 degrees" in talker.prompt
    talker.engine.portions = call_text


def test_a_stream_says_the_name_first_and_then_the_arguments(talker: Talker) -> None:
    chunks = [*talker.openai.chat.completions.create(model=MODEL, messages=ASKED, tools=TOOLS, stream=True)]
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    first, *rest = calls
    assert first.function is not None
    assert (first.index, first.type, first.function.name, first.function.arguments) == (
        0,
        "function",
        "get_weather",
        "",
    )
    assert first.id is not None
    assert first.id.startswith("call_")
    assert all((call.index, call.id, call.type) == (0, None, None) for call in rest)
    pieces = [call.function.arguments or "" for call in rest if call.function is not None]
    assert len(pieces) > 3
    assert json.loads("".join(pieces)) == {"city": "Rome"}
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ""
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_text_and_two_calls(qwen: Talker) -> None:
    qwen.says(BOTH)
    with qwen.openai.chat.completions.stream(model=MODEL, messages=ASKED, tools=TOOLS, n=1) as stream:
        message = stream.get_final_completion().choices[0].message
    whole = qwen.openai.chat.completions.create(model=MODEL, messages=ASKED, tools=TOOLS).choices[0].message
    for found in (message, whole):
        assert found.content == "Let me see."
        calls: Any = found.tool_calls or []
        assert [call.function.name for call in calls] == ["get_weather", "get_time"]
        assert [call.function.arguments for call in calls] == [ARGUMENTS, "{}"]
        assert len({call.id for call in calls}) == 2


def test_a_call_that_is_cut_off_says_so(qwen: Talker) -> None:
    qwen.says(CALLED[:50], FinishReason.LENGTH)
    made = qwen.openai.chat.completions.create(model=MODEL, messages=ASKED, tools=TOOLS).choices[0]
    assert made.finish_reason == "length"
    assert made.message.tool_calls is not None


def test_a_call_that_the_model_left_off_is_none(qwen: Talker) -> None:
    """Whoever runs calls by the reason of the end runs none; where arguments are objects, it is not told at all."""
    begun = '{"city": "Ro'
    qwen.says(f"Let me see.\n{CALLED[: CALLED.index(begun) + len(begun)]}")
    asked: Any = {"model": MODEL, "messages": ASKED, "tools": TOOLS}
    made = qwen.openai.chat.completions.create(**asked).choices[0]
    chunks = [*qwen.openai.chat.completions.create(**asked, stream=True)]
    assert (made.finish_reason, chunks[-1].choices[0].finish_reason) == ("stop", "stop")
    (call,) = made.message.tool_calls or [None]
    assert call is not None
    assert call.type == "function"
    assert call.function.arguments == begun
    again = [*ASKED, made.message, {"role": "tool", "tool_call_id": call.id, "content": "no JSON"}]
    assert qwen.openai.chat.completions.create(**{**asked, "messages": again}).choices
    assert r'"{\"city\": \"Ro"' in qwen.prompt

    claude: Any = {"model": MODEL, "max_tokens": 50, "messages": ASKED, "tools": CLAUDES_TOOLS}
    message = qwen.anthropic.messages.create(**claude)
    assert ([block.type for block in message.content], message.stop_reason) == (["text"], "end_turn")
    with qwen.anthropic.messages.stream(**claude) as stream:
        streamed = stream.get_final_message()
    assert ([block.type for block in streamed.content], streamed.stop_reason) == (["text", "tool_use"], "end_turn")

    ollama = httpx.post(f"{qwen.server.http_url}/api/chat", json={**asked, "stream": False}).json()
    assert (ollama["message"].get("tool_calls"), ollama["message"]["content"]) == (None, "Let me see.")

    response = qwen.openai.responses.create(model=MODEL, input="Weather?", tools=RESPONSE_TOOLS)
    assert [item.status for item in response.output] == ["completed", "incomplete"]  # type: ignore[union-attr]
    with qwen.openai.responses.stream(model=MODEL, input="Weather?", tools=RESPONSE_TOOLS) as events:
        done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.status for item in done] == ["completed", "incomplete"]  # type: ignore[union-attr]
    following = qwen.openai.responses.create(model=MODEL, input="Go on", previous_response_id=response.id)
    assert following.status == "completed"


def test_arguments_may_have_line_breaks_in_their_texts(qwen: Talker) -> None:
    """As models write code, without a guide."""
    qwen.says(CALLED.replace("Rome", "Ro\nme"))
    made = qwen.openai.chat.completions.create(model=MODEL, messages=ASKED, tools=TOOLS).choices[0]
    assert made.finish_reason == "tool_calls"
    claude: Any = {"model": MODEL, "max_tokens": 50, "messages": ASKED, "tools": CLAUDES_TOOLS}
    (block,) = qwen.anthropic.messages.create(**claude).content
    assert block.type == "tool_use"
    assert block.input == {"city": "Ro\nme"}
    again = [*ASKED, made.message, {"role": "tool", "tool_call_id": "1", "content": "20"}]
    qwen.openai.chat.completions.create(model=MODEL, messages=again, tools=TOOLS)
    assert r'{"city": "Ro\nme"}' in qwen.prompt


def test_blocks_come_in_the_order_in_which_they_were_said(qwen: Talker) -> None:
    qwen.says(f"{BOTH}\nDone.")
    claude: Any = {"model": MODEL, "max_tokens": 50, "messages": ASKED, "tools": [*CLAUDES_TOOLS, CLAUDES_TIME]}
    whole = qwen.anthropic.messages.create(**claude)
    with qwen.anthropic.messages.stream(**claude) as stream:
        streamed = stream.get_final_message()
    for found in (whole, streamed):
        assert [block.type for block in found.content] == ["text", "tool_use", "tool_use", "text"]
        assert found.stop_reason == "tool_use"


def test_log_probs_of_a_call(qwen: Talker) -> None:
    qwen.says(CALLED)
    num_tokens = len(qwen.engine.portions)
    asked: Any = {"model": MODEL, "messages": ASKED, "tools": TOOLS, "logprobs": True}
    made = qwen.openai.chat.completions.create(**asked).choices[0]
    chunks = [*qwen.openai.chat.completions.create(**asked, stream=True)]
    assert made.logprobs is not None
    assert len(made.logprobs.content or ()) == num_tokens
    scored = [chunk.choices[0].logprobs for chunk in chunks]
    assert sum(len(each.content or ()) for each in scored if each is not None) == num_tokens
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert "".join(call.function.arguments or "" for call in calls if call.function) == ARGUMENTS


def test_tools_that_are_not_to_be_called_are_not_given_to_the_model(qwen: Talker) -> None:
    qwen.says(CALLED)
    made = qwen.openai.chat.completions.create(model=MODEL, messages=ASKED, tools=TOOLS, tool_choice="none").choices[0]
    assert (made.message.content, made.message.tool_calls) == (CALLED, None)
    assert "get_weather" not in qwen.prompt
    assert qwen.engine.requests[-1].guide is None


@pytest.mark.parametrize(
    ("more", "is_enforced"),
    [
        ({}, False),
        ({"tool_choice": "auto"}, False),
        ({"tool_choice": "required"}, True),
        ({"tool_choice": {"type": "function", "function": {"name": "get_weather"}}}, True),
        ({"parallel_tool_calls": False}, True),
        ({"tools": [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]}, True),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {
                        "mode": "auto", "tools": [{"type": "function", "function": {"name": "get_weather"}}],
                    },
                }
            },
            True,
        ),
    ],
)  # fmt: skip
def test_what_is_enforced(qwen: Talker, more: dict[str, Any], is_enforced: bool) -> None:
    qwen.says(CALLED)
    asked: Any = {"model": MODEL, "messages": ASKED, "tools": TOOLS, **more}
    qwen.openai.chat.completions.create(**asked)
    assert (qwen.engine.requests[-1].guide is not None) == is_enforced


def refused(talker: Talker, path: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(f"{talker.server.http_url}{path}", json={"model": MODEL, **body})
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def function(**more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **more}}


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ({"tools": [function(), function()]}, "tools", "duplicate name 'f'"),
        ({"tools": [function(parameters={"type": "array"})]}, "tools", 'must have the type "object"'),
        ({"tools": [function(parameters={"properties": {"a": {"type": "strng"}}})]}, "tools", "unknown type: 'strng'"),
        ({"tools": [function(parameters={"properties": {"a": 5}})]}, "tools", "have 5 where a schema is expected"),
        ({"tools": [function(parameters={"required": "a"})]}, "tools", "list of names in required"),
        (
            {"tools": [function(strict=True, parameters={"properties": {"a": {"minLength": "x"}}})]},
            None,
            "what tools, response_format or a grammar require cannot be followed: ",
        ),
        (
            {
                "tools": [function(parameters={"properties": {"n": {"$ref": "#"}}, "required": ["n"]})],
                "tool_choice": "required",
            },
            None,
            "every value would be endless, because #/properties/n requires itself",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools.0.type"),
        ({"tools": [function(name="a b")]}, "tools", "tools.0.function.name"),
        ({"tools": [function()], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "'g'"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"functions": [{"name": "f"}]}, "functions", "are deprecated: use tools"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "tool_call_id"),
    ],
)
def test_what_cannot_be_asked(qwen: Talker, more: dict[str, Any], param: str | None, words: str) -> None:
    error = refused(qwen, "/v1/chat/completions", {"messages": ASKED, **more})
    assert error["param"] == param
    assert words in error["message"]


def test_the_loop_of_responses(qwen: Talker) -> None:
    qwen.says(BOTH)
    asked: list[Any] = [*ASKED]
    made = qwen.openai.responses.create(model=MODEL, input=asked, tools=RESPONSE_TOOLS)
    assert [item.type for item in made.output] == ["message", "function_call", "function_call"]
    assert made.status == "completed"
    assert [tool.type for tool in made.tools] == ["function", "function"]
    asked += made.output
    for item in made.output:
        if item.type == "function_call":
            json.loads(item.arguments)
            asked.append({"type": "function_call_output", "call_id": item.call_id, "output": "20 degrees"})
    qwen.says("It is warm.")
    again = qwen.openai.responses.create(model=MODEL, input=asked, tools=RESPONSE_TOOLS)
    assert again.output_text == "It is warm."
    assert qwen.prompt.count("<tool_response>\n20 degrees") == 2
    assert qwen.prompt.count(f"assistant\nLet me see.{CALLED}") == 1


def test_a_stream_of_responses(qwen: Talker) -> None:
    qwen.says(BOTH)
    with qwen.openai.responses.stream(model=MODEL, input=ASKED, tools=RESPONSE_TOOLS) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [item.type for item in final.output] == ["message", "function_call", "function_call"]
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [event.arguments for event in done] == [ARGUMENTS, "{}"]
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == ARGUMENTS + "{}"
    added = [event.item for event in events if event.type == "response.output_item.added"]
    assert [getattr(item, "name", None) for item in added] == [None, "get_weather", "get_time"]


def test_choices_of_responses(qwen: Talker) -> None:
    qwen.says(CALLED)
    choice: Any
    for choice in ("required", {"type": "function", "name": "get_time"}):
        made = qwen.openai.responses.create(model=MODEL, input=ASKED, tools=RESPONSE_TOOLS, tool_choice=choice)
        assert qwen.engine.requests[-1].guide is not None
        assert made.tool_choice == choice or made.tool_choice.model_dump() == choice  # type: ignore[union-attr]
    wrong = {"type": "function", "name": "g"}
    error = refused(qwen, "/v1/responses", {"input": "x", "tools": RESPONSE_TOOLS, "tool_choice": wrong})
    assert (error["param"], error["message"]) == ("tool_choice", "tool_choice: no tool in tools is named 'g'")


def test_anthropics_loop(talker: Talker) -> None:
    call_text = talker.engine.portions
    messages = [*ASKED]
    asked: Any = {"model": MODEL, "max_tokens": 500, "tools": CLAUDES_TOOLS}
    made = talker.anthropic.messages.create(messages=messages, **asked)
    assert made.stop_reason == "tool_use"
    (block,) = made.content
    assert block.type == "tool_use"
    assert (block.name, block.input) == ("get_weather", {"city": "Rome"})
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "20 degrees"}
    messages += [{"role": "assistant", "content": made.content}, {"role": "user", "content": [result]}]
    talker.says("It is warm.")
    again = talker.anthropic.messages.create(messages=messages, **asked)
    assert again.content[0].type == "text"
    assert (again.content[0].text, again.stop_reason) == ("It is warm.", "end_turn")
    assert ARGUMENTS in talker.prompt
    assert "20 degrees" in talker.prompt
    talker.engine.portions = call_text


def test_a_stream_of_anthropics(qwen: Talker) -> None:
    qwen.says(BOTH)
    tools: Any = [*CLAUDES_TOOLS, {"name": "get_time", "input_schema": {"type": "object"}}]
    with qwen.anthropic.messages.stream(model=MODEL, messages=ASKED, max_tokens=500, tools=tools) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["text", "tool_use", "tool_use"]
    assert [block.input for block in final.content if block.type == "tool_use"] == [{"city": "Rome"}, {}]
    assert final.stop_reason == "tool_use"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3


def test_anthropics_own_runner(qwen: Talker) -> None:
    asked: list[str] = []

    @beta_tool
    def get_weather(city: str) -> str:
        """Weather now

        Args:
            city: where
        """
        asked.append(city)
        qwen.says("It is warm.")
        return "20 degrees"

    qwen.says(CALLED)
    runner = qwen.anthropic.beta.messages.tool_runner(model=MODEL, messages=ASKED, max_tokens=500, tools=[get_weather])
    last = runner.until_done()
    assert asked == ["Rome"]
    assert last.content[0].type == "text"
    assert last.content[0].text == "It is warm."


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_a_call_with_what_is_no_json_leaves_anthropics_answers_json(qwen: Talker, number: str) -> None:
    qwen.says(CALLED.replace('"Rome"', number))
    asked: Any = {"model": MODEL, "max_tokens": 500, "tools": CLAUDES_TOOLS, "messages": ASKED}
    answer = httpx.post(f"{qwen.server.http_url}/v1/messages", json=asked)
    found = json.loads(answer.text, parse_constant=pytest.fail)
    assert ([each["type"] for each in found["content"]], found["stop_reason"]) == (["text"], "end_turn")


def test_choices_of_anthropics(qwen: Talker) -> None:
    qwen.says(CALLED)
    asked: Any = {"model": MODEL, "max_tokens": 500, "tools": CLAUDES_TOOLS, "messages": ASKED}
    choice: Any
    for choice, is_enforced in (
        ({"type": "auto"}, False), ({"type": "any"}, True), ({"type": "tool", "name": "get_weather"}, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, True), ({"type": "none"}, False),
    ):  # fmt: skip
        qwen.anthropic.messages.create(**asked, tool_choice=choice)
        assert (qwen.engine.requests[-1].guide is not None) == is_enforced
    error = refused(qwen, "/v1/messages", {**asked, "tool_choice": {"type": "tool", "name": "g"}})
    assert error == {"type": "invalid_request_error", "message": "tool_choice: no tool in tools is named 'g'"}
    counted = qwen.anthropic.messages.count_tokens(model=MODEL, messages=ASKED, tools=CLAUDES_TOOLS)
    assert counted.input_tokens > qwen.anthropic.messages.count_tokens(model=MODEL, messages=ASKED).input_tokens


def test_a_model_without_a_form_of_calls(text_dir: Path) -> None:
    with (
        serving(text_dir, preprocessing={"tool_format": "none"}) as server,
        openai.OpenAI(base_url=f"{server.http_url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.BadRequestError, match="tools are not supported by model 'ensemble'") as caught,
    ):
        client.chat.completions.create(model=MODEL, messages=ASKED, tools=TOOLS)
    assert caught.value.param == "tools"


def test_tokens_of_tools_are_counted(qwen: Talker) -> None:
    body = {"messages": ASKED, "tools": TOOLS}
    made = httpx.post(f"{qwen.server.http_url}/tokenize", json=body).json()
    qwen.says("x")
    qwen.openai.chat.completions.create(model=MODEL, messages=ASKED, tools=TOOLS)
    assert made["tokens"] == list(qwen.engine.requests[-1].prompt_ids)


def test_bad_words_reach_the_engine(qwen: Talker) -> None:
    qwen.says("x")
    more: Any = {"extra_body": {"bad_words": ["fox", "dog"]}}
    qwen.openai.chat.completions.create(model=MODEL, messages=ASKED, **more)
    assert len(qwen.engine.requests[-1].bad_ids) >= 2
    qwen.openai.completions.create(model=MODEL, prompt="x", **more)
    assert len(qwen.engine.requests[-1].bad_ids) >= 2
