"""Under which names and addresses clients find the model: names of the operator's choice, base URLs of all forms."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve import __version__
from llmserve.client import AsyncClient
from llmserve.errors import NotFound
from llmserve.frontends.shared.text_settings import TextSettings
from llmserve.frontends.text.answers.failures import ModelNotFound
from llmserve.frontends.text.openai.models import Models
from llmserve.frontends.text.requests.ensembles import VECTORS, Ensembles
from llmserve.frontends.text.routes import canonical
from llmserve.frontends.text.state import ApiState
from tests.backends.tensorrtllm.models import PIPELINES
from tests.frontends.server import RunningServer, running_server
from tests.frontends.stub_core import StubCore
from tests.frontends.text.conftest import serving

MESSAGES: list[Any] = [{"role": "user", "content": "Hello"}]
NAMES = ("gpt-4o", "mine/net")
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 2},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 2},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
    "/api/chat": {"messages": MESSAGES, "stream": False},
    "/api/generate": {"prompt": "Hello", "stream": False},
}


@pytest.fixture(scope="module")
def renamed(text_dir: Path) -> Iterator[RunningServer]:
    with serving(text_dir, text=TextSettings(served_names=NAMES)) as running:
        yield running


@pytest.fixture(scope="module")
def lenient(text_dir: Path) -> Iterator[httpx.Client]:
    settings = TextSettings(takes_any_name=True)
    with serving(text_dir, text=settings) as running, httpx.Client(base_url=running.http_url, timeout=60) as client:
        yield client


def test_a_server_has_the_names_that_its_operator_gave_it(renamed: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{renamed.http_url}/v1", api_key="none", max_retries=0) as client:
        assert [each.id for each in client.models.list()] == list(NAMES)
        assert client.models.retrieve("mine/net").id == "mine/net"
        for name in (*NAMES, "ensemble"):
            answer = client.chat.completions.create(model=name, messages=MESSAGES, max_tokens=2)
            assert answer.model == name
        with pytest.raises(openai.NotFoundError, match="Known: gpt-4o, mine/net"):
            client.chat.completions.create(model="gpt-5", messages=MESSAGES)
    with ollama.Client(host=renamed.http_url) as llama:
        assert [each.model for each in llama.list().models] == list(NAMES)
        assert [each.model for each in llama.ps().models] == list(NAMES)
        assert llama.chat("gpt-4o:latest", MESSAGES, options={"num_predict": 2}).model == "gpt-4o:latest"
    told = httpx.get(f"{renamed.http_url}/v1/models/mine%2Fnet").json()
    assert (told["id"], told["root"]) == ("mine/net", "ensemble")


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("model", [{}, {"model": None}, {"model": ""}])
def test_a_request_need_not_name_the_only_model(http: httpx.Client, path: str, model: dict[str, Any]) -> None:
    answer = http.post(path, json={**BODIES[path], **model})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == "ensemble"


@pytest.mark.parametrize("path", BODIES)
def test_any_name_is_taken_where_that_is_wanted(lenient: httpx.Client, http: httpx.Client, path: str) -> None:
    body = {**BODIES[path], "model": "gpt-4o-mini"}
    answer = lenient.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == "ensemble"  # what has answered
    assert http.post(path, json=body).status_code == 404


def test_a_stream_has_the_name_of_what_answers(lenient: httpx.Client) -> None:
    body = {**BODIES["/v1/chat/completions"], "model": "x", "stream": True}
    assert '"model":"ensemble"' in lenient.post("/v1/chat/completions", json=body).text.replace(" ", "")


def test_no_model_is_meant_where_there_are_none() -> None:
    with running_server(StubCore) as running, httpx.Client(base_url=running.http_url) as client:
        answer = client.post("/v1/completions", json={"prompt": "Hello"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
        assert answer.json()["error"]["message"].startswith("no model that answers text with text is loaded; /v2")
        core = running.core
        assert isinstance(core, StubCore)
        core.is_ready = False
        assert client.post("/v1/completions", json={"prompt": "Hello"}).status_code == 503


@pytest.mark.parametrize("base", ["", "/", "/v1", "/v1/", "//v1//", "/v1/v1"])
def test_a_base_url_may_end_in_any_way(served: RunningServer, base: str) -> None:
    with openai.OpenAI(base_url=f"{served.http_url}{base}", api_key="none", max_retries=0) as client:
        assert client.models.list().data[0].id == "ensemble"
        assert client.chat.completions.create(model="ensemble", messages=MESSAGES, max_tokens=2).choices
        assert client.responses.create(model="ensemble", input="Hello", max_output_tokens=16).output
    with anthropic.Anthropic(base_url=f"{served.http_url}{base}", api_key="none", max_retries=0) as claude:
        assert claude.messages.create(model="ensemble", messages=MESSAGES, max_tokens=2).content


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions/", "/v1/chat/completions"),
        ("/api//chat/", "/api/chat"),
        ("/tokenize/", "/tokenize"),
        ("/v2/models/x/", "/v2/models/x/"),
        ("/", "/"),
        ("//", "//"),
        ("/page/", "/page/"),
    ],
)
def test_only_paths_of_these_apis_have_other_forms(path: str, meant: str) -> None:
    assert canonical(path) == meant


def test_an_unknown_path_is_told_as_the_api_tells_it(http: httpx.Client) -> None:
    assert http.get("/v1/nothing/").json()["error"]["message"] == "unknown route: GET /v1/nothing"


def test_health_and_version_are_told_without_the_api() -> None:
    with running_server(StubCore) as running, httpx.Client(base_url=running.http_url) as client:
        for path in ("/health", "/ping"):
            assert client.get(path).json() == {"status": "ok"}
        assert client.get("/version").json() == {"version": "1.2.3"}
        core = running.core
        assert isinstance(core, StubCore)
        core.is_ready = False
        answer = client.get("/health")
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")


async def test_a_chat_offers_what_can_be_talked_to(served: RunningServer) -> None:
    """Not the steps of an ensemble."""
    async with AsyncClient(served.grpc) as client:
        assert await client.model_names() == ["ensemble"]


def test_ollamas_version_is_the_programs(http: httpx.Client) -> None:
    assert http.get("/api/version").json() == {"version": __version__}


def test_clients_are_told_how_long_a_conversation_may_be(
    monkeypatch: pytest.MonkeyPatch, http: httpx.Client, served: RunningServer
) -> None:
    def told() -> list[object]:
        (model,) = http.get("/v1/models").json()["data"]
        counted = http.post("/tokenize", json={"model": "ensemble", "prompt": "Hello"}).json()
        return [model.get("max_model_len"), counted["max_model_len"]]

    assert told() == [None, None]
    monkeypatch.setattr(type(served.core), "facts", lambda self, name: {"max_model_len": 77})
    assert told() == [77, 77]


def test_a_fingerprint_is_of_the_engine(monkeypatch: pytest.MonkeyPatch, served: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{served.http_url}/v1", api_key="none", max_retries=0) as client:
        asked: dict[str, Any] = {"model": "ensemble", "messages": MESSAGES, "max_tokens": 2}
        assert client.chat.completions.create(**asked).system_fingerprint is None  # of an engine of nothing
        monkeypatch.setattr(type(served.core), "facts", lambda self, name: {"digest": "0123456789abcdef" * 4})
        assert client.chat.completions.create(**asked).system_fingerprint == "fp_0123456789ab"
        text = client.completions.create(model="ensemble", prompt="Hello", max_tokens=2)
        assert text.system_fingerprint == "fp_0123456789ab"
        chunks = client.chat.completions.create(**asked, stream=True)
        assert {chunk.system_fingerprint for chunk in chunks} == {"fp_0123456789ab"}


class TwoKinds:
    """A core with a language model and what makes vectors."""

    def __init__(self) -> None:
        folders = {"chat": PIPELINES, "vectors": PIPELINES.with_name("pipelines-embeddings")}
        self.configs = {
            name: text_format.Parse((path / "ensemble/config.pbtxt").read_text(), ModelConfig())
            for name, path in folders.items()
        }
        for name, config in self.configs.items():
            config.name = name

    def repository_index(self, *, ready: bool) -> list[SimpleNamespace]:
        return [SimpleNamespace(name=name) for name in self.configs]

    def model_config(self, name: str) -> ModelConfig:
        if name not in self.configs:
            raise NotFound(name)
        return self.configs[name]

    def facts(self, name: str) -> dict[str, str]:
        return {"digest": f"of-{name}"}

    def adapters(self, name: str) -> dict[str, Any]:
        return {}


def test_served_names_are_those_of_the_language_model_beside_an_embedder() -> None:
    core: Any = TwoKinds()
    texts = Ensembles(core, TextSettings(served_names=NAMES))
    vectors = Ensembles(core, TextSettings(served_names=NAMES), VECTORS)
    untold: Any = None
    models = Models(ApiState(texts, untold, untold, untold, vectors))
    data = json.loads(bytes(asyncio.run(models.list()).body))["data"]
    assert {each["id"]: each["engine"]["digest"] for each in data} == {
        **dict.fromkeys(NAMES, "of-chat"), "vectors": "of-vectors"
    }  # fmt: skip
    assert {each["root"] for each in data} == {"chat", "vectors"}
    assert [texts.find(name).name for name in (*NAMES, "chat")] == ["chat"] * 3
    assert vectors.find("vectors").name == "vectors"
    with pytest.raises(ModelNotFound, match="Known: vectors"):
        vectors.find(NAMES[0])
