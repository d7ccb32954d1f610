"""Embeddings and scores from real servers: OpenAI's client, KServe over gRPC and HTTP, and what is refused."""

from __future__ import annotations

import base64
import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tritonclient.utils import InferenceServerException

from llmserve.stages.files import QWEN3_PAIR
from tests.checkpoints import make_checkpoint, write_json
from tests.e2e.conftest import ServerProcess, llmserve, start_server
from tests.embedders import (
    make_embedder,
    make_reranker,
    wanted_embedding,
    wanted_score,
    write_answers,
    write_word_pieces,
)
from tests.frontends.server import wait_until
from tests.oracle import load_oracle

MODEL = "ensemble"
TEXTS = ("The quick brown fox", "boats of the harbour city", "a", "fish " * 40, "winter lake, birds! price of fish?")
QUERY = "price of fish"


@contextmanager
def serving(checkpoint: Path, *flags: str) -> Iterator[ServerProcess]:
    engine = checkpoint / "engine"
    built = llmserve("build", str(checkpoint), "--dtype", "float32", "--output-dir", str(engine))
    assert built.returncode == 0, built.stderr
    server = start_server(str(engine), "--max-kv-tokens", "4096", *flags)
    try:
        yield server
    finally:
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("embedder")


@pytest.fixture(scope="module")
def embedder(folder: Path) -> Any:
    model = make_embedder(folder, "bert", pooling="mean", normalize=True, matryoshka_dimensions=[16, 32])
    write_word_pieces(folder)
    return model


@pytest.fixture(scope="module")
def server(embedder: Any, folder: Path) -> Iterator[ServerProcess]:
    with serving(folder, "--batch-dir", str(folder / "batches")) as running:
        yield running


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.http}/v1", api_key="none", max_retries=0) as made:
        yield made


def ids_of(folder: Path, text: str) -> list[int]:
    found: list[int] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    return found


def wanted(model: Any, folder: Path, texts: Sequence[str]) -> list[NDArray[np.float32]]:
    return [wanted_embedding(model, ids_of(folder, text), "mean", normalize=True) for text in texts]


def test_openais_client_gets_the_embeddings_of_transformers(client: openai.OpenAI, embedder: Any, folder: Path) -> None:
    """By default it asks for base64."""
    answer = client.embeddings.create(model=MODEL, input=list(TEXTS))
    assert [each.index for each in answer.data] == list(range(len(TEXTS)))
    for each, exact in zip(answer.data, wanted(embedder, folder, TEXTS), strict=True):
        assert np.array(each.embedding, np.float32) @ exact == pytest.approx(1, abs=1e-5)
    num_tokens = sum(len(ids_of(folder, text)) for text in TEXTS)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens, answer.model) == (num_tokens, num_tokens, MODEL)


def test_every_form_of_a_text_has_one_embedding(client: openai.OpenAI, server: ServerProcess, folder: Path) -> None:
    text = TEXTS[1]
    (first,) = client.embeddings.create(model=MODEL, input=text, encoding_format="float").data
    ids = ids_of(folder, text)
    for given in ([text], ids, [ids], [text, *TEXTS * 30]):
        # the only model need not be named
        data = httpx.post(f"{server.http}/v1/embeddings", json={"input": given}, timeout=60).json()["data"]
        assert data[0]["embedding"] == first.embedding
    body: dict[str, Any] = {"model": MODEL, "input": ids, "encoding_format": "base64"}
    packed = httpx.post(f"{server.http}/embeddings", json=body).json()["data"][0]["embedding"]
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(packed), "<f4"), np.array(first.embedding, np.float32))


def test_embeddings_are_cut_where_the_checkpoint_allows_it(client: openai.OpenAI) -> None:
    (whole,) = client.embeddings.create(model=MODEL, input="fox").data
    (cut,) = client.embeddings.create(model=MODEL, input="fox", dimensions=16).data
    first = np.array(whole.embedding[:16])
    np.testing.assert_allclose(cut.embedding, first / np.linalg.norm(first), atol=1e-6)
    with pytest.raises(openai.BadRequestError, match="dimensions 17 is not supported: it may be 16, 32") as caught:
        client.embeddings.create(model=MODEL, input="fox", dimensions=17)
    assert caught.value.param == "dimensions"


