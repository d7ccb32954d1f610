"""Clients of other makes than gRPC's C core, each with HTTP/2 of its own.

grpc-js (on Node's nghttp2), grpc-go, grpc-java (on Netty), and the command-line clients nghttp, h2load and curl. `make
test-clients` installs or names them; a test without its client is skipped, and says what is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from tritonclient.grpc import service_pb2

from llmserve.wire.http2.messages import framed
from tests.clients.programs import HERE, LANGUAGES, build
from tools.servers import HOST, Endpoint, free_ports, llmserve_server

FLAGS = ("--grpc-header-forward-pattern", "^x-")
SCENARIOS = (
    "unary", "large", "many", "stream", "stream_error", "cancel", "deadline", "metadata", "error", "gzip",
    "keepalive", "settings",
)  # fmt: skip
SERVICE = "/inference.GRPCInferenceService"
TIMEOUT_S = 120


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    with llmserve_server(HERE / "repository", tmp_path_factory.mktemp("log") / "log.txt", *FLAGS) as endpoint:
        yield endpoint


@pytest.fixture(scope="module", params=LANGUAGES)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command of a client; arguments are the server's address and what to do."""
    return build(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def message(tmp_path: Path) -> Path:
    """A request as it is on the wire: of an empty message."""
    path = tmp_path / "message"
    path.write_bytes(framed(service_pb2.ServerReadyRequest().SerializeToString()))
    return path


def output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        pytest.skip(f"there is no {command[0]}")
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, errors="replace")
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_calls(server: Endpoint, program: list[str]) -> None:
    done = subprocess.run([*program, server.grpc, *SCENARIOS], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.stdout.splitlines() == [f"ok {name}" for name in SCENARIOS], done.stderr


def test_calls_over_tls(program: list[str], tmp_path: Path) -> None:
    if program[0] == "java":
        pytest.skip("Debian's Netty cannot negotiate HTTP/2 over TLS")
    authority = trustme.CA()
    issued = authority.issue_cert(HOST)
    authority.cert_pem.write_to_path(tmp_path / "root")
    issued.private_key_pem.write_to_path(tmp_path / "key")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "cert")
    files = (f"--grpc-server-cert={tmp_path / 'cert'}", f"--grpc-server-key={tmp_path / 'key'}")
    scenarios = ["unary", "large", "many", "stream", "cancel"]
    environment = {**os.environ, "ROOT": str(tmp_path / "root")}
    with llmserve_server(HERE / "repository", tmp_path / "log.txt", "--grpc-use-ssl=true", *files) as server:
        command = [*program, server.grpc, *scenarios]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    assert done.stdout.splitlines() == [f"ok {name}" for name in scenarios], done.stderr


def test_a_restart(program: list[str], tmp_path: Path) -> None:
    """Calls in flight when the server stops are answered or UNAVAILABLE, and the same channel finds the next server."""
    (port,) = free_ports(1)
    flags = (*FLAGS, f"--grpc-port={port}")
    with llmserve_server(HERE / "repository", tmp_path / "1.txt", *flags):
        client = subprocess.Popen(
            [*program, f"{HOST}:{port}", "restart"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert client.stdout is not None
        assert client.stdout.readline() == "go\n"
    with llmserve_server(HERE / "repository", tmp_path / "2.txt", *flags):
        assert client.communicate("\n", timeout=TIMEOUT_S)[0] == "ok restart\n"


def test_nghttp(server: Endpoint, message: Path) -> None:
    headers = ["-H:method: POST", "-Hcontent-type: application/grpc", "-Hte: trailers"]
    table = ["--header-table-size=0", "--encoder-header-table-size=0", "--continuation"]
    urls = [f"http://{server.grpc}{SERVICE}/{method}" for method in ("ServerReady", "ServerLive")]
    odd = [*table, "--window-bits=4", "--padding=200", f"--data={message}"]
    seen = output("nghttp", "--verbose", *odd, *headers, *urls)
    assert seen.count("grpc-status: 0") == 2


def test_h2load(server: Endpoint, message: Path) -> None:
    load = ["--requests=5000", "--clients=8", "--max-concurrent-streams=64", f"--data={message}"]
    url = f"http://{server.grpc}{SERVICE}/ServerReady"
    assert "5000 succeeded, 0 failed" in output("h2load", *load, "--header=content-type: application/grpc", url)


def test_curl(server: Endpoint, message: Path, tmp_path: Path) -> None:
    request = ["--silent", "--http2-prior-knowledge", "--data-binary", f"@{message}", "--header", "te: trailers"]
    kind = ["--header", "content-type: application/grpc", "--output", str(tmp_path / "reply"), "--dump-header", "-"]
    assert "grpc-status: 0" in output("curl", *request, *kind, f"http://{server.grpc}{SERVICE}/ServerReady")
    reply = service_pb2.ServerReadyResponse(ready=True)
    assert (tmp_path / "reply").read_bytes() == framed(reply.SerializeToString())
    assert "HTTP/2 415" in output("curl", "--silent", "--include", "--http2-prior-knowledge", f"http://{server.grpc}/")
