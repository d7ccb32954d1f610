"""What holds where a request says nothing: the checkpoint's sampling, and a limit where no token ends an answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from llmserve.core import SamplingParams
from llmserve.frontends.shared.text_settings import TextSettings
from llmserve.frontends.text.requests.ensembles import Ensembles
from llmserve.frontends.text.state import LIMIT_WITHOUT_END
from tests.frontends.text.conftest import serving
from tests.frontends.text.talkers import WideEngine

MESSAGES: list[Any] = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
}
DEFAULTS = {"temperature": 0.5, "top_p": 0.75, "top_k": 7, "repetition_penalty": 1.25}


class Asked:
    """A server, and the sampling that its engine was asked for last."""

    def __init__(self, http: httpx.Client, engine: WideEngine) -> None:
        self.http = http
        self.uses_defaults = True
        self.engine = engine

    def __call__(self, path: str, **fields: Any) -> SamplingParams:
        answer = self.http.post(path, json={**BODIES[path], **fields})
        assert answer.status_code == 200, answer.text
        return self.engine.requests[-1].sampling


@pytest.fixture(scope="module", params=[True, False])
def asked(request: pytest.FixtureRequest, text_dir: Path) -> Iterator[Asked]:
    engine = WideEngine([[300]])
    settings = TextSettings(checkpoint_sampling=request.param)
    with (
        serving(text_dir, open_engine=lambda: engine, text=settings) as server,
        pytest.MonkeyPatch.context() as patch,
        httpx.Client(base_url=server.http_url, timeout=60) as http,
    ):
        patch.setattr(type(server.core), "facts", lambda self, name: {"sampling": DEFAULTS})
        made = Asked(http, engine)
        made.uses_defaults = request.param
        yield made


def numbers(sampling: SamplingParams) -> dict[str, float]:
    return {name: getattr(sampling, name) for name in DEFAULTS}


@pytest.mark.parametrize("path", BODIES)
def test_the_checkpoints_sampling_is_the_default(asked: Asked, path: str) -> None:
    openais = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
    wanted = DEFAULTS if asked.uses_defaults else openais
    assert numbers(asked(path)) == wanted
    assert numbers(asked(path, temperature=0.25, top_p=0.5)) == {**wanted, "temperature": 0.25, "top_p": 0.5}


def test_what_a_request_says_comes_first(asked: Asked) -> None:
    said = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
    assert numbers(asked("/v1/chat/completions", **said)) == said
    assert asked("/v1/responses", top_k=3, seed=5).top_k == 3


@pytest.mark.parametrize("path", BODIES)
def test_greedy_answers_have_no_defaults(asked: Asked, path: str) -> None:
    assert asked(path, temperature=0).is_greedy
    assert asked(path, temperature=0).repetition_penalty == 1.0


def test_ollamas_defaults_are_ollamas(asked: Asked) -> None:
    answer = asked.http.post("/api/chat", json={"messages": MESSAGES, "stream": False})
    assert answer.status_code == 200
    wanted = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.0}
    assert numbers(asked.engine.requests[-1].sampling) == pytest.approx(wanted)


@pytest.mark.parametrize("end_id", [-1, 2])
def test_an_answer_that_nothing_would_end_is_limited(
    text_dir: Path, monkeypatch: pytest.MonkeyPatch, end_id: int
) -> None:
    async def ends(self: Ensembles, ensemble: object) -> tuple[int, int]:
        return end_id, -1

    monkeypatch.setattr(Ensembles, "end_ids", ends)
    engine = WideEngine([[300]])
    with (
        serving(text_dir, open_engine=lambda: engine) as server,
        httpx.Client(base_url=server.http_url, timeout=60) as http,
    ):
        asked = Asked(http, engine)
        is_limited = end_id < 0
        path = "/v1/chat/completions"
        assert (asked(path).max_tokens == LIMIT_WITHOUT_END) is is_limited
        assert asked(path, max_tokens=2000).max_tokens == 2000
        answer = http.post(path, json=BODIES[path]).json()
        assert ("has no end token" in answer.get("warning", "")) is is_limited