def test_a_batch_of_requests(client: openai.OpenAI) -> None:
    endpoint: Any = "/v1/embeddings"
    bodies = [{"model": MODEL, "input": text} for text in ("fox", ["dog", "lake"])]
    lines = [
        {"custom_id": f"r{number}", "method": "POST", "url": endpoint, "body": body}
        for number, body in enumerate(bodies)
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=("requests.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")
    wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
    output = client.batches.retrieve(batch.id).output_file_id
    assert output is not None
    answers = [json.loads(line)["response"]["body"] for line in client.files.content(output).text.splitlines()]
    found = [row["embedding"] for answer in answers for row in answer["data"]]
    data = client.embeddings.create(model=MODEL, input=["fox", "dog", "lake"], encoding_format="float").data
    assert found == [each.embedding for each in data]


def test_ollamas_route(server: ServerProcess, client: openai.OpenAI) -> None:
    made = httpx.post(f"{server.http}/api/embed", json={"model": f"{MODEL}:latest", "input": ["fox", "dog"]}).json()
    data = client.embeddings.create(model=MODEL, input=["fox", "dog"], encoding_format="float").data
    assert made["embeddings"] == [each.embedding for each in data]
    assert (made["model"], made["prompt_eval_count"]) == (f"{MODEL}:latest", 6)
    assert "warning" not in made
    made = httpx.post(f"{server.http}/api/embed", json={"input": "fox", "truncate": True}).json()
    assert made["warning"] == "truncate: texts that are too long are refused, not truncated"
    body: dict[str, Any] = {"input": "fox", "input_type": "query", "truncate_prompt_tokens": 4}
    warning = httpx.post(f"{server.http}/v1/embeddings", json=body).json()["warning"]
    assert warning.startswith("input_type: unknown field")
    assert "; truncate_prompt_tokens: texts that are too long are refused, not truncated" in warning
    for path in ("tags", "ps"):
        assert [each["name"] for each in httpx.get(f"{server.http}/api/{path}").json()["models"]] == [MODEL]
    shown = httpx.post(f"{server.http}/api/show", json={"model": f"{MODEL}:latest"}).json()
    assert shown["capabilities"] == ["embedding"]


def test_how_long_a_text_is_can_be_asked(server: ServerProcess, folder: Path) -> None:
    for name in (MODEL, ""):
        counted = httpx.post(f"{server.http}/tokenize", json={"model": name, "prompt": TEXTS[0]}).json()
        assert counted["tokens"] == ids_of(folder, TEXTS[0])
        assert (counted["count"], counted["max_model_len"]) == (len(counted["tokens"]), 64)
    bodies: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "fox"}]}, {"content": "fox"},
        {"prompt": "fox", "add_special_tokens": False}, {"prompt": "fox", "return_token_strs": True},
    ]  # fmt: skip
    for body in bodies:
        answer = httpx.post(f"{server.http}/tokenize", json={"model": MODEL, **body})
        assert answer.status_code == 400
        assert "is an embedding model: give prompt and no other field" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"input": "fish " * 80}, 400, "the text has 82 tokens, but this engine takes at most 64; shorten it"),
        ({"input": ["fox", "fish " * 80]}, 400, "input[1], in ensemble 'ensemble', the text has 82 tokens"),
        ({"input": [3] * 65}, 400, "the text has 65 tokens"),
        ({"input": [3, 320]}, 400, "prompt_ids has 1 ids outside the vocabulary (0 to 319); the first is 320"),
        ({"input": []}, 400, "input"),
        ({"input": [[]]}, 400, "input"),
        ({"input": ["fox", 3]}, 400, "input"),
        ({"input": None}, 400, "input"),
        ({}, 400, "input"),
        ({"input": ["fox"] * 2049}, 400, "2049 entries, more than 2048"),
        ({"input": "fox", "encoding_format": "int8"}, 400, "encoding_format"),
        ({"input": "fox", "dimensions": 0}, 400, "dimensions"),
        ({"model": "other", "input": "fox"}, 404, "The model 'other' does not exist"),
    ],
)
def test_bad_input_is_refused_in_words(server: ServerProcess, body: dict[str, Any], status: int, said: str) -> None:
    answer = httpx.post(f"{server.http}/v1/embeddings", json=body)
    assert answer.status_code == status
    assert said in answer.json()["error"]["message"]


