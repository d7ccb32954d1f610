"""tritonserver's command line, translated: forms of values, older names, what has no effect, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from llmserve.cli.app import app
from llmserve.cli.tritonserver_flags import BOOLEANS, NO_EFFECT, OWN_BOOLEANS, REFUSED, translate


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--allow-http=true"], ["--allow-http"]),
        (["--allow-http=0"], ["--no-allow-http"]),
        (["--allow-http", "OFF", "engine"], ["--no-allow-http", "engine"]),
        (["--exit-on-error", "engine"], ["--exit-on-error", "engine"]),
        (["--no-exit-on-error"], ["--no-exit-on-error"]),
        (["--grpc-use-ssl=1", "--grpc-use-ssl-mutual=false"], ["--grpc-use-ssl", "--no-grpc-use-ssl-mutual"]),
        (["--strict-model-config=true"], ["--disable-auto-complete-config"]),
        (["--strict-model-config=false"], []),
        (["--response-cache-byte-size", "100"], ["--cache-config=local,size=100"]),
        (["--log-verbose=true"], ["--log-verbose=1"]),
        (["--log-verbose", "2"], ["--log-verbose=2"]),
        (["--log-verbose=false"], ["--log-verbose=0"]),
        (["--http-port", "1", "--model-repository=a=b"], ["--http-port", "1", "--model-repository=a=b"]),
        (["--", "--allow-http=true"], ["--", "--allow-http=true"]),
        (["--no-such-flag=1", "--help", "-x"], ["--no-such-flag=1", "--help", "-x"]),
    ],
)
def test_translation(given: list[str], expected: list[str]) -> None:
    done = translate(given)
    assert (done.arguments, done.without_effect, done.problems) == (expected, [], [])


def test_flags_without_effect_take_their_values_along() -> None:
    done = translate(["--host-policy", "gpu_0,numa-node=0", "--grpc-http2-max-ping-strikes=1", "engine"])
    assert done.arguments == ["engine"]
    assert [text.split()[0] for text in done.without_effect] == ["--host-policy", "--grpc-http2-max-ping-strikes"]


@pytest.mark.parametrize(
    "given",
    [
        ["--enable-peer-access=true"],
        ["--enable-peer-access"],
        ["--enable-peer-access", "false"],
        ["--vertex-ai-address", "0.0.0.0"],
    ],
)
def test_flags_without_effect_of_each_form(given: list[str]) -> None:
    done = translate([*given, "engine"])
    assert (done.arguments, len(done.without_effect), done.problems) == (["engine"], 1, [])


@pytest.mark.parametrize("flag", ["--model-namespacing=1", "--allow-sagemaker", "--allow-vertex-ai=true"])
def test_what_would_be_another_service_is_refused(flag: str) -> None:
    done = translate([flag])
    assert (done.arguments, len(done.problems)) == ([], 1)


def test_restrictions_pass_as_they_are() -> None:
    given = ["--http-restricted-api", "health:key=value", "--grpc-restricted-protocol=health,trace:key=a=b"]
    assert translate([*given, "--allow-client-shm=true"]).arguments == [*given, "--allow-client-shm"]


def test_a_refused_flag_that_is_off_is_no_problem() -> None:
    done = translate(["--allow-sagemaker=false", "--allow-vertex-ai", "false", "--model-namespacing=0"])
    assert (done.arguments, done.without_effect, done.problems) == ([], [], [])


def test_a_boolean_that_is_none() -> None:
    assert translate(["--exit-on-error=maybe"]).problems == ["--exit-on-error=maybe: expected true or false"]


def test_a_flag_is_either_ours_or_translated() -> None:
    commands: Any = typer.main.get_command(app)
    ours = {name.removeprefix("--") for each in commands.commands["serve"].params for name in each.opts}
    theirs = {flag for flags in NO_EFFECT.values() for flag in flags} | REFUSED.keys()
    assert ours & theirs == set()
    assert set(OWN_BOOLEANS) <= ours & BOOLEANS


def test_tritonserver_is_another_name_of_serve() -> None:
    commands: Any = typer.main.get_command(app)
    serve, tritonserver = commands.commands["serve"], commands.commands["tritonserver"]
    assert type(serve) is type(tritonserver)
    assert [one.opts for one in serve.params] == [one.opts for one in tritonserver.params]
