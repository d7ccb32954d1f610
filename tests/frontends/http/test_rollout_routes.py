"""The routes of rollouts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.frontends.http.test_inference_api import Http
from tests.frontends.server import RunningServer
from tests.frontends.stub_core import StubCore

PATH = "/v2/repository/models/echo/rollout"


@pytest.fixture
def call(server: RunningServer, core: StubCore) -> Iterator[Http]:
    core.rolled_out.clear()
    made = Http(server.http_port)
    yield made
    made.connection.close()


def ask(call: Http, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    status, content = call(method, path, body)
    return status, json.loads(content)


def test_a_rollout_is_started_watched_and_ended(call: Http) -> None:
    assert ask(call, "GET", "/v2/repository/rollouts") == (200, [])
    given = {"version": 2, "parameters": {"gpt_model_path": "/e"}, "rules": {"shadow": "5%"}}
    report = {"model": "echo", "asked": {**given, "version": "2", "adapter": None}}
    assert ask(call, "POST", f"{PATH}/start", given) == (200, report)
    assert ask(call, "GET", PATH) == (200, report)
    assert ask(call, "GET", "/v2/repository/rollouts") == (200, [report])
    assert ask(call, "POST", f"{PATH}/promote")[1]["state"] == "promoted"
    assert ask(call, "POST", f"{PATH}/abort", {"reason": "slow"})[1]["state"] == "rolled_back slow"
    nothing: dict[str, Any] = {"version": "", "parameters": {}, "rules": {}, "adapter": None}
    assert ask(call, "POST", f"{PATH}/start")[1]["asked"] == nothing


@pytest.mark.parametrize(
    ("verb", "body", "problem"),
    [
        (
            "start",
            {"engine": "/e"},
            "unknown member 'engine' of the request; known: version, parameters, rules, adapter",
        ),
        ("start", {"adapter": {"name": "a", "file": "/d"}}, "unknown member 'file' of adapter; known: name, path"),
        ("start", {"adapter": {}}, "adapter needs name and path: a name and the path of its directory"),
        ("start", {"adapter": {"name": "a", "path": 1}}, "string"),
        ("start", {"adapter": "a"}, "object"),
        ("start", {"parameters": {"a": 1}}, "string"),
        ("start", {"parameters": []}, "object"),
        ("start", {"version": []}, "string"),
        ("start", [], "object"),
        ("promote", {"reason": "x"}, "unknown member 'reason' of the request; known: none"),
        ("abort", {"reason": 1}, "string"),
    ],
)
def test_what_is_not_understood_is_refused(call: Http, verb: str, body: Any, problem: str) -> None:
    status, answer = ask(call, "POST", f"{PATH}/{verb}", body)
    assert status >= 400
    assert problem in answer["error"]


def test_what_there_is_not_is_said(call: Http) -> None:
    assert ask(call, "GET", PATH) == (404, {"error": "model 'echo' has had no rollout since the server was started"})
    status, answer = ask(call, "POST", "/v2/repository/models/nothing/rollout/start", {})
    assert status == 404
    assert "'nothing' is not found" in answer["error"]
