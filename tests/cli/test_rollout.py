"""The command line of rollouts; what it does in a real server is in tests/e2e/test_rollout.py."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig
from typer.testing import CliRunner, Result

from llmserve.cli.app import app
from llmserve.cli.rollout import RolloutOptions
from llmserve.errors import InvalidArgument, LlmserveError, NotFound, Unavailable
from llmserve.serving.config.rollout_rules import make_rules
from llmserve.serving.loading.deployment import Deployment
from llmserve.serving.loading.repository import ModelSource
from llmserve.serving.rollout.candidates import VersionCandidate
from llmserve.serving.rollout.report import rollout_report
from llmserve.serving.rollout.rollout import Rollout
from tests.frontends.server import RunningServer
from tests.frontends.stub_core import StubCore
from tests.serving.rollout.test_rollouts import QUICK


@pytest.fixture(autouse=True)
def _nothing_was_rolled_out(core: StubCore) -> Iterator[None]:
    core.rolled_out.clear()
    yield
    core.rolled_out.clear()


def run(server: RunningServer, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["rollout", *arguments, "--url", server.http])


def failure(result: Result) -> LlmserveError:
    assert isinstance(result.exception, LlmserveError), result.output
    return result.exception


def report(core: StubCore, state: str = "canary") -> dict[str, Any]:
    """As a server makes it. It is not carried out."""
    source = ModelSource("echo", Path(), ModelConfig(), (1,), ())
    candidate = VersionCandidate(source, "2", "1", {"gpt_model_path": "/e"}, cast(Deployment, None))
    made = Rollout("echo", candidate, make_rules(QUICK), lambda rollout, decision: None)
    made.note("started", "it is beside version 1")
    document: dict[str, Any] = json.loads(json.dumps(rollout_report(made))) | {"state": state}
    core.rolled_out["echo"] = document
    return document


def test_start_sends_what_was_given(server: RunningServer, core: StubCore, tmp_path: Path) -> None:
    rules = "--shadow 10% --canary 5%,25% --requests 50 --seconds 2.5 --max-error-rate 0.02 --min-agreement none"
    more = "--max-latency-ratio 1.5 --timeout 5 --by-hand --version 3"
    run(server, "start", "echo", "--engine", str(tmp_path), *shlex.split(f"{rules} {more}"))
    assert core.rolled_out["echo"]["asked"] == {
        "version": "3",
        "parameters": {"gpt_model_path": str(tmp_path), "tokenizer_dir": str(tmp_path)},
        "adapter": None,
        "rules": {
            "shadow": "10%", "canary": ["5%", "25%"], "requests": 50, "seconds": 2.5, "max_error_rate": 0.02,
            "min_agreement": None, "max_latency_ratio": 1.5, "timeout_s": 5, "promote": "by_hand",
        },
    }  # fmt: skip
    make_rules(core.rolled_out["echo"]["asked"]["rules"])
    run(server, "start", "echo")
    assert core.rolled_out["echo"]["asked"] == {"version": "", "parameters": {}, "rules": {}, "adapter": None}
    run(server, "start", "echo", "--adapter", f"formal={tmp_path}", "--shadow", "0")
    adapter = {"name": "formal", "path": tmp_path}
    assert core.rolled_out["echo"]["asked"] == {
        "version": "", "parameters": {}, "rules": {"shadow": 0}, "adapter": adapter,
    }  # fmt: skip
    assert RolloutOptions.rules(RolloutOptions("start", canary="none")) == {"canary": []}  # type: ignore[arg-type]


def test_status_is_for_people_or_for_programs(server: RunningServer, core: StubCore) -> None:
    assert run(server, "status").output == "no rollout since the server was started\n"
    document = report(core)
    for arguments in (("status",), ("status", "echo")):
        lines = run(server, *arguments).output.splitlines()
        assert lines[0] == "rollout of echo"
        assert "  state      canary, step 1 of 3, canary 0%, shadow 0%" in lines
        assert "  made with  gpt_model_path = /e" in lines
        assert lines[-1].endswith("started: it is beside version 1")
    assert json.loads(run(server, "status", "--json").output) == [document]


@pytest.mark.parametrize(("state", "code"), [("promoted", 0), ("rolled_back", 1), ("failed", 1)])
def test_who_waits_learns_the_end(server: RunningServer, core: StubCore, state: str, code: int) -> None:
    report(core, state)
    result = run(server, "status", "echo", "--wait")
    assert (result.exit_code, result.exception is None or isinstance(result.exception, SystemExit)) == (code, True)
    assert json.loads(run(server, "status", "echo", "--wait", "--json").output)[0]["state"] == state


def test_promote_and_abort(server: RunningServer, core: StubCore) -> None:
    report(core)
    assert "promoted, step" in run(server, "promote", "echo").output
    assert "rolled_back slow, step" in run(server, "abort", "echo", "--reason", "slow").output


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("start",), "llmserve rollout start: it needs the name of a model"),
        (("abort", "echo", "--version", "2"), "--version: only for rollout start"),
        (("status", "echo", "--shadow", "5%"), "a rule: only for rollout start"),
        (("start", "echo", "--reason", "x"), "--reason: only for rollout abort"),
        (("start", "echo", "--adapter", "formal"), "--adapter formal: expected NAME=DIR"),
        (
            ("start", "echo", "--adapter", "a=b", "--version", "2"),
            "--adapter: not with --engine or --version",
        ),
        (("promote", "echo", "--adapter", "a=b"), "--adapter: only for rollout start"),
        (("status", "--wait"), "--wait: requires the name of a model"),
    ],
)
def test_what_does_not_go_together_is_refused(server: RunningServer, arguments: tuple[str, ...], problem: str) -> None:
    error = failure(run(server, *arguments))
    assert isinstance(error, InvalidArgument)
    assert problem in str(error)


def test_what_the_server_says_is_told(server: RunningServer, tmp_path: Path) -> None:
    error = failure(run(server, "status", "echo"))
    assert isinstance(error, NotFound)
    assert str(error) == "model 'echo' has had no rollout since the server was started"
    gone = CliRunner().invoke(app, ["rollout", "status", "--url", "localhost:1"])
    assert isinstance(failure(gone), Unavailable)
    assert "no server answers at http://localhost:1" in str(gone.exception)
    assert isinstance(failure(CliRunner().invoke(app, ["rollout", "status", "--url", "ftp2://x"])), LlmserveError)
    wrong = failure(run(server, "status", "--root-certificates", str(tmp_path / "none.pem")))
    assert "none.pem cannot be read" in str(wrong)