def test_an_embedder_answers_no_prompt_and_scores_no_pair(server: ServerProcess, client: openai.OpenAI) -> None:
    does = "model 'ensemble' makes embeddings or scores of texts; use /v1/embeddings"
    for name in (MODEL, ""):
        with pytest.raises(openai.BadRequestError, match=does):
            client.completions.create(model=name, prompt="fox")
    body = {"model": MODEL, "query": QUERY, "documents": ["fox"]}
    answer = httpx.post(f"{server.http}/v1/rerank", json=body)
    assert answer.status_code == 400
    assert "makes embeddings, not scores; use /v1/embeddings" in answer.json()["error"]["message"]
    (listed,) = httpx.get(f"{server.http}/v1/models").json()["data"]
    assert listed["engine"]["pooling"] == {
        "makes": "embeddings", "width": 64, "max_tokens": 64, "dimensions": [16, 32]
    }  # fmt: skip


def inputs_of(client: Any, text: str, **more: str) -> list[Any]:
    made = []
    for name, value in {"text_input": text, **more}.items():
        tensor = client.InferInput(name, [1, 1], "BYTES")
        tensor.set_data_from_numpy(np.array([[value.encode()]], object))
        made.append(tensor)
    return made


@pytest.mark.parametrize("client", [grpc_client, http_client], ids=["grpc", "http"])
def test_the_ensemble_over_kserve(client: Any, server: ServerProcess, embedder: Any, folder: Path) -> None:
    address = server.grpc if client is grpc_client else server.http.removeprefix("http://")
    with client.InferenceServerClient(address) as asking:
        for text, exact in zip(TEXTS, wanted(embedder, folder, TEXTS), strict=True):
            found = asking.infer(MODEL, inputs_of(client, text))
            assert found.as_numpy("embedding").shape == (1, 64)
            assert found.as_numpy("embedding")[0] @ exact == pytest.approx(1, abs=1e-5)
            assert found.as_numpy("num_prompt_tokens") == len(ids_of(folder, text))
            assert found.as_numpy("score") is None
        with pytest.raises(InferenceServerException, match="the text has 82 tokens, but this engine takes at most 64"):
            asking.infer(MODEL, inputs_of(client, "fish " * 80))
        with pytest.raises(InferenceServerException, match="it has no output score"):
            asking.infer(MODEL, inputs_of(client, "fox"), outputs=[client.InferRequestedOutput("score")])
        with pytest.raises(InferenceServerException, match="give either text"):
            asking.infer(MODEL, [])


@pytest.mark.parametrize("kind", ["bert", "xlm-r"])
def test_a_reranker(kind: str, tmp_path: Path) -> None:
    model = make_reranker(tmp_path, kind)
    write_word_pieces(tmp_path, roberta=kind == "xlm-r")
    documents = list(TEXTS)
    pairs = [Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(QUERY, text) for text in documents]
    logits = [wanted_score(model, each.ids, each.type_ids.index(1) if 1 in each.type_ids else 0) for each in pairs]
    scores = [1 / (1 + np.exp(-logit)) for logit in logits]
    order = sorted(range(len(documents)), key=lambda index: -scores[index])
    with serving(tmp_path, "--engine-process") as server:
        body: dict[str, Any] = {"model": MODEL, "query": QUERY, "documents": documents, "return_documents": True}
        answer = httpx.post(f"{server.http}/v1/rerank", json=body).json()
        assert [each["index"] for each in answer["results"]] == order
        for each in answer["results"]:
            assert each["relevance_score"] == pytest.approx(scores[each["index"]], abs=1e-4)
            assert each["document"] == {"text": documents[each["index"]]}
        assert "warning" not in answer
        assert answer["usage"]["total_tokens"] == sum(len(each.ids) for each in pairs)
        assert httpx.post(f"{server.http}/api/show", json={"model": MODEL}).json()["capabilities"] == []
        cut = httpx.post(f"{server.http}/v1/rerank", json={**body, "max_tokens_per_doc": 4}).json()
        assert (cut["warning"], cut["results"]) == (
            "max_tokens_per_doc: documents that are too long are refused, not truncated", answer["results"]
        )  # fmt: skip
        listed = [{"text": text} for text in documents]
        fewer = httpx.post(f"{server.http}/rerank", json={**body, "documents": listed, "top_n": 2}).json()
        assert fewer["results"] == answer["results"][:2]
        refused = httpx.post(f"{server.http}/v1/embeddings", json={"input": "fox"})
        assert refused.status_code == 400
        assert "makes scores, not embeddings; use /v1/rerank" in refused.json()["error"]["message"]
        too_long = httpx.post(f"{server.http}/v1/rerank", json={**body, "documents": ["fox", "fish " * 80]})
        assert too_long.status_code == 400
        assert "documents[1], in ensemble 'ensemble', the text has" in too_long.json()["error"]["message"]
        assert httpx.post(f"{server.http}/v1/rerank", json={"query": "x", "documents": []}).status_code == 400
        with grpc_client.InferenceServerClient(server.grpc) as asking:
            found = asking.infer(MODEL, inputs_of(grpc_client, QUERY, second_text=documents[0]))
            assert found.as_numpy("score")[0, 0] == pytest.approx(scores[0], abs=1e-4)


