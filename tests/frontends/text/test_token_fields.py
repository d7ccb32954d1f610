"""What vLLM's and llama.cpp's clients ask of an answer's tokens, and how prompts and answers begin and end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from llmserve.stages.tokenizer import Tokenizer
from tests.frontends.server import RunningServer
from tests.frontends.text.conftest import expected_ids, expected_text, serving
from tests.frontends.text.talkers import talking

MODEL = "ensemble"
MESSAGES: list[Any] = [{"role": "user", "content": "Hello"}]
BEGUN: list[Any] = [*MESSAGES, {"role": "assistant", "content": "Hi, I "}]
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 8}
CHAT: dict[str, Any] = {**GREEDY, "messages": MESSAGES}
COMPLETION: dict[str, Any] = {**GREEDY, "prompt": "Hello"}
PATHS = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}


def asked(http: httpx.Client, path: str, **fields: Any) -> dict[str, Any]:
    answer = http.post(path, json={**PATHS[path], **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def text_of(choice: dict[str, Any]) -> str:
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


@pytest.mark.parametrize("path", PATHS)
def test_ids_of_prompt_and_answer(http: httpx.Client, path: str, tokenizer: Tokenizer) -> None:
    answer = asked(http, path, return_token_ids=True)
    (choice,) = answer["choices"]
    prompt = (choice if path == "/v1/completions" else answer)["prompt_token_ids"]
    assert choice["token_ids"] == expected_ids(prompt, 8)
    assert text_of(choice) == tokenizer.decode(choice["token_ids"])
    other = asked(http, path)
    assert other["choices"][0]["token_ids"] is None
    place = other["choices"][0] if path == "/v1/completions" else other
    assert (place["prompt_token_ids"], place["prompt_logprobs"]) == (None, None)


def test_streams_have_the_ids_too(client: openai.OpenAI, http: httpx.Client) -> None:
    whole = asked(http, "/v1/chat/completions", return_token_ids=True)
    chunks = [*client.chat.completions.create(**CHAT, stream=True, extra_body={"return_token_ids": True})]
    assert [each for each in (getattr(chunk, "prompt_token_ids", None) for chunk in chunks) if each] == [
        whole["prompt_token_ids"]
    ]
    ids = [token for chunk in chunks for token in getattr(chunk.choices[0], "token_ids", [])]
    assert ids == whole["choices"][0]["token_ids"]
    text = asked(http, "/v1/completions", return_token_ids=True)["choices"][0]
    parts = [*client.completions.create(**COMPLETION, stream=True, extra_body={"return_token_ids": True})]
    assert [token for part in parts for token in getattr(part.choices[0], "token_ids", [])] == text["token_ids"]
    assert getattr(parts[0].choices[0], "prompt_token_ids", None) == text["prompt_token_ids"]


@pytest.mark.parametrize("path", PATHS)
def test_log_probs_of_a_prompt(http: httpx.Client, path: str, tokenizer: Tokenizer) -> None:
    answer = asked(http, path, prompt_logprobs=2, return_token_ids=True)
    place = answer["choices"][0] if path == "/v1/completions" else answer
    ids, found = place["prompt_token_ids"], place["prompt_logprobs"]
    assert found[0] is None
    assert len(found) == len(ids)
    for token, row in zip(ids[1:], found[1:], strict=True):
        assert 2 <= len(row) <= 3
        assert row[str(token)]["decoded_token"] == tokenizer.token_bytes(token).decode("utf-8", "replace")
        assert {1, 2} <= {each["rank"] for each in row.values()}
    few = asked(http, "/v1/chat/completions", prompt_logprobs=3, logprobs=True, top_logprobs=1)
    assert {len(one["top_logprobs"]) for one in few["choices"][0]["logprobs"]["content"]} == {1}
    assert http.post(path, json={**PATHS[path], "prompt_logprobs": 1, "stream": True}).status_code == 400


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_may_tell_the_usage_so_far(client: openai.OpenAI, path: str) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    make: Any = client.chat.completions.create if path == "/v1/chat/completions" else client.completions.create
    chunks = [*make(**PATHS[path], stream=True, stream_options=options)]
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert len(set(counts)) > 2
    assert len({chunk.usage.prompt_tokens for chunk in chunks}) == 1


@pytest.mark.parametrize("path", PATHS)
def test_timings_are_told_where_asked_for(http: httpx.Client, path: str) -> None:
    answer = asked(http, path, timings_per_token=True)
    timings, usage = answer["timings"], answer["usage"]
    assert timings["predicted_n"] == usage["completion_tokens"]
    assert timings["prompt_n"] + timings["cache_n"] == usage["prompt_tokens"]
    assert timings["prompt_ms"] >= 0
    assert "timings" not in asked(http, path)
    lines = http.post(path, json={**PATHS[path], "timings_per_token": True, "stream": True}).text
    assert lines.count('"timings"') == 1


@pytest.mark.parametrize("path", PATHS)
def test_a_token_may_end_an_answer(http: httpx.Client, path: str) -> None:
    ids = asked(http, path, return_token_ids=True)["choices"][0]["token_ids"]
    (choice,) = asked(http, path, return_token_ids=True, stop_token_ids=[ids[3]])["choices"]
    assert choice["token_ids"] == ids[: ids.index(ids[3])]
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("path", PATHS)
def test_a_token_without_a_text_has_an_id(http: httpx.Client, path: str) -> None:
    (choice,) = asked(http, path, return_token_ids=True, logit_bias={"1": 100}, max_tokens=1)["choices"]
    assert (text_of(choice), choice["token_ids"]) == ("", [1])


@pytest.mark.parametrize("path", PATHS)
def test_the_stop_that_was_met_is_told_and_may_be_shown(http: httpx.Client, path: str) -> None:
    whole = text_of(asked(http, path)["choices"][0])
    stop = whole[1:3]
    (choice,) = asked(http, path, stop=["never", stop])["choices"]
    assert (text_of(choice), choice["stop_reason"]) == (whole[: whole.index(stop)], stop)
    (choice,) = asked(http, path, stop=["never", stop], include_stop_str_in_output=True)["choices"]
    assert text_of(choice) == whole[: whole.index(stop)] + stop
    body = {**PATHS[path], "stop": stop, "include_stop_str_in_output": True, "n": 2}
    assert http.post(path, json=body).status_code == 400


def test_anthropics_clients_are_told_which_stop_it_was(served: RunningServer, http: httpx.Client) -> None:
    whole = text_of(asked(http, "/v1/chat/completions")["choices"][0])
    stop = whole[1:3]
    with anthropic.Anthropic(base_url=served.http_url, api_key="none", max_retries=0) as claude:
        fields: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 8, "stop_sequences": ["never", stop]}
        message = claude.messages.create(**fields, extra_body={"temperature": 0})
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
        with claude.messages.stream(**fields, extra_body={"temperature": 0}) as stream:
            assert stream.get_final_message().stop_sequence == stop


def test_a_message_is_continued_with_or_without_its_beginning(
    http: httpx.Client, client: openai.OpenAI, tokenizer: Tokenizer
) -> None:
    path = "/v1/chat/completions"
    ids = asked(http, path, messages=BEGUN, return_token_ids=True)["prompt_token_ids"]
    rest = expected_text(tokenizer, ids, 8)
    assert text_of(asked(http, path, messages=BEGUN)["choices"][0]) == rest
    flags = {"continue_final_message": True, "add_generation_prompt": False}
    assert text_of(asked(http, path, messages=BEGUN, **flags)["choices"][0]) == rest
    assert text_of(asked(http, path, messages=BEGUN, echo=True)["choices"][0]) == "Hi, I " + rest
    assert text_of(asked(http, path, echo=True)["choices"][0]) == text_of(asked(http, path)["choices"][0])
    chunks = client.chat.completions.create(**{**CHAT, "messages": BEGUN}, stream=True, extra_body={"echo": True})
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hi, I " + rest
    opened = asked(http, path, messages=BEGUN, add_generation_prompt=True, return_token_ids=True)["prompt_token_ids"]
    assert opened[:-1] == ids  # and the assistant's role
    bare = asked(http, path, add_generation_prompt=False, return_token_ids=True)["prompt_token_ids"]
    assert asked(http, path, return_token_ids=True)["prompt_token_ids"][:-1] == bare


@pytest.mark.parametrize(
    "fields",
    [
        {"continue_final_message": True},
        {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": True},
        {"chat_template": "{{ messages }}"},
        {"stop_token_ids": [-1]},
        {"prompt_logprobs": 21},
    ],
)
def test_what_cannot_be_is_refused(http: httpx.Client, fields: dict[str, Any]) -> None:
    assert http.post("/v1/chat/completions", json={**CHAT, **fields}).status_code == 400


def test_a_template_does_not_end_the_message_that_is_continued(tmp_path: Path) -> None:
    with talking(tmp_path, "qwen") as talker:
        talker.says("am")
        talker.openai.chat.completions.create(model=MODEL, messages=BEGUN)
        assert talker.prompt.endswith("Hi, I ")
        talker.openai.chat.completions.create(model=MODEL, messages=BEGUN, extra_body={"add_generation_prompt": True})
        assert talker.prompt.endswith("<|im_start|>assistant\n")
        assert "Hi, I <|im_end|>" in talker.prompt or "Hi, I<|im_end|>" in talker.prompt


def test_special_tokens_are_spelled_where_asked_for(tmp_path: Path) -> None:
    with talking(tmp_path, "qwen") as talker:
        talker.says("a<|im_start|>b")
        shown = talker.openai.chat.completions.create(
            model=MODEL, messages=MESSAGES, extra_body={"skip_special_tokens": False}
        )
        assert shown.choices[0].message.content == "a<|im_start|>b"
        hidden = talker.openai.chat.completions.create(model=MODEL, messages=MESSAGES)
        assert hidden.choices[0].message.content == "ab"


def test_what_is_known_of_a_tokenizer(tmp_path: Path) -> None:
    """Whatever file it is from: a GGUF's becomes the same files."""
    with talking(tmp_path, "qwen") as talker:
        info = httpx.get(f"{talker.server.http_url}/tokenizer_info").json()
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert info["chat_template"] == config["chat_template"]
    assert info["tokenizer_class"] == config["tokenizer_class"]
    assert info["eos_token"] == "<|im_end|>"


