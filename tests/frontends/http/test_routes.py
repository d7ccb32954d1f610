"""Paths and the handlers that they mean."""

from __future__ import annotations

import pytest

from llmserve.frontends.http.routes import Routes
from llmserve.wire.http1.answers import Answer, WholeAnswer
from llmserve.wire.http1.request import Request
from tests.frontends.http.test_inference_api import Http
from tests.frontends.server import running_server
from tests.frontends.stub_core import StubCore


async def handler(request: Request) -> Answer:
    return WholeAnswer()


@pytest.fixture
def routes() -> Routes:
    made = Routes()
    for path in ("/v2", "/v2/models/stats", "/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        made.add("GET", path, handler)
    for path in ("/v2/models/{model}/infer", "/v2/models/{model}/versions/{version}/infer"):
        made.add("POST", path, handler)
    return made


@pytest.mark.parametrize(
    ("path", "params"),
    [
        ("/v2", {}),
        ("/v2/models/stats", {}),
        ("/v2/models/m", {"model": "m"}),
        ("/v2/models/m/versions/12", {"model": "m", "version": "12"}),
        ("/v2/models/stats/infer", {"model": "stats"}),
        ("/v2/models/versions/versions/1/infer", {"model": "versions", "version": "1"}),
    ],
)
def test_paths_that_are_found(routes: Routes, path: str, params: dict[str, str]) -> None:
    method = "POST" if path.endswith("infer") else "GET"
    found = routes.find(method, path)
    assert found is not None
    assert (found.handler, found.params) == (handler, params)
    assert (other := routes.find("PUT", path)) is not None
    assert other.handler is None


@pytest.mark.parametrize(
    "path",
    [
        "", "/", "/v2/", "//v2", "/v3", "/v2/models", "/v2/models/", "/v2/models//infer", "/v2/models/m/infer/", "v2",
        "/v2/models/m/n/infer", "/v2/models/m/versions", "/v2/models/m/versions/x", "/v2/models/m/versions/1/2", "x:80",
        "/v2/models/m/versions/²/infer", "/v2/models/{model}/versions/-1/infer",
    ],
)  # fmt: skip
def test_paths_that_are_not(routes: Routes, path: str) -> None:
    assert routes.find("GET", path) is None
    assert routes.find("POST", path) is None


def test_the_root_is_a_path_like_others(routes: Routes) -> None:
    assert routes.find("GET", "/") is None
    routes.add("GET", "/", handler)
    found = routes.find("GET", "/")
    assert found is not None
    assert found.handler is handler
    for path in ("", "//", "*", "x:80", "v2", "/v2/"):
        assert routes.find("GET", path) is None


def test_a_prefix_of_all_paths() -> None:
    with running_server(StubCore, root_path="/llm") as running:
        call = Http(running.http_port)
        for path in ("/v2/health/live", "/llm/v2/health/live", "/llm/v1/models", "/v1/models", "/llm/models"):
            assert call("GET", path)[0] == 200, path
        for path in ("/llmv2/health/live", "/llm/llm/v1/models", "/other/v1/models"):
            assert call("GET", path)[0] == 404, path
        call.connection.close()