def test_a_language_model_that_answers_yes_or_no(tmp_path: Path) -> None:
    """As Qwen3-Reranker is published, in sentence-transformers' form: the score is the share of yes."""
    import torch

    make_checkpoint(tmp_path, "qwen3", dtype="float32", max_position_embeddings=1024)
    write_answers(tmp_path, yes=41, no=300)
    tokenizer, model = Tokenizer.from_file(str(tmp_path / "tokenizer.json")), load_oracle(tmp_path)
    documents = list(TEXTS)
    prompts = [QWEN3_PAIR.replace("{query}", QUERY).replace("{document}", text) for text in documents]
    with torch.no_grad():
        rows = [model(torch.tensor([tokenizer.encode(prompt).ids])).logits[0, -1] for prompt in prompts]
    scores = [float(torch.softmax(row[[300, 41]], dim=0)[1]) for row in rows]
    with serving(tmp_path) as server:
        answer = httpx.post(f"{server.http}/v1/rerank", json={"query": QUERY, "documents": documents}).json()
        found = {each["index"]: each["relevance_score"] for each in answer["results"]}
        assert [found[index] for index in range(len(documents))] == pytest.approx(scores, abs=1e-4)
        with grpc_client.InferenceServerClient(server.grpc) as asking:
            result = asking.infer(MODEL, inputs_of(grpc_client, QUERY, second_text=documents[0]))
            assert result.as_numpy("score")[0, 0] == pytest.approx(scores[0], abs=1e-4)


def test_a_decoder_that_makes_embeddings(tmp_path: Path) -> None:
    """As Qwen3-Embedding is published: the architecture of a language model, and sentence-transformers' files."""
    from tests.embedders import write_sentence_transformers

    make_checkpoint(tmp_path, "qwen3", dtype="float32")
    write_sentence_transformers(tmp_path, "lasttoken", normalize=True)
    with serving(tmp_path) as server:
        body = {"input": ["The lake freezes", "The lake freezes over in winter"]}
        first, second = (httpx.post(f"{server.http}/v1/embeddings", json=body).json()["data"] for _ in range(2))
        assert first == second
        assert np.linalg.norm(first[0]["embedding"]) == pytest.approx(1, abs=1e-6)
        cut = httpx.post(f"{server.http}/v1/embeddings", json={**body, "dimensions": 8})
        assert "dimensions 8 is not supported: its embeddings cannot be shortened" in cut.json()["error"]["message"]


def test_a_language_model_makes_no_embeddings(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "llama")
    write_json(checkpoint / "modules.json", {})
    refused = llmserve("build", str(checkpoint), "--output-dir", str(tmp_path / "engine"))
    assert refused.returncode == 2
    assert "it must be a list of modules" in refused.stderr
    (checkpoint / "modules.json").unlink()
    with serving(checkpoint) as server:
        answer = httpx.post(f"{server.http}/v1/embeddings", json={"model": MODEL, "input": "fox"})
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert "model 'ensemble' answers text with text; use /v1/chat/completions" in message


def test_an_embedder_is_neither_exported_nor_asked_for_tokens(server: ServerProcess, folder: Path) -> None:
    exported = llmserve("export", "triton", str(folder / "engine"), "--output", str(folder / "exported"))
    assert exported.returncode != 0
    assert "makes embeddings, so it cannot be exported" in exported.stderr
    asked = llmserve("run", str(folder / "engine"), "--input-text", "fox")
    assert asked.returncode != 0
    assert "this engine makes embeddings or scores of texts, not tokens" in asked.stderr
