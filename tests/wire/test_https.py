"""HTTP over TLS: with the official clients, large bodies and streams, and clients that do not speak it."""

from __future__ import annotations

import http.client
import ssl
import urllib.request
from collections.abc import Iterator

import httpx
import numpy as np
import pytest
import tritonclient.http as triton

from llmserve.wire.http1 import server as http1_server
from llmserve.wire.tls import TlsFiles, server_context
from tests.frontends.server import HOST, RunningServer, running_server
from tests.frontends.stub_core import StubCore
from tests.wire.test_tls import Files, issue, problem_of


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return issue(tmp_path_factory.mktemp("https") / "ours")


def server_of(files: Files, *, mutual: bool) -> Iterator[RunningServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http1_server, "HANDSHAKE_TIMEOUT_S", 0.5)
        given = TlsFiles(files.server_cert, files.server_key, files.root, mutual=mutual, port="http")
        with running_server(StubCore, http_tls=server_context(given)) as running:
            yield running


@pytest.fixture(scope="module")
def server(files: Files) -> Iterator[RunningServer]:
    yield from server_of(files, mutual=False)


@pytest.fixture(scope="module")
def mutual(files: Files) -> Iterator[RunningServer]:
    yield from server_of(files, mutual=True)


def trusting(files: Files, *, with_certificate: bool = False) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=files.root)
    if with_certificate:
        context.load_cert_chain(files.client_cert, files.client_key)
    return context


def test_tritons_client(server: RunningServer, files: Files) -> None:
    with triton.InferenceServerClient(
        server.http, ssl=True, ssl_context_factory=lambda: trusting(files), network_timeout=30
    ) as client:
        assert client.is_server_live()
        data = np.random.default_rng(0).random((1, 40_000), dtype=np.float32)
        inputs = [triton.InferInput(name, data.shape, "FP32") for name in ("INPUT0", "INPUT1")]
        for each in inputs:
            each.set_data_from_numpy(data)
        assert np.array_equal(client.infer("add_two", inputs).as_numpy("OUTPUT0"), data + data)


def test_streams_and_slow_readers(server: RunningServer, files: Files) -> None:
    with httpx.Client(verify=trusting(files), base_url=f"https://{server.http}") as client:
        with client.stream("POST", "/v2/models/count/generate_stream", json={"N": 5}) as answer:
            events = [line for line in answer.iter_lines() if line]
        assert len(events) == 5
        with client.stream("POST", "/v2/models/flood/generate_stream", json={}) as answer:
            pieces = answer.iter_bytes()
            assert len(next(pieces)) > 0
        assert client.get("/v2/health/live").status_code == 200


def test_metrics(server: RunningServer, files: Files) -> None:
    url = f"https://{HOST}:{server.metrics_port}/metrics"
    assert urllib.request.urlopen(url, context=trusting(files), timeout=10).status == 200


def test_http_1_is_what_is_agreed_on(server: RunningServer, files: Files) -> None:
    context = trusting(files)
    context.set_alpn_protocols(["h2", "http/1.1"])
    connection = http.client.HTTPSConnection(HOST, server.http_port, context=context, timeout=10)
    connection.connect()
    assert isinstance(connection.sock, ssl.SSLSocket)
    assert connection.sock.selected_alpn_protocol() == "http/1.1"
    connection.close()


def test_a_client_that_speaks_plainly(server: RunningServer, files: Files) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://{server.http}/v2/health/live")
    assert httpx.get(f"https://{server.http}/v2/health/live", verify=trusting(files)).status_code == 200


def test_clients_with_and_without_a_certificate(mutual: RunningServer, files: Files) -> None:
    url = f"https://{mutual.http}/v2/health/live"
    assert httpx.get(url, verify=trusting(files, with_certificate=True)).status_code == 200
    with pytest.raises((httpx.NetworkError, httpx.RemoteProtocolError)):
        httpx.get(url, verify=trusting(files))


def test_what_is_wrong_with_files_names_the_ports_flags() -> None:
    text = problem_of("/nowhere", "", "", port="http")
    assert "--http-use-ssl-mutual: TLS is not configured correctly" in text
    assert "--http-server-cert /nowhere" in text
    assert "--http-server-key is missing" in text
    assert "--http-root-cert is missing" in text
    assert "grpc" not in text
