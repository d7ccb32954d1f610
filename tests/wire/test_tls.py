"""gRPC over TLS: with tritonclient, and with clients that break the handshake off, refuse it or do not know of it."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import trustme
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from llmserve.client import Access, Client
from llmserve.errors import InvalidArgument, Unavailable
from llmserve.wire.http2 import frames
from llmserve.wire.http2 import server as http2_server
from llmserve.wire.tls import TlsFiles, server_context
from tests.frontends.grpc.test_inference_service import tensor
from tests.frontends.server import HOST, RunningServer, running_server
from tests.frontends.stub_core import StubCore
from tests.wire.http2.raw_client import RawClient


@dataclass(frozen=True)
class Files:
    """Of one authority: its own certificate, a server's and a client's."""

    root: str
    server_cert: str
    server_key: str
    client_cert: str
    client_key: str


def issue(folder: Path) -> Files:
    folder.mkdir()
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "root")
    server, client = authority.issue_cert(HOST, "localhost"), authority.issue_cert("client@example.org")
    for name, issued in (("server", server), ("client", client)):
        issued.private_key_pem.write_to_path(folder / f"{name}_key")
        issued.cert_chain_pems[0].write_to_path(folder / f"{name}_cert")
    return Files(*(str(folder / name) for name in ("root", "server_cert", "server_key", "client_cert", "client_key")))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return issue(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return issue(tmp_path_factory.mktemp("tls") / "theirs")


def server_of(files: Files, *, mutual: bool) -> Iterator[RunningServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http2_server, "HANDSHAKE_TIMEOUT_S", 0.5)
        context = server_context(TlsFiles(files.server_cert, files.server_key, files.root, mutual=mutual))
        with running_server(StubCore, tls=context) as running:
            yield running


@pytest.fixture(scope="module")
def server(files: Files) -> Iterator[RunningServer]:
    yield from server_of(files, mutual=False)


@pytest.fixture(scope="module")
def mutual(files: Files) -> Iterator[RunningServer]:
    yield from server_of(files, mutual=True)


def is_live(server: RunningServer, root: str, *, key: str | None = None, cert: str | None = None) -> bool:
    with triton.InferenceServerClient(
        server.grpc, ssl=True, root_certificates=root, private_key=key, certificate_chain=cert
    ) as client:
        return bool(client.is_server_live(client_timeout=5))


def assert_turned_away(server: RunningServer, root: str, *, key: str | None = None, cert: str | None = None) -> None:
    with pytest.raises(InferenceServerException) as caught:
        is_live(server, root, key=key, cert=cert)
    assert caught.value.status() in ("StatusCode.UNAVAILABLE", "StatusCode.DEADLINE_EXCEEDED")


def test_calls_and_streams(server: RunningServer, files: Files) -> None:
    with triton.InferenceServerClient(server.grpc, ssl=True, root_certificates=files.root) as client:
        data = np.random.default_rng(0).random((4, 1_000_000), dtype=np.float32)
        result = client.infer("add_two", [tensor("INPUT0", data), tensor("INPUT1", data)])
        assert np.array_equal(result.as_numpy("OUTPUT0"), data + data)
    channel = grpc.secure_channel(server.grpc, grpc.ssl_channel_credentials(Path(files.root).read_bytes()))
    with channel:
        request = service_pb2.ModelInferRequest(model_name="nope")
        stream = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter([request] * 50))
        assert ["unknown model" in answer.error_message for answer in stream] == [True] * 50


def test_a_server_whose_certificate_the_client_does_not_trust(server: RunningServer, strangers: Files) -> None:
    assert_turned_away(server, strangers.root)


def test_our_client_says_what_is_wrong(server: RunningServer, strangers: Files) -> None:
    def said(url: str, root: str | None = None) -> str:
        access = Access(root_certificates=None if root is None else Path(root))
        with Client(url, access=access) as client, pytest.raises(Unavailable) as caught:
            client.config()
        return str(caught.value)

    assert "its certificate is not trusted; give --root-certificates" in said(f"grpcs://{server.grpc}", strangers.root)
    assert "the connection closed: it is stopping, or needs TLS" in said(server.grpc)
    assert "it does not use TLS; give --url without grpcs://" in said(f"grpcs://{HOST}:{server.http_port}")


def test_a_certificate_of_another_host(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "root")
    authority.issue_cert("other.example").private_key_and_cert_chain_pem.write_to_path(tmp_path / "both")
    both = str(tmp_path / "both")
    access = Access(root_certificates=tmp_path / "root")
    with (
        running_server(StubCore, tls=server_context(TlsFiles(both, both, "", mutual=False))) as server,
        Client(f"grpcs://{server.grpc}", access=access) as client,
        pytest.raises(Unavailable, match="its certificate is for another host"),
    ):
        client.config()


def test_clients_with_and_without_a_certificate(mutual: RunningServer, files: Files, strangers: Files) -> None:
    assert is_live(mutual, files.root, key=files.client_key, cert=files.client_cert)
    assert_turned_away(mutual, files.root)
    assert_turned_away(mutual, files.root, key=strangers.client_key, cert=strangers.client_cert)
    assert is_live(mutual, files.root, key=files.client_key, cert=files.client_cert)


@contextmanager
def connected(server: RunningServer, files: Files) -> Iterator[ssl.SSLSocket]:
    context = ssl.create_default_context(cafile=files.root)
    context.set_alpn_protocols(["http/1.1", "h2"])
    plain = socket.create_connection((HOST, server.grpc_port), timeout=10)
    with plain, context.wrap_socket(plain, server_hostname=HOST) as encrypted:
        yield encrypted


def test_http_2_is_what_is_agreed_on(server: RunningServer, files: Files) -> None:
    with connected(server, files) as client:
        assert client.selected_alpn_protocol() == "h2"


@pytest.mark.parametrize("beginning", [b"", b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/1.1\r\n\r\n", bytes(5000)])
def test_handshakes_that_are_none_or_stop_half_way(server: RunningServer, files: Files, beginning: bytes) -> None:
    with socket.create_connection((HOST, server.grpc_port), timeout=10) as client:
        client.sendall(beginning)
        assert is_live(server, files.root)
        try:
            while client.recv(4096):
                pass
        except ConnectionError:
            pass


def test_a_plain_text_client_harms_nobody(server: RunningServer, files: Files) -> None:
    client = RawClient(server.grpc_port)
    with pytest.raises((EOFError, ConnectionError)):
        client.until(frames.SETTINGS)
    client.socket.close()
    assert is_live(server, files.root)


def test_a_connection_that_breaks_the_protocol(server: RunningServer, files: Files) -> None:
    received = b""
    with connected(server, files) as client:
        client.sendall(b"GET / HTTP/1.1\r\n\r\n")
        while piece := client.recv(4096):
            received += piece
    assert received.endswith(b"this is a port for gRPC over HTTP/2")


def problem_of(certificate: str = "", key: str = "", root: str = "", *, mutual: bool = True, port: str = "grpc") -> str:
    with pytest.raises(InvalidArgument) as caught:
        server_context(TlsFiles(certificate, key, root, mutual=mutual, port=port))
    return str(caught.value)


def test_files_that_are_missing_or_something_else(files: Files, strangers: Files, tmp_path: Path) -> None:
    everything = problem_of("/nowhere", files.server_cert)
    assert "--grpc-server-cert /nowhere: No such file or directory" in everything
    assert f"--grpc-server-key {files.server_cert}: contains no private key in PEM" in everything
    assert "--grpc-root-cert is missing" in everything
    assert "--grpc-root-cert" not in problem_of(mutual=False)
    assert "the key does not match the certificate" in problem_of(files.server_cert, strangers.server_key, files.root)
    broken = tmp_path / "broken"
    for kind in ("CERTIFICATE", "PRIVATE KEY"):
        broken.write_text(f"-----BEGIN {kind}-----\nAAAA\n-----END {kind}-----\n")
        pair = (str(broken), files.server_key) if kind == "CERTIFICATE" else (files.server_cert, str(broken))
        assert str(broken) in problem_of(*pair, files.root)
    broken.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    assert f"--grpc-root-cert {broken}" in problem_of(files.server_cert, files.server_key, str(broken))


def test_a_key_with_a_password(files: Files, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(Path(files.server_key).read_bytes(), None)
    encrypted = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    (tmp_path / "key").write_bytes(encrypted)
    assert "is encrypted" in problem_of(files.server_cert, str(tmp_path / "key"), mutual=False)
