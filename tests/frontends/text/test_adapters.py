"""Adapters over /v1: each is a model of its own, and comes and goes while the server runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import numpy as np
import ollama
import openai
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from llmserve.engine.adapters.sealed import SealedAdapter
from llmserve.engine.fake import fake_answer
from llmserve.frontends.shared.api_keys import ApiKeys
from llmserve.frontends.shared.text_settings import TextSettings
from llmserve.serving.settings import ControlMode
from llmserve.stages.tokenizer import Tokenizer
from tests.engine.test_adapters import adapters
from tests.frontends.server import RunningServer
from tests.frontends.text.conftest import END_ID, VOCAB_SIZE, serving

PROMPT = "Hello"


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> list[SealedAdapter]:
    return adapters(tmp_path_factory.mktemp("adapters"), 3)


@pytest.fixture(scope="module")
def running(text_dir: Path, known: list[SealedAdapter]) -> Iterator[RunningServer]:
    given = json.dumps({"formal": str(known[0].path), "7": str(known[1].path)})
    with serving(text_dir, engine={"adapters": given}, control_mode=ControlMode.EXPLICIT) as made:
        yield made


@pytest.fixture(scope="module")
def client(running: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.http_url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def http(running: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.http_url, timeout=60) as made:
        yield made


def text_of(tokenizer: Tokenizer, ids: list[int], digest: str, num_tokens: int = 8) -> str:
    answer = fake_answer(ids, num_tokens, VOCAB_SIZE, adapter=digest)
    return tokenizer.decode(answer[: answer.index(END_ID)] if END_ID in answer else answer)


def prompt_ids(http: httpx.Client) -> list[int]:
    found: list[int] = http.post("/tokenize", json={"model": "ensemble", "prompt": PROMPT}).json()["tokens"]
    return found


def test_an_adapter_is_known_by_ollamas_form_of_its_name(text_dir: Path, known: list[SealedAdapter]) -> None:
    """Also where the server takes any name."""
    given = json.dumps({"formal": str(known[0].path), "terse:latest": str(known[1].path)})
    text = TextSettings(takes_any_name=True)
    with (
        serving(text_dir, engine={"adapters": given}, text=text) as server,
        httpx.Client(base_url=server.http_url, timeout=60) as client,
    ):
        body = {"prompt": PROMPT, "raw": True, "stream": False, "options": {"temperature": 0, "num_predict": 8}}
        said = {
            name: client.post("/api/generate", json={**body, "model": name}).json()["response"]
            for name in ("formal", "formal:latest", "terse", "terse:latest", "other")
        }
    assert said["formal"] == said["formal:latest"]
    assert said["terse"] == said["terse:latest"]
    assert len(set(said.values())) == 3


def test_each_is_a_model_with_a_parent(client: openai.OpenAI, http: httpx.Client, known: list[SealedAdapter]) -> None:
    assert [each.id for each in client.models.list()] == ["ensemble", "7", "formal"]
    document = http.get("/v1/models/formal").json()
    assert (document["parent"], document["root"]) == ("ensemble", "ensemble")
    assert document["adapter"] == {"digest": known[0].digest, "base": "0" * 64, "rank": 4, "gate": []}
    assert "adapter" not in http.get("/v1/models/ensemble").json()


def test_the_model_of_a_request_chooses(
    client: openai.OpenAI, http: httpx.Client, tokenizer: Tokenizer, known: list[SealedAdapter]
) -> None:
    ids, told = prompt_ids(http), set()
    for name, digest in (("formal", known[0].digest), ("7", known[1].digest), ("ensemble", "")):
        answer = client.completions.create(model=name, prompt=PROMPT, max_tokens=8, temperature=0)
        assert answer.choices[0].text == text_of(tokenizer, ids, digest)
        assert answer.model == name
        told.add(answer.system_fingerprint)
        with client.completions.create(model=name, prompt=PROMPT, max_tokens=8, temperature=0, stream=True) as chunks:
            assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == answer.choices[0].text
    assert len(told) == 1, "the fake engine has no digest to tell"


def test_every_api_has_them(running: RunningServer, client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": PROMPT}]
    chat = client.chat.completions.create(model="formal", messages=messages, max_tokens=4, temperature=0)
    base = client.chat.completions.create(model="ensemble", messages=messages, max_tokens=4, temperature=0)
    assert chat.choices[0].message.content != base.choices[0].message.content
    response = client.responses.create(model="formal", input=PROMPT, max_output_tokens=4, temperature=0)
    assert response.output_text == chat.choices[0].message.content
    with anthropic.Anthropic(base_url=running.http_url, api_key="none", max_retries=0) as other:
        answer = other.messages.create(model="formal", max_tokens=4, messages=messages, extra_body={"temperature": 0})
        assert answer.content[0].to_dict()["text"] == chat.choices[0].message.content
    with ollama.Client(host=running.http_url) as llama:
        said = llama.chat("formal", messages, options={"num_predict": 4, "temperature": 0})
        assert said.message.content == chat.choices[0].message.content


def test_an_unknown_one_is_a_model_that_does_not_exist(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=r"The model 'casual' does not exist.*Known: ensemble, 7, formal"):
        client.completions.create(model="casual", prompt=PROMPT)


def test_over_triton_they_are_named_by_a_parameter_or_a_number(
    running: RunningServer, http: httpx.Client, tokenizer: Tokenizer, known: list[SealedAdapter]
) -> None:
    ids = prompt_ids(http)
    body = {"text_input": PROMPT, "max_tokens": 8, "exclude_input_in_output": True}
    named = http.post("/v2/models/ensemble/generate", json={**body, "lora_name": "formal"})
    assert named.json()["text_output"] == text_of(tokenizer, ids, known[0].digest)
    numbered = http.post("/v2/models/ensemble/generate", json={**body, "lora_task_id": 7})
    assert numbered.json()["text_output"] == text_of(tokenizer, ids, known[1].digest)
    inputs = [
        grpcclient.InferInput("text_input", [1, 1], "BYTES"),
        grpcclient.InferInput("max_tokens", [1, 1], "INT32"),
    ]
    inputs[0].set_data_from_numpy(np.array([[PROMPT.encode()]], object))
    inputs[1].set_data_from_numpy(np.array([[8]], np.int32))
    with grpcclient.InferenceServerClient(running.grpc) as client:
        found: list[object] = []
        client.start_stream(lambda result, error: found.append(error or result))
        client.async_stream_infer("ensemble", inputs, parameters={"lora_name": "casual"})
        client.stop_stream()
    (error,) = found
    assert isinstance(error, InferenceServerException)
    assert "there is no adapter 'casual'" in str(error)


def test_they_come_and_go(
    client: openai.OpenAI, http: httpx.Client, tokenizer: Tokenizer, known: list[SealedAdapter]
) -> None:
    ids = prompt_ids(http)
    for adapter in known[2], known[0]:  # the second time the name is another's
        loaded = http.post("/v1/load_lora_adapter", json={"lora_name": "mine", "lora_path": str(adapter.path)})
        assert loaded.json()["adapter"]["digest"] == adapter.digest
        answer = client.completions.create(model="mine", prompt=PROMPT, max_tokens=8, temperature=0)
        assert answer.choices[0].text == text_of(tokenizer, ids, adapter.digest)
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "mine"}).json()["deleted"] is True
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="mine", prompt=PROMPT)


def test_what_cannot_be_loaded(http: httpx.Client, known: list[SealedAdapter], tmp_path: Path) -> None:
    def refused(path: str = "load", **body: str) -> tuple[int, str]:
        answer = http.post(f"/v1/{path}_lora_adapter", json=body)
        return answer.status_code, answer.json()["error"]["message"]

    directory = str(known[0].path)
    assert refused(lora_name="x", lora_path=str(tmp_path / "gone"))[0] == 404
    assert "without a slash" in refused(lora_name="a/b", lora_path=directory)[1]
    assert "a model is already named 'ensemble'" in refused(lora_name="ensemble", lora_path=directory)[1]
    assert "there is no adapter 'x'" in refused("unload", lora_name="x")[1]
    assert refused(lora_name="x")[0] == 400


def test_api_keys_may_be_limited_to_adapters(text_dir: Path, known: list[SealedAdapter], tmp_path: Path) -> None:
    keys = {name: f"{name}-0123456789abcdef" for name in ("all", "some", "none")}
    allowed = {"all": "", "some": ", adapters: [formal]", "none": ", adapters: []"}
    file = tmp_path / "keys.yaml"
    file.write_text(f"keys: [{', '.join(f'{{name: {name}, key: {keys[name]}{allowed[name]}}}' for name in keys)}]")
    given = json.dumps({"formal": str(known[0].path), "7": str(known[1].path)})
    may_use = {"all": {"ensemble", "formal", "7"}, "some": {"ensemble", "formal"}, "none": {"ensemble"}}
    with serving(text_dir, ApiKeys(file), engine={"adapters": given}) as server:
        for name, key in keys.items():
            with openai.OpenAI(base_url=f"{server.http_url}/v1", api_key=key, max_retries=0) as client:
                for model in ("ensemble", "formal", "7"):
                    if model in may_use[name]:
                        assert client.completions.create(model=model, prompt=PROMPT, max_tokens=2).choices
                        continue
                    with pytest.raises(openai.NotFoundError, match=f"The model '{model}' does not exist") as caught:
                        client.completions.create(model=model, prompt=PROMPT, max_tokens=2)
                    assert model not in caught.value.message.partition("Known: ")[2]
                    with pytest.raises(openai.NotFoundError):
                        client.models.retrieve(model)
                assert {each.id for each in client.models.list()} == may_use[name]
            headers = {"authorization": f"Bearer {key}"}
            tags = httpx.get(f"{server.http_url}/api/tags", headers=headers).json()["models"]
            assert {each["name"] for each in tags} == may_use[name]
            body = {"text_input": PROMPT, "max_tokens": 2, "lora_name": "7"}
            answer = httpx.post(f"{server.http_url}/v2/models/ensemble/generate", json=body, headers=headers)
            assert answer.status_code == (200 if "7" in may_use[name] else 404)


def test_other_control_modes_change_nothing(text_dir: Path, known: list[SealedAdapter]) -> None:
    with serving(text_dir) as server, httpx.Client(base_url=server.http_url, timeout=60) as http:
        body = {"lora_name": "mine", "lora_path": str(known[0].path)}
        assert http.post("/v1/load_lora_adapter", json=body).status_code == 400
        assert http.post("/v1/unload_lora_adapter", json={"lora_name": "mine"}).status_code == 400
