"""Ollama's routes with its official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest

from llmserve.core import FinishReason
from llmserve.frontends.shared.text_settings import TextSettings
from llmserve.stages.tokenizer import Tokenizer
from tests.frontends.server import RunningServer
from tests.frontends.text.conftest import expected_text, serving
from tests.frontends.text.talkers import MODEL, TOOLS, Talker, talking
from tests.frontends.text.test_chat import prompt_ids

ASKED: list[Any] = [{"role": "user", "content": "fox"}]
GREEDY = {"temperature": 0, "num_predict": 12}
CALLED = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture(scope="module")
def llama(served: RunningServer) -> Iterator[ollama.Client]:
    with ollama.Client(host=served.http_url) as client:
        yield client


@pytest.fixture(scope="module")
def thinker(qwen3: Talker) -> Iterator[Any]:
    with ollama.Client(host=qwen3.server.http_url) as client:
        yield client


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talker]:
    with talking(tmp_path_factory.mktemp("qwen3"), "qwen3") as talker:
        yield talker


def test_a_chat(llama: ollama.Client, tokenizer: Tokenizer) -> None:
    made = llama.chat(model=MODEL, messages=ASKED, options=GREEDY)
    ids = prompt_ids(tokenizer)
    assert made.message.content == expected_text(tokenizer, ids, 12)
    assert (made.done, made.done_reason) == (True, "length")
    assert (made.prompt_eval_count, made.eval_count) == (len(ids), 12)
    assert (made.total_duration or 0) > 0


def test_a_streamed_chat(llama: ollama.Client, tokenizer: Tokenizer) -> None:
    parts = [*llama.chat(model=f"{MODEL}:latest", messages=ASKED, options=GREEDY, stream=True)]
    assert "".join(part.message.content or "" for part in parts) == expected_text(tokenizer, prompt_ids(tokenizer), 12)
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == 12


@pytest.mark.parametrize("served_name", ["org/bar:latest", "org/bar"])
def test_a_name_may_end_with_latest_or_not(text_dir: Path, served_name: str) -> None:
    with (
        serving(text_dir, text=TextSettings(served_names=(served_name,))) as server,
        ollama.Client(host=server.http_url) as client,
    ):
        for name in ("org/bar", "org/bar:latest"):
            assert client.chat(model=name, messages=ASKED, options=GREEDY).model == name
            assert client.show(name).capabilities == ["completion"]
            assert client.generate(model=name, prompt="fox", options={**GREEDY, "repeat_last_n": 64}).response
        with pytest.raises(ollama.ResponseError, match=r"The model 'org/baz' does not exist"):
            client.show("org/baz")


def test_a_seed_of_minus_one_is_none(llama: ollama.Client) -> None:
    drawn = {"temperature": 2, "num_predict": 30, "seed": -1}
    made = [llama.generate(model=MODEL, prompt="fox", options=drawn).response for _ in range(2)]
    assert made[0] != made[1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["chat", "generate"])
def test_the_time_of_the_prompt_is_told(llama: ollama.Client, path: str, stream: bool) -> None:
    what: Any = {"messages": ASKED} if path == "chat" else {"prompt": "fox"}
    made: Any = getattr(llama, path)(model=MODEL, options=GREEDY, stream=stream, **what)
    last = [*made][-1] if stream else made
    assert last.prompt_eval_duration > 0
    assert last.eval_duration > 0
    assert last.prompt_eval_duration + last.eval_duration <= last.total_duration


@pytest.mark.parametrize(
    ("keep_alive", "reason"),
    [(None, "load"), (-1, "load"), ("5m", "load"), (0, "unload"), (0.0, "unload"), ("0s", "unload")],
)
def test_a_model_is_loaded_or_unloaded(llama: ollama.Client, keep_alive: Any, reason: str) -> None:
    assert llama.chat(model=MODEL, messages=[], keep_alive=keep_alive).done_reason == reason
    assert llama.generate(model=MODEL, keep_alive=keep_alive).done_reason == reason


def test_lines_are_json(served: RunningServer) -> None:
    body = {"model": MODEL, "messages": ASKED, "options": GREEDY}
    answer = httpx.post(f"{served.http_url}/api/chat", json=body)
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert [json.loads(line)["model"] for line in answer.text.splitlines()][:1] == [MODEL]


def test_a_text(llama: ollama.Client, tokenizer: Tokenizer) -> None:
    made = llama.generate(model=MODEL, prompt="fox", system="small", options=GREEDY)
    assert made.response == expected_text(tokenizer, prompt_ids(tokenizer, system="small"), 12)
    raw = llama.generate(model=MODEL, prompt="fox", raw=True, options=GREEDY)
    assert raw.response == expected_text(tokenizer, tokenizer.encode("fox"), 12)
    parts = llama.generate(model=MODEL, prompt="fox", raw=True, options=GREEDY, stream=True)
    assert "".join(part.response or "" for part in parts) == raw.response


def test_what_there_is(llama: ollama.Client, thinker: Any, served: RunningServer) -> None:
    assert [model.model for model in llama.list().models] == [MODEL]
    assert llama.show(MODEL).capabilities == ["completion"]
    assert thinker.show(MODEL).capabilities == ["completion", "tools", "thinking"]
    assert httpx.get(f"{served.http_url}/api/version").json()["version"]


def test_a_format_is_a_guide(qwen3: Talker, thinker: Any) -> None:
    qwen3.says("{}")
    form: Any
    for form in ("json", {"type": "object"}):
        made = thinker.chat(model=MODEL, messages=ASKED, format=form)
        assert made.message.content == "{}"
        assert qwen3.engine.requests[-1].guide is not None


@pytest.mark.parametrize("stream", [True, False])
def test_thoughts_and_calls(qwen3: Talker, thinker: Any, stream: bool) -> None:
    qwen3.says(f"<think>\nHm.\n</think>\n\nWell.\n{CALLED}")
    made: Any = thinker.chat(model=MODEL, messages=ASKED, tools=TOOLS, think=True, stream=stream)
    messages = [part.message for part in made] if stream else [made.message]
    assert "".join(message.thinking or "" for message in messages) == "Hm."
    assert "".join(message.content or "" for message in messages) == "Well."
    (call,) = [call for message in messages for call in message.tool_calls or ()]
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Rome"})


def test_the_loop_of_its_examples(qwen3: Talker, thinker: Any) -> None:
    def get_weather(city: str) -> str:
        """Weather now

        Args:
            city: where
        """
        return f"20 degrees in {city}"

    messages: list[Any] = [*ASKED]
    qwen3.says(CALLED)
    made = thinker.chat(model=MODEL, messages=messages, tools=[get_weather])
    messages.append(made.message)
    for call in made.message.tool_calls or ():
        result = get_weather(**call.function.arguments)
        messages.append({"role": "tool", "content": result, "tool_name": call.function.name})
    qwen3.says("It is warm.", FinishReason.END_ID)
    assert thinker.chat(model=MODEL, messages=messages, tools=[get_weather]).message.content == "It is warm."
    assert "20 degrees in Rome" in qwen3.prompt
    assert CALLED in qwen3.prompt


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"options": {"mirostat": 1}}, "mirostat is not supported"),
        ({"options": {"num_predict": 0}}, "num_predict"),
        ({"options": {"unknown": 1}}, "options.unknown: unknown field"),
        ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "images are not supported"),
        ({"model": "llama3"}, "does not exist"),
        ({"think": True}, "think 'on': this model's chat template does not reason"),
    ],
)
def test_what_is_refused(served: RunningServer, more: dict[str, Any], words: str) -> None:
    answer = httpx.post(f"{served.http_url}/api/chat", json={"model": MODEL, "messages": ASKED, **more})
    assert answer.status_code in (400, 404)
    assert answer.json().keys() == {"error"}
    assert words in answer.json()["error"]


def test_options_about_loading_change_nothing(llama: ollama.Client) -> None:
    made = llama.chat(model=MODEL, messages=ASKED, options={**GREEDY, "num_ctx": 4096, "num_gpu": 1}, keep_alive="5m")
    assert made.message.content == llama.chat(model=MODEL, messages=ASKED, options=GREEDY).message.content


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["chat", "generate"])
def test_log_probs(llama: ollama.Client, path: str, stream: bool) -> None:
    what: Any = {"messages": ASKED} if path == "chat" else {"prompt": "fox"}
    made: Any = getattr(llama, path)(model=MODEL, options=GREEDY, logprobs=True, top_logprobs=2, stream=stream, **what)
    parts = [*made] if stream else [made]
    tokens = [token for part in parts for token in part.logprobs or ()]
    assert len(tokens) == 12
    assert all(token.logprob <= 0 and len(token.top_logprobs) == 2 for token in tokens)
    told: Any = getattr(llama, path)(model=MODEL, options=GREEDY, **what)
    assert not told.logprobs
