"""What operators give to `llmserve serve`, with a real process: encryption, logs for programs, other origins, spans."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import trustme

from tests.cli.test_serve import Server, identity_model, run, start
from tests.frontends.server import HOST, wait_until
from tests.frontends.text.test_spans import TRACE, Collector, attributes

ORIGIN = "https://chat.example.org"
BODY = {"inputs": [{"name": "IN", "datatype": "INT32", "shape": [1], "data": [424242]}]}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    issued = authority.issue_cert(HOST)
    authority.cert_pem.write_to_path(folder / "root")
    issued.private_key_pem.write_to_path(folder / "key")
    issued.cert_chain_pems[0].write_to_path(folder / "cert")
    return folder


@pytest.fixture
def server(tmp_path: Path, certificates: Path) -> Iterator[tuple[Server, Collector, Path]]:
    collector, log = Collector(), tmp_path / "server.log"
    made = start(
        f"--model-repository={identity_model(tmp_path / 'models', 'first')}", f"--log-file={log}",
        "--log-format=json", "--log-verbose=1", "--http-use-ssl=true", "--metrics-use-ssl",
        f"--http-server-cert={certificates / 'cert'}", f"--http-server-key={certificates / 'key'}",
        f"--cors-allow-origin={ORIGIN}", "--trace-config=mode=opentelemetry", "--trace-config=rate=0",
        f"--trace-config=opentelemetry,url={collector.url.removeprefix('http://')}",
    )  # fmt: skip
    yield made, collector, log
    made.kill()
    collector.shutdown()
    collector.server_close()


def test_all_of_it_together(server: tuple[Server, Collector, Path], certificates: Path) -> None:
    process, collector, log = server
    printed = "".join(process.printed)
    assert "Without effect" not in printed
    assert printed.count("(TLS)") == 2
    port, metrics_port = process.port("HTTPService"), process.port("Metrics Service")
    trusting = ssl.create_default_context(cafile=str(certificates / "root"))
    with httpx.Client(verify=trusting, base_url=f"https://{HOST}:{port}") as client:
        headers = {"origin": ORIGIN, "x-request-id": "job-1", "traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
        answer = client.post("/v2/models/first/infer", json=BODY, headers=headers)
        assert (answer.status_code, answer.headers["x-request-id"]) == (200, "job-1")
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        assert 'nv_inference_count{model="first"' in client.get(f"https://{HOST}:{metrics_port}/metrics").text
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://{HOST}:{port}/v2")
    (span,) = collector.wait_for("POST /v2/models/first/infer")
    assert (span.trace_id.hex(), attributes(span)["llmserve.request_id"]) == (TRACE, "job-1")
    wait_until(lambda: "job-1" in log.read_text())
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    (entry,) = (entry for entry in entries if entry.get("request_id") == "job-1")
    assert (entry["status"], entry["model"], entry["trace_id"]) == (200, "first", TRACE)
    assert "424242" not in log.read_text()


def test_a_server_drains_whatever_the_collector_does(tmp_path: Path) -> None:
    process = start(
        f"--model-repository={identity_model(tmp_path / 'models', 'first')}", "--trace-config=mode=opentelemetry",
        "--trace-config=rate=1", f"--trace-config=opentelemetry,url={HOST}:9/v1/traces",
    )  # fmt: skip
    assert process.infer("first")[0] == 200
    process.process.terminate()
    assert process.process.wait(20) == 0
    process.kill()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--cors-allow-origin", "example.org"], "--cors-allow-origin is wrong"),
        (["--http-use-ssl"], "--http-server-cert is missing"),
        (["--metrics-use-ssl"], "--http-server-key is missing"),
        (["--log-format", "xml"], "known formats are default, ISO8601, json"),
        (["--trace-config", "opentelemetry,url=x"], "this needs mode=opentelemetry"),
    ],
)
def test_what_is_wrong_is_said_at_start(tmp_path: Path, flags: list[str], words: str) -> None:
    done = run("--model-repository", str(identity_model(tmp_path, "first")), *flags)
    assert done.returncode != 0
    assert words in " ".join((done.stdout + done.stderr).split())
