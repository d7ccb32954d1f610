"""`llmserve serve` with flags that say who may do what, and what it says at start of what everybody may do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

from llmserve.cli.access import (
    GRPC_VARIABLE,
    HTTP_VARIABLE,
    exposures,
    grpc_restrictions,
    http_restrictions,
    is_loopback,
    make_api_keys,
)
from llmserve.cli.serve_options import ServeOptions
from llmserve.client import Access, Client
from llmserve.errors import LlmserveError
from llmserve.frontends.shared.extension_state import Extensions
from llmserve.serving.settings import ControlMode
from tests.cli.test_serve import LLMSERVE, Server, identity_model, run, servers, start
from tests.frontends.server import HOST, wait_until

__all__ = ["servers"]
OPEN = {"host": "0.0.0.0", "model_control_mode": ControlMode.EXPLICIT}
HTTP_KEY, GRPC_KEY = "model-repository,shared-memory:admin-key=one", "model-repository,shared-memory:admin-key=two"


def said(**options: Any) -> list[str]:
    made = ServeOptions(**options)
    extensions = Extensions(
        http_restrictions=http_restrictions(made),
        grpc_restrictions=grpc_restrictions(made),
        api_keys=make_api_keys(made),
    )
    return list(exposures(made, extensions))


def test_restricted_groups_over_both_protocols(tmp_path: Path, servers: list[Server]) -> None:
    repository = identity_model(tmp_path, "m")
    flags = ["--http-restricted-api=health,statistics:k=v", "--http-restricted-api", "inference:j=w"]
    servers.append(
        server := start(f"--model-repository={repository}", *flags, "--grpc-restricted-protocol=inference:k=v")
    )
    assert server.http("GET", "/v2/health/live")[0] == 403
    assert server.http("GET", "/v2")[0] == 200
    status, body = server.infer("m")
    assert (status, json.loads(body)) == (403, {"error": "This API is restricted, expecting header 'j'"})
    with triton.InferenceServerClient(f"{HOST}:{server.port('GRPCInferenceService')}") as client:
        assert client.is_server_live()
        tensor = triton.InferInput("IN", [1], "INT32")
        tensor.set_data_from_numpy(np.array([5], np.int32))
        with pytest.raises(InferenceServerException, match="expecting header 'triton-grpc-protocol-k'"):
            client.infer("m", [tensor])
        answer = client.infer("m", [tensor], headers={"triton-grpc-protocol-k": "v"})
        assert answer.as_numpy("OUT").tolist() == [5]


def test_shared_memory_is_off_until_it_is_allowed(tmp_path: Path, servers: list[Server]) -> None:
    repository = identity_model(tmp_path, "m")
    name = f"llmserve-access-{os.getpid()}"
    region = shm.create_shared_memory_region("region", name, 16, create_only=True)
    try:
        for flags, status in (([], 501), (["--allow-client-shm=true"], 200), (["--allow-client-shm=false"], 501)):
            servers.append(server := start(f"--model-repository={repository}", *flags))
            body = {"key": f"/{name}", "byte_size": 16}
            answer = server.http("POST", "/v2/systemsharedmemory/region/r/register", body)
            assert (answer[0], b"Client shared memory is disabled" in answer[1]) == (status, status == 501)
    finally:
        shm.destroy_shared_memory_region(region)


def test_model_control_that_everybody_reaches_is_loud(tmp_path: Path, servers: list[Server]) -> None:
    repository = identity_model(tmp_path, "m")
    flags = [f"--model-repository={repository}", "--model-control-mode=explicit", "--host=0.0.0.0", "--load-model=m"]
    ports = ["--http-port=0", "--grpc-port=0", "--metrics-port=0"]
    result = start_and_stop(servers, *flags, *ports)
    assert result.count("can load models, including files in the request: code that runs with") == 2
    assert "WARNING" in result
    quiet = start_and_stop(servers, *flags, *ports, f"--http-restricted-api={HTTP_KEY}", "--grpc-address=127.0.0.1")
    assert "can load models" not in quiet
    assert "one" not in quiet.replace("--", "")


def start_and_stop(servers: list[Server], *flags: str) -> str:
    servers.append(server := start(*flags))
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: server.process.poll() == 0)
    return "".join(server.printed)


@pytest.mark.parametrize(
    ("options", "ports"),
    [
        (OPEN, ["HTTP on 0.0.0.0:8000", "gRPC on 0.0.0.0:8001"]),
        (OPEN | {"host": "::"}, ["HTTP on :::8000", "gRPC on :::8001"]),
        (OPEN | {"host": ""}, ["HTTP on :8000", "gRPC on :8001"]),
        (OPEN | {"host": "127.0.0.1"}, []),
        (OPEN | {"host": "localhost"}, []),
        (OPEN | {"host": "::1"}, []),
        (OPEN | {"host": "127.0.0.1", "grpc_address": "0.0.0.0"}, ["gRPC on 0.0.0.0:8001"]),
        (OPEN | {"http_address": "127.0.0.1"}, ["gRPC on 0.0.0.0:8001"]),
        (OPEN | {"allow_grpc": False}, ["HTTP on 0.0.0.0:8000"]),
        (OPEN | {"allow_http": False, "grpc_use_ssl": True}, ["gRPC on 0.0.0.0:8001"]),
        (OPEN | {"allow_http": False, "grpc_use_ssl_mutual": True}, []),
        (OPEN | {"allow_grpc": False, "http_use_ssl": True}, ["HTTP on 0.0.0.0:8000"]),
        (OPEN | {"allow_grpc": False, "http_use_ssl_mutual": True}, []),
        (OPEN | {"http_restricted_api": [HTTP_KEY]}, ["gRPC on 0.0.0.0:8001"]),
        (OPEN | {"http_restricted_api": ["inference:k=v"], "allow_grpc": False}, ["HTTP on 0.0.0.0:8000"]),
        (OPEN | {"http_restricted_api": [HTTP_KEY], "grpc_restricted_protocol": [GRPC_KEY]}, []),
        (OPEN | {"model_control_mode": ControlMode.POLL}, []),
        (OPEN | {"model_control_mode": ControlMode.NONE}, []),
    ],
)
def test_which_ports_let_everybody_load_models(options: dict[str, Any], ports: list[str]) -> None:
    assert [line.split("reaches ")[1].split(" can")[0] for line in said(**options)] == ports


def test_shared_memory_that_everybody_reaches() -> None:
    lines = said(allow_client_shm=True, allow_grpc=False)
    assert ["can read and write the shared memory" in line for line in lines] == [True]
    assert "--http-restricted-api=shared-memory:HEADER=VALUE" in lines[0]
    assert said(allow_client_shm=True, http_restricted_api=[HTTP_KEY], grpc_restricted_protocol=[GRPC_KEY]) == []


def test_loopback() -> None:
    assert [is_loopback(host) for host in ("127.3.2.1", "::1", "localhost")] == [True] * 3
    assert [is_loopback(host) for host in ("", "0.0.0.0", "::", "192.0.2.1", "no.such.host.invalid")] == [False] * 5


def test_keys_from_the_environment_are_added_to_those_of_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HTTP_VARIABLE, "model-repository:a=b trace,logging:c=d")
    monkeypatch.setenv(GRPC_VARIABLE, "model-repository:a=b")
    options = ServeOptions(http_restricted_api=["health:k=v"])
    assert sorted(http_restrictions(options).keys) == ["health", "logging", "model-repository", "trace"]
    assert [key.header for key in grpc_restrictions(options).keys.values()] == ["triton-grpc-protocol-a"]
    assert HTTP_VARIABLE not in os.environ


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--http-restricted-api=nothing:k=topsecret", "unknown restricted api 'nothing'"),
        ("--grpc-restricted-protocol=health:topsecret", "--grpc-restricted-protocol: option format is"),
    ],
)
def test_wrong_restrictions_are_said_at_start(tmp_path: Path, flag: str, words: str) -> None:
    result = run("--model-repository", str(identity_model(tmp_path, "m")), flag)
    text = " ".join(result.stderr.split())
    assert (result.returncode, words in text, "topsecret" in text) == (2, True, False), result.stderr


def test_api_keys_from_the_command_line_to_the_client(tmp_path: Path, servers: list[Server]) -> None:
    made = subprocess.run([*LLMSERVE, "api-key", "team-a"], capture_output=True, text=True, check=True).stdout
    key, _, entry = made.partition("\n")
    file = tmp_path / "keys.yaml"
    file.write_text(f"keys:\n{entry}")
    repository = identity_model(tmp_path / "repository", "m")
    servers.append(server := start(f"--model-repository={repository}", "--api-keys", str(file)))
    assert server.http("GET", "/v2/health/live")[0] == 200
    assert server.http("GET", "/v2")[0] == 401
    url = f"{HOST}:{server.port('GRPCInferenceService')}"
    with Client(url, model="m") as client, pytest.raises(LlmserveError, match="requires an API key"):
        client.config()
    with Client(url, model="m", access=Access(key)) as client:
        assert client.config().name == "m"
    asked = [*LLMSERVE, "chat", "--url", url, "--model", "m", "--once", "hello"]
    without = subprocess.run(asked, capture_output=True, text=True, timeout=60)
    assert "requires an API key" in without.stderr
    answered = subprocess.run(
        asked, capture_output=True, text=True, timeout=60, env={**os.environ, "LLMSERVE_API_KEY": key}
    )
    assert "API key" not in answered.stderr
    assert key not in "".join(server.printed)


def test_keys_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMSERVE_API_KEY", "user-0123456789abcdef")
    monkeypatch.setenv("LLMSERVE_ADMIN_API_KEY", "admin-0123456789abcdef")
    keys = make_api_keys(ServeOptions())
    assert keys is not None
    owners = [keys.owner(f"{name}-0123456789abcdef".encode()) for name in ("user", "admin")]
    assert [owner.is_admin for owner in owners if owner] == [False, True]
    assert "LLMSERVE_API_KEY" not in os.environ
    assert make_api_keys(ServeOptions()) is None
    monkeypatch.setenv("LLMSERVE_API_KEY", "user-0123456789abcdef")
    assert said(**OPEN) == []
