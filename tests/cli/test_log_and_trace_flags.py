"""`llmserve serve` with log and trace flags: what a process prints and writes, and what its clients can change."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.cli.test_serve import identity_model, run, servers, start
from tests.frontends.server import wait_until

__all__ = ["servers"]
WARNING = "cc_model_filenames has no effect"


def test_what_is_printed_follows_flags_and_clients(tmp_path: Path, servers: list[object]) -> None:
    repository = identity_model(tmp_path / "models", "m")
    with (repository / "m/config.pbtxt").open("a") as config:
        config.write('cc_model_filenames { key: "a" value: "b" }')
    log = tmp_path / "log.txt"
    flags = ["--model-control-mode=explicit", "--log-warning=false", "--log-format=ISO8601", f"--log-file={log}"]
    servers.append(server := start("--model-repository", str(repository), *flags))

    def load() -> str:
        for verb in ("unload", "load"):
            assert server.http("POST", f"/v2/repository/models/m/{verb}", {})[0] == 200
        return log.read_text()

    settings = json.loads(server.http("GET", "/v2/logging")[1])
    assert settings == {
        "log_file": str(log), "log_info": True, "log_warning": False, "log_error": True, "log_verbose_level": 0,
        "log_format": "ISO8601",
    }  # fmt: skip
    assert WARNING not in load()
    assert server.http("POST", "/v2/logging", {"log_warning": True})[0] == 200
    (line,) = [line for line in load().splitlines() if WARNING in line]
    assert line[10] == "T"
    assert "Z WARNING llmserve.serving" in line


def test_traces_are_complete_when_the_server_has_ended(tmp_path: Path, servers: list[object]) -> None:
    repository = identity_model(tmp_path / "models", "m")
    file = tmp_path / "trace.json"
    flags = [f"--trace-config=triton,file={file}", "--trace-config=level=TIMESTAMPS", "--trace-config", "rate=2"]
    servers.append(server := start("--model-repository", str(repository), *flags))
    for _ in range(5):
        assert server.infer("m")[0] == 200
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: server.process.poll() == 0)
    assert [record["id"] for record in json.loads(file.read_text()) if "model_name" in record] == [1, 2]


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--trace-config=level=TIMESTAMPS", "trace file name is not given"),
        ("--trace-config=opentelemetry,url=localhost", "this needs mode=opentelemetry"),
        ("--log-format=xml", "known formats are default, ISO8601"),
        ("--log-file=/no/such/place/log", "--log-file /no/such/place/log cannot be written"),
    ],
)
def test_wrong_values(tmp_path: Path, flag: str, words: str) -> None:
    result = run("--model-repository", str(identity_model(tmp_path, "m")), flag)
    assert (result.returncode, words in " ".join(result.stderr.split())) == (2, True), result.stderr
