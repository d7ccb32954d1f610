"""Which requests do without Starlette: inference on paths that are certainly right."""

from __future__ import annotations

import pytest
from starlette.types import Receive, Scope, Send

from llmserve.frontends.extensions import Extensions
from llmserve.frontends.http import InferenceApi, Shortcut
from tests.frontends.stub_core import StubCore


async def elsewhere(scope: Scope, receive: Receive, send: Send) -> None:
    pytest.fail("not asked here")


@pytest.mark.parametrize(
    ("method", "path", "params"),
    [
        ("POST", "/v2/models/m/infer", {"model": "m"}),
        ("POST", "/v2/models/m/generate", {"model": "m"}),
        ("POST", "/v2/models/m/versions/12/generate_stream", {"model": "m", "version": "12"}),
        ("GET", "/v2/models/m/infer", None),
        ("POST", "/v2/models/m/load", None),
        ("POST", "/v2/models/m/infer/", None),
        ("POST", "/v2/models//infer", None),
        ("POST", "/v3/models/m/infer", None),
        ("POST", "/v2/models/m/versions/x/infer", None),
        ("POST", "/v2/models/m/version/1/infer", None),
        ("POST", "/v2/models/m/n/o/infer", None),
    ],
)
def test_what_is_found(method: str, path: str, params: dict[str, str] | None) -> None:
    shortcut = Shortcut(InferenceApi(StubCore(), Extensions(), 1000), elsewhere)
    scope = {"type": "http", "method": method, "path": path}
    found = shortcut._find(scope)
    assert (found is None) == (params is None)
    assert scope.get("path_params") == params