def test_a_request_may_bring_a_template_where_that_is_allowed(text_dir: Path, http: httpx.Client) -> None:
    """Baichuan's roles are token ids, which the request's template takes the place of."""
    template = "{% for message in messages %}[{{ message.role }}] {{ message.content }}{% endfor %}"
    path = "/v1/chat/completions"
    body = {**CHAT, "chat_template": template, "return_token_ids": True}
    refused = http.post(path, json=body)
    assert refused.status_code == 400
    assert "--allow-chat-template" in refused.json()["error"]["message"]
    hidden = {**CHAT, "chat_template_kwargs": {"chat_template": template}}
    assert http.post(path, json=hidden).status_code == 400
    with (
        serving(text_dir, preprocessing={"allow_chat_template": "true"}) as server,
        httpx.Client(base_url=server.http_url, timeout=60) as client,
    ):
        made = client.post(path, json=body).json()
        text = client.post("/detokenize", json={"tokens": made["prompt_token_ids"]}).json()["prompt"]
        assert text == "[user] Hello"
        own, others = (each.post(path, json=CHAT).json()["usage"]["total_tokens"] for each in (client, http))
        assert own == others  # without one it is the model's
        for wrong in ("{% for %}", "{{ 1 / 0 }}", "x" * 100_000, "{% for a in range(9**9) %}{% endfor %}"):
            answer = client.post(path, json={**body, "chat_template": wrong})
            assert answer.status_code == 400, answer.text
