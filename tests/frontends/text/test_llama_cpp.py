"""llama.cpp's own routes, compared with OpenAI's for the same prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from llmserve.stages.tokenizer import Tokenizer
from tests.frontends.server import STRICT
from tests.frontends.text.conftest import END_ID, expected_ids, expected_text, serving
from tests.frontends.text.talkers import talking

PROMPT = "Hello"
TEMPLATE = (
    "{{ mark }}{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def completion(http: httpx.Client, **body: Any) -> Any:
    return http.post("/completion", json={"temperature": 0, "n_predict": 6, **body}).raise_for_status().json()


def test_a_text_goes_on_as_with_openais(http: httpx.Client, tokenizer: Tokenizer) -> None:
    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0}
    alone = http.post("/v1/completions", json=body).raise_for_status().json()
    found = completion(http, prompt=PROMPT, return_tokens=True)
    assert found["content"] == alone["choices"][0]["text"]
    assert found["tokens"] == expected_ids(tokenizer.encode(PROMPT, add_special_tokens=True), 6)
    assert (found["tokens_predicted"], found["tokens_evaluated"]) == (6, alone["usage"]["prompt_tokens"])
    assert (found["stop"], found["stop_type"], found["stopping_word"], found["prompt"]) == (True, "limit", "", PROMPT)
    assert found["timings"]["predicted_n"] == 6
    assert completion(http, prompt=PROMPT)["tokens"] == []


def test_prompts_in_every_form(http: httpx.Client, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT, add_special_tokens=True)
    text, tokens, json_form = completion(http, prompt=[PROMPT, ids, {"prompt_string": PROMPT}])
    assert text["content"] == tokens["content"] == json_form["content"]
    assert [found["index"] for found in (text, tokens, json_form)] == [0, 1, 2]
    mixed = completion(http, prompt=[5, PROMPT, 7], return_tokens=True)
    assert mixed["tokens"] == expected_ids([5, *tokenizer.encode(PROMPT), 7], 6)
    assert completion(http, prompt=ids, n_predict=0)["content"] == ""


@pytest.mark.parametrize("limit", [{"n_predict": 0}, {"n_predict": -1, "max_tokens": 0}])
def test_a_prompt_that_is_only_computed(http: httpx.Client, limit: dict[str, int]) -> None:
    found = completion(http, prompt=PROMPT, n_probs=1, return_tokens=True, **limit)
    streamed = http.post("/completion", json={"prompt": PROMPT, "stream": True, **limit}).text
    last = json.loads(streamed.removeprefix("data: "))
    for answer in (found, last):
        assert (answer["content"], answer["tokens"], answer["stop_type"]) == ("", [], "limit")
        assert answer["tokens_predicted"] == answer["generation_settings"]["n_predict"] == 0
        assert answer["timings"]["predicted_n"] == 0
        assert answer["tokens_evaluated"] > 0
    assert found["completion_probabilities"] == []


def test_the_prompt_that_ids_are_has_its_special_tokens(tmp_path: Path) -> None:
    prompt = "<|im_start|>user\nHello<|im_end|>"
    with talking(tmp_path, "qwen") as talker, httpx.Client(base_url=talker.server.http_url) as client:
        talker.says("Hi")
        assert completion(client, prompt=talker.tokenizer.encode_marked(prompt))["prompt"] == prompt


def test_a_stream_has_the_same_tokens(http: httpx.Client) -> None:
    body = {"prompt": PROMPT, "n_predict": 6, "temperature": 0, "stream": True, "n_probs": 2}
    lines = http.post("/completion", json=body).text.split("\n\n")
    *pieces, last = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    whole = completion(http, prompt=PROMPT, return_tokens=True, n_probs=2)
    assert "".join(piece["content"] for piece in pieces) == whole["content"]
    assert [token for piece in pieces for token in piece["tokens"]] == whole["tokens"]
    scored = [token for piece in pieces for token in piece["completion_probabilities"]]
    assert scored == whole["completion_probabilities"]
    assert [token["id"] for token in scored] == whole["tokens"]
    assert {len(token["top_logprobs"]) for token in scored} == {2}
    assert (last["stop"], last["content"], last["tokens_predicted"]) == (True, "", 6)


def test_biases_of_tokens_and_texts(http: httpx.Client, tokenizer: Tokenizer) -> None:
    first = completion(http, prompt=PROMPT, return_tokens=True)["tokens"][0]
    for biases in ([[first, False]], {str(first): -100}):
        found = completion(http, prompt=PROMPT, return_tokens=True, logit_bias=biases)
        assert found["generation_settings"]["logit_bias"] == [{"token": first, "bias": -100.0}]
    found = completion(http, prompt=PROMPT, logit_bias=[["ab", 1.5]], ignore_eos=True)
    told = [{"token": token, "bias": 1.5} for token in tokenizer.encode("ab")]
    assert found["generation_settings"]["logit_bias"] == [*told, {"token": END_ID, "bias": None}]


def test_members_that_are_asked_for(http: httpx.Client, tokenizer: Tokenizer) -> None:
    found = completion(http, prompt=PROMPT, response_fields=["content", "generation_settings/n_predict", "no"])
    ids = tokenizer.encode(PROMPT, add_special_tokens=True)
    assert found == {"content": expected_text(tokenizer, ids, 6), "generation_settings/n_predict": 6}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"prompt": {"prompt_string": "a", "multimodal_data": ["x"]}}, "only text is supported"),
        ({"prompt": []}, "prompt must not be empty"),
        ({"prompt": [1.5]}, "a prompt must be a string, token ids"),
        ({"prompt": ["a", "b"], "stream": True}, "several prompts cannot be streamed"),
        ({"prompt": "a", "mirostat": 2, "n_predict": -2}, "n_predict: must be at least 0; mirostat: this sampler"),
        ({"prompt": "a", "logit_bias": [["x", 200]]}, "pairs of a token id or string, and a number"),
        ({"prompt": "a", "post_sampling_probs": True}, "only log probs before sampling"),
    ],
)
def test_what_cannot_be_honoured(http: httpx.Client, body: dict[str, Any], said: str) -> None:
    answer = http.post("/completion", json=body)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def test_how_long_a_prompt_is(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    whole = http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}).json()["usage"]
    for path, body in (("chat/completions", {"messages": messages}), ("responses", {"input": "Hello"})):
        found = http.post(f"/v1/{path}/input_tokens", json=body).raise_for_status().json()
        assert found == {"object": "response.input_tokens", "input_tokens": whole["prompt_tokens"]}


def test_log_probs_name_tokens_by_their_ids(http: httpx.Client) -> None:
    asked = {"max_tokens": 3, "temperature": 0, "return_tokens_as_token_ids": True, "return_token_ids": True}
    for stream in (False, True):
        body = {**asked, "prompt": PROMPT, "logprobs": 1, "stream": stream}
        text = http.post("/v1/completions", json=body).raise_for_status().text
        first = text.split("\n\n")[0].removeprefix("data: ") if stream else text
        choice = json.loads(first)["choices"][0]
        assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    body = {**asked, "messages": [{"role": "user", "content": "Hello"}], "logprobs": True, "top_logprobs": 1}
    choice = http.post("/v1/chat/completions", json=body).raise_for_status().json()["choices"][0]
    assert [one["token"] for one in choice["logprobs"]["content"]] == [f"token_id:{t}" for t in choice["token_ids"]]


@pytest.fixture(scope="module")
def templated(text_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server with its operator's template and values (`--chat-template`, `--default-chat-template-kwargs`)."""
    path = tmp_path_factory.mktemp("template") / "chat.jinja"
    path.write_text(TEMPLATE)
    with (
        serving(
            text_dir, preprocessing={"chat_template": str(path)}, text=replace(STRICT, template_values={"mark": "#"})
        ) as server,
        httpx.Client(base_url=server.http_url, timeout=60) as client,
    ):
        yield client


def test_the_prompt_that_a_conversation_becomes(templated: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    for opens, end in ((True, "[assistant]"), (False, "")):
        body = {"messages": messages, "add_generation_prompt": opens}
        found = templated.post("/apply-template", json=body).raise_for_status().json()
        assert found["prompt"].strip() == f"#[user] Hello {end}".strip()
    body = {"messages": messages, "chat_template_kwargs": {"mark": "+"}}
    assert templated.post("/apply-template", json=body).json()["prompt"].strip().startswith("+[user]")
    counted = templated.post("/v1/chat/completions/input_tokens", json=body).json()["input_tokens"]
    assert len(templated.post("/tokenize", json=body).raise_for_status().json()["tokens"]) == counted
    props = templated.get("/props").raise_for_status().json()
    assert (props["chat_template"], props["model_alias"]) == (TEMPLATE, "ensemble")
    assert props["modalities"] == {"vision": False, "audio": False}
