"""Models that think before they answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from llmserve.frontends.shared.text_settings import TextSettings
from tests.frontends.text.talkers import MODEL, TOOLS, Talker, talking

ASKED: list[Any] = [{"role": "user", "content": "2 + 2?"}]
THOUGHT, ANSWER = "Two and two\nis four.", "Four."
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.fixture(scope="module", params=["qwen3", "r1"])
def thinker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talker]:
    with talking(tmp_path_factory.mktemp(request.param), request.param) as talker:
        begin = "<think>\n" if request.param == "qwen3" else ""
        talker.says(f"{begin}{THOUGHT}\n</think>\n\n{ANSWER}")
        yield talker


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talker]:
    with talking(tmp_path_factory.mktemp("qwen3"), "qwen3") as talker:
        yield talker


def num_tokens(talker: Talker) -> int:
    return len(talker.tokenizer.encode(THOUGHT))


def test_chat(thinker: Talker) -> None:
    made = thinker.openai.chat.completions.create(model=MODEL, messages=ASKED)
    message: Any = made.choices[0].message
    assert (message.content, message.reasoning_content, message.reasoning) == (ANSWER, THOUGHT, THOUGHT)
    assert made.usage is not None
    assert made.usage.completion_tokens_details is not None
    assert made.usage.completion_tokens_details.reasoning_tokens == num_tokens(thinker)


def test_a_message_switches_thoughts_off(tmp_path: Path) -> None:
    """As in Nemotron Nano 2, whose prompts open a thought otherwise."""
    with talking(tmp_path, "nemotron") as talker:
        talker.says(ANSWER)
        asked: list[Any] = [{"role": "system", "content": "/no_think"}, *ASKED]
        message: Any = talker.openai.chat.completions.create(model=MODEL, messages=asked).choices[0].message
    assert (message.content, getattr(message, "reasoning_content", None)) == (ANSWER, None)


def test_a_streamed_chat(thinker: Talker) -> None:
    asked: Any = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = [*thinker.openai.chat.completions.create(model=MODEL, messages=ASKED, **asked)]
    deltas: list[Any] = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    for name in ("reasoning_content", "reasoning"):
        assert "".join(getattr(delta, name, None) or "" for delta in deltas) == THOUGHT
    assert "".join(delta.content or "" for delta in deltas) == ANSWER
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == num_tokens(thinker)


def test_responses(thinker: Talker) -> None:
    made = thinker.openai.responses.create(model=MODEL, input=ASKED)
    assert [item.type for item in made.output] == ["reasoning", "message"]
    assert made.output_text == ANSWER
    first = made.output[0]
    assert first.type == "reasoning"
    assert [part.text for part in first.content or ()] == [THOUGHT]
    assert made.usage is not None
    assert made.usage.output_tokens_details.reasoning_tokens == num_tokens(thinker)
    again: Any = [*ASKED, *made.output, {"role": "user", "content": "And 3?"}]
    assert thinker.openai.responses.create(model=MODEL, input=again).output_text == ANSWER
    with thinker.openai.responses.stream(model=MODEL, input=ASKED) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message"]
    pieces = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(pieces) == THOUGHT


def test_anthropics_messages(thinker: Talker) -> None:
    asked: Any = {"model": MODEL, "messages": ASKED, "max_tokens": 500}
    made = thinker.anthropic.messages.create(**asked)
    with thinker.anthropic.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for message in (made, streamed):
        blocks: Any = message.content
        thought, answer = blocks
        assert (thought.type, answer.type) == ("thinking", "text")
        assert (thought.thinking, answer.text, message.stop_reason) == (THOUGHT, ANSWER, "end_turn")
        assert message.usage.output_tokens_details is not None
        assert message.usage.output_tokens_details.thinking_tokens == num_tokens(thinker)
    again: Any = [*ASKED, {"role": "assistant", "content": made.content}, {"role": "user", "content": "And 3?"}]
    thinker.anthropic.messages.create(**{**asked, "messages": again})


def test_thoughts_can_be_switched_off_where_the_template_can(qwen3: Talker) -> None:
    qwen3.says(ANSWER)
    asked: Any
    for asked in (
        {"reasoning_effort": "none"},
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
    ):
        made = qwen3.openai.chat.completions.create(model=MODEL, messages=ASKED, **asked)
        assert made.choices[0].message.content == ANSWER
        assert qwen3.prompt.endswith("<think>\n\n</think>\n\n")
    qwen3.anthropic.messages.create(model=MODEL, messages=ASKED, max_tokens=50, thinking={"type": "disabled"})
    assert qwen3.prompt.endswith("<think>\n\n</think>\n\n")
    qwen3.anthropic.messages.create(model=MODEL, messages=ASKED, max_tokens=50, thinking={"type": "adaptive"})
    assert qwen3.prompt.endswith("assistant\n")
    with pytest.raises(openai.BadRequestError, match="does not support this effort"):
        qwen3.openai.chat.completions.create(model=MODEL, messages=ASKED, reasoning_effort="low")


def test_the_switch_of_thoughts_may_have_another_name(tmp_path: Path) -> None:
    """In Granite 3.3, which does not think unless it is told to."""
    with talking(tmp_path, "granite") as talker:
        talker.says(f"<think>{THOUGHT}</think>\n<response>{ANSWER}</response>")
        asked: Any = {"model": MODEL, "messages": ASKED, "max_tokens": 90}
        message = talker.anthropic.messages.create(**asked, thinking={"type": "adaptive"})
        assert [block.type for block in message.content] == ["thinking", "text"]
        assert talker.prompt.startswith("Write thoughts")
        assert getattr(message.content[1], "text", "") == ANSWER
        talker.anthropic.messages.create(**asked, thinking={"type": "disabled"})
        assert not talker.prompt.startswith("Write thoughts")


def test_an_effort_that_a_template_does_not_know_is_to_think(tmp_path: Path) -> None:
    with talking(tmp_path, "qwen3", TextSettings()) as talker:
        talker.says(f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}")
        asked = {"model": MODEL, "messages": ASKED, "reasoning_effort": "medium"}
        answer = httpx.post(f"{talker.server.http_url}/v1/chat/completions", json=asked, timeout=60).json()
        assert answer["warning"] == "reasoning_effort 'medium': reasoning is only on or off"
        assert answer["choices"][0]["message"]["content"] == ANSWER
        assert talker.prompt.endswith("assistant\n")


def test_what_cannot_be_asked_of_thoughts(thinker: Talker, http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", json={"model": MODEL, "messages": ASKED, "reasoning_effort": "low"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "reasoning_effort")
    budget = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2048}
    answer = httpx.post(f"{thinker.server.http_url}/v1/messages", json={"model": MODEL, "messages": ASKED, **budget})
    assert answer.status_code == 400
    assert "thinking budgets are not supported" in answer.json()["error"]["message"]


def test_a_format_holds_for_what_follows_the_thought(qwen3: Talker) -> None:
    qwen3.says(f"<think>\n{THOUGHT}\n</think>\n\n" + '{"n": 4}')
    form: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    made = qwen3.openai.chat.completions.create(model=MODEL, messages=ASKED, response_format=form)
    assert json.loads(made.choices[0].message.content or "") == {"n": 4}
    follow(qwen3)


def follow(talker: Talker) -> None:
    """What the engine has answered is what the guide of the last request allows."""
    guide = talker.engine.requests[-1].guide
    assert guide is not None
    matcher = guide.start()
    for (token,) in talker.engine.portions:
        assert matcher.mask(())[token // 8] >> token % 8 & 1
        matcher.advance(token)
    assert matcher.is_complete()


def test_a_choice_is_made_after_the_thought(thinker: Talker) -> None:
    choice: Any = {"structured_outputs": {"choice": [ANSWER, "Five."]}}
    made = thinker.openai.chat.completions.create(model=MODEL, messages=ASKED, extra_body=choice)
    assert made.choices[0].message.content == ANSWER
    follow(thinker)


def test_thoughts_and_calls(qwen3: Talker) -> None:
    qwen3.says(f'<think>\n{THOUGHT}\n</think>\n\n<tool_call>\n{{"name": "get_time", "arguments": {{}}}}\n</tool_call>')
    message: Any = qwen3.openai.chat.completions.create(model=MODEL, messages=ASKED, tools=TOOLS).choices[0].message
    assert (message.content, message.reasoning_content) == (None, THOUGHT)
    assert message.tool_calls[0].function.name == "get_time"


def test_an_answer_that_is_continued_is_text(thinker: Talker) -> None:
    before = thinker.engine.portions
    thinker.says("<think> is a tag")
    talk: Any = [*ASKED, {"role": "assistant", "content": "So: "}]
    made = thinker.openai.chat.completions.create(model=MODEL, messages=talk)
    assert made.choices[0].message.content == "<think> is a tag"
    thinker.engine.portions = before
