"""What cannot be answered is refused in the protocol's shape, and the next request works."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import openai
import pytest

from tests.frontends.server import HOST, RunningServer

GOOD = {"model": "ensemble", "prompt": "fox", "max_tokens": 2}
COMPLETIONS = "/v1/completions"


def refusal(http: httpx.Client, body: Any, path: str = COMPLETIONS) -> dict[str, Any]:
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert http.post(path, json=GOOD).status_code == 200
    return error


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"unknown": 1}, "unknown"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"stop": ["x"] * 33}, "stop"),
        ({"stop": [5]}, "stop"),
        ({"seed": 2**63}, "seed"),
        ({"logprobs": 21}, "logprobs"),
        ({"suffix": "x"}, "suffix"),
        ({"logit_bias": {"fox": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"stream_options": {"include_usages": True}, "stream": True}, "stream_options"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "x"]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"model": 1}, "model"),
        ({"response_format": {"type": "xml"}}, "response_format"),
    ],
)
def test_fields_that_are_wrong(http: httpx.Client, more: dict[str, Any], param: str) -> None:
    assert refusal(http, {**GOOD, **more})["param"] == param


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"n": 2, "best_of": 1}, "best_of must be at least n"),
        ({"best_of": 2, "stream": True}, "cannot be streamed"),
        ({"max_tokens": 0}, "requires echo"),
        ({"stream_options": {"include_usage": True}}, "requires stream"),
        ({"prompt": [5, 10_000]}, "outside the vocabulary"),
        ({"prompt": list(range(100, 400))}, "the prompt is too long"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"presence_penalty": 1, "logit_bias": {"10000": 1}}, "logit bias of token 10000"),
    ],
)
def test_fields_that_do_not_go_together(http: httpx.Client, more: dict[str, Any], words: str) -> None:
    assert words in refusal(http, {**GOOD, **more})["message"]


def test_all_problems_are_told_at_once(http: httpx.Client) -> None:
    message = refusal(http, {"prompt": 1, "top_p": 5, "tools": [1]})["message"]
    assert all(name in message for name in ("prompt", "top_p", "tools"))


def test_tools_that_contradict_each_other(http: httpx.Client) -> None:
    chat = {"model": "ensemble", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    answer = http.post("/v1/chat/completions", json={**chat, "tools": [tool, tool]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
    assert http.post("/v1/chat/completions", json={**chat, "tools": [], "tool_choice": "none"}).status_code == 200


def test_too_long_a_prompt_has_openais_code(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="ensemble", prompt=list(range(200, 500)))
    assert caught.value.code == "context_length_exceeded"
    for text in ("fox " * 1000, "x" * 500_000):  # seen by the engine, and before it is tokenized
        with pytest.raises(openai.BadRequestError, match="the prompt is too long") as caught:
            client.completions.create(model="ensemble", prompt=text)
        assert caught.value.code == "context_length_exceeded"


def test_a_model_that_is_not_there(client: openai.OpenAI) -> None:
    for name in ("gpt-4o", "preprocessing", "a/b"):
        with pytest.raises(openai.NotFoundError, match="does not exist") as caught:
            client.completions.create(model=name, prompt="x")
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'"x"', b"\xff", b'{"model":"ensemble","prompt":NaN}', b"[" * 100_000,
        b'{"model":"ensemble","prompt":"\\ud800"}', b'{"model":"ensemble","prompt":' + b"9" * 5000 + b"}",
    ],
)  # fmt: skip
def test_bodies_that_are_no_request(http: httpx.Client, body: bytes) -> None:
    answer = http.post(COMPLETIONS, content=body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert http.post(COMPLETIONS, json=GOOD).status_code == 200


def test_too_large_a_body(http: httpx.Client) -> None:
    answer = http.post(COMPLETIONS, json={**GOOD, "prompt": "x" * 700_000})  # the server's limit is 600,000
    assert (answer.status_code, answer.json()["error"]["type"]) == (413, "invalid_request_error")
    assert http.post(COMPLETIONS, json=GOOD).status_code == 200


def test_a_large_body_is_read_beside_the_loop(http: httpx.Client) -> None:
    body = {**GOOD, "prompt": [[number] * 300 for number in range(300)]}
    assert http.post(COMPLETIONS, json=body).json()["error"]["code"] == "context_length_exceeded"


def test_a_body_that_stops_in_the_middle(served: RunningServer, http: httpx.Client) -> None:
    with socket.create_connection((HOST, served.http_port), timeout=20) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert http.post(COMPLETIONS, json=GOOD).status_code == 200


def test_paths_and_methods_that_do_not_exist(http: httpx.Client) -> None:
    for method, path, status, allowed in (
        ("GET", "/v1/nothing", 404, None),
        ("POST", "/v1/images/generations", 404, None),
        ("POST", "/v1/completions/x", 404, None),
        ("GET", "/v1/completions", 405, "POST"),
        ("DELETE", "/v1/models/ensemble", 405, "GET, HEAD"),
        ("POST", "/v2/models/ensemble/config", 405, "GET"),
        ("GET", "/docs", 404, None),
    ):
        answer = http.request(method, path)
        assert (answer.status_code, answer.headers.get("allow")) == (status, allowed), path
        assert "error" in answer.json()


def test_head_is_get_without_a_body(http: httpx.Client) -> None:
    for path in ("/v1/models", "/api/version", "/openapi.json"):
        head, whole = http.head(path), http.get(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == whole.headers["content-length"]
    assert http.head("/v1/completions").status_code == 405
    assert http.head("/v1/nothing").status_code == 404


def test_compressed_bodies_are_read(http: httpx.Client) -> None:
    import gzip

    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    answer = http.post(COMPLETIONS, content=gzip.compress(json.dumps(GOOD).encode()), headers=headers)
    assert answer.status_code == 200


def test_the_schema_describes_every_route(http: httpx.Client) -> None:
    schema = http.get("/openapi.json").json()
    assert {"/v1/models", "/v1/completions", "/v1/chat/completions", "/tokenize"} <= schema["paths"].keys()
    request = schema["components"]["schemas"]["ChatRequest"]
    assert request["additionalProperties"] is False
    assert request["properties"]["messages"]["minItems"] == 1


def test_models(client: openai.OpenAI, http: httpx.Client) -> None:
    assert [model.id for model in client.models.list()] == ["ensemble"]
    assert client.models.retrieve("ensemble").owned_by == "llmserve"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("tensorrt_llm")


def test_tokens_in_llama_cpps_form(http: httpx.Client) -> None:
    text = "red fox 媽"
    plain, whole = (
        http.post("/tokenize", json=body).json()["tokens"] for body in ({"content": text}, {"prompt": text})
    )
    marked = http.post("/tokenize", json={"content": text, "add_special": True, "parse_special": True}).json()["tokens"]
    assert (marked, http.post("/detokenize", json={"tokens": plain}).json()["content"]) == (whole, text)
    told = http.post("/tokenize", json={"content": text, "with_pieces": True}).json()["tokens"]
    assert [token["id"] for token in told] == plain
    pieces = [token["piece"] for token in told]
    assert b"".join(p.encode() if isinstance(p, str) else bytes(p) for p in pieces).strip() == text.encode()
    assert any(isinstance(piece, list) for piece in pieces), "a letter of three bytes, a token each"
    for body in ({"prompt": text, "with_pieces": True}, {"content": text, "prompt": text},
                 {"content": text, "add_special_tokens": True}, {"content": text, "parse_special": False}):  # fmt: skip
        assert http.post("/tokenize", json=body).status_code == 400


def test_tokens_of_a_text_and_back(http: httpx.Client) -> None:
    found = http.post("/tokenize", json={"model": "ensemble", "prompt": "red fox", "return_token_strs": True}).json()
    assert "".join(found["token_strs"]) == "red fox"
    assert found["count"] == len(found["tokens"])
    back = http.post("/detokenize", json={"model": "ensemble", "tokens": found["tokens"]})
    assert back.json() == {"prompt": "red fox", "content": "red fox"}
    assert http.post("/detokenize", json={"tokens": []}).raise_for_status().json() == {"prompt": "", "content": ""}
    unknown = http.post("/detokenize", json={"tokens": [*found["tokens"], 49152]})
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "tokens")
    assert "the vocabulary has no id 49152" in unknown.json()["error"]["message"]
    chat = http.post("/tokenize", json={"model": "ensemble", "messages": [{"role": "user", "content": "red fox"}]})
    assert chat.json()["tokens"] == [195, *found["tokens"], 196]
    assert http.post("/tokenize", json={"model": "ensemble"}).status_code == 400
    assert (
        http.post("/tokenize", json={"prompt": "red fox", "add_special_tokens": False}).json()["tokens"]
        == found["tokens"]
    )
    info = http.get("/tokenizer_info").json()
    assert (info["eos_token"], info["bos_token"], info["pad_token"]) == ("</s>", None, "<unk>")
