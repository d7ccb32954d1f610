"""`llmserve serve` as a process: start, tables, drain, signals, ports in use, models that do not load."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import tritonclient.grpc as triton
import trustme
from tritonclient.grpc import service_pb2

from llmserve.cli.backends import make_backends, parse_backend_settings
from llmserve.cli.main import main
from llmserve.cli.pipelines import engine_parameters, packaged_repository
from llmserve.cli.serve import parse_adapters, parse_parameters, with_any_suite
from llmserve.cli.server import model_table
from llmserve.errors import InvalidArgument
from llmserve.serving.core import ModelStatus
from llmserve.serving.loading.repository import list_models, open_repository, read_model
from tests.frontends.server import HOST, wait_until
from tests.wire.http2.raw_client import RawClient

LLMSERVE = [sys.executable, "-c", "from llmserve.cli.main import main; main()"]
ADDRESS = re.compile(r"Started (GRPCInferenceService|HTTPService|Metrics Service) at 127.0.0.1:(\d+)")
ANY_PORTS = ["--host", HOST, "--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]


def identity_model(repository: Path, name: str, delay_ms: int = 0) -> Path:
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(f"""
        backend: "identity"
        input {{ name: "IN" data_type: TYPE_INT32 dims: [ -1 ] }}
        output {{ name: "OUT" data_type: TYPE_INT32 dims: [ -1 ] }}
        parameters {{ key: "execute_delay_ms" value {{ string_value: "{delay_ms}" }} }}
    """)
    return repository


@dataclass
class Server:
    """A running `llmserve serve`, with what it has printed so far."""

    process: subprocess.Popen[str]
    printed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            self.printed.extend(lines)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()

    def port(self, service: str) -> int:
        return {match[1]: int(match[2]) for line in self.printed if (match := ADDRESS.search(line))}[service]

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in "".join(self.printed), timeout_s=30)

    def http(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(HOST, self.port("HTTPService"), timeout=30)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def infer(self, model: str) -> tuple[int, bytes]:
        tensor = {"name": "IN", "datatype": "INT32", "shape": [1], "data": [5]}
        return self.http("POST", f"/v2/models/{model}/infer", {"inputs": [tensor]})

    def metrics(self) -> str:
        connection = http.client.HTTPConnection(HOST, self.port("Metrics Service"), timeout=30)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        return text

    def has_waiting(self, model: str) -> bool:
        """And so one that runs."""
        return f'nv_inference_pending_request_count{{model="{model}",version="1"}} 1\n' in self.metrics()


def start(*arguments: str) -> Server:
    command = [*LLMSERVE, "serve", *ANY_PORTS, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    server = Server(process)
    server.wait_for("Metrics Service at")
    return server


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*LLMSERVE, "serve", *arguments], capture_output=True, text=True, timeout=60)


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    started: list[Server] = []
    yield started
    for server in started:
        server.kill()


def test_start_serve_and_stop(tmp_path: Path, servers: list[Server]) -> None:
    repository = identity_model(identity_model(tmp_path, "first"), "second")
    servers.append(server := start("--model-repository", str(repository), "--parameter", "first.note=hello"))
    assert "".join(server.printed).startswith(
        "+--------+---------+--------+\n"
        "| Model  | Version | Status |\n"
        "+--------+---------+--------+\n"
        "| first  | 1       | READY  |\n"
        "| second | 1       | READY  |\n"
        "+--------+---------+--------+\n"
        "Started GRPCInferenceService at 127.0.0.1:"
    )
    assert server.http("GET", "/v2/health/ready") == (200, b"")
    assert json.loads(server.infer("first")[1])["outputs"][0]["data"] == [5]
    assert json.loads(server.http("GET", "/v2/models/first/config")[1])["parameters"]["note"] == {
        "string_value": "hello"
    }
    with triton.InferenceServerClient(f"{HOST}:{server.port('GRPCInferenceService')}") as client:
        assert client.is_model_ready("second")
    assert "nv_inference_request_success" in server.metrics()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(timeout=30) == 0


def test_sigterm_drains(tmp_path: Path, servers: list[Server]) -> None:
    servers.append(server := start("--model-repository", str(identity_model(tmp_path, "slow", delay_ms=2500))))
    with ThreadPoolExecutor() as pool:
        accepted = [pool.submit(server.infer, "slow") for _ in range(2)]
        wait_until(lambda: server.has_waiting("slow"))
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("Draining")
        assert server.http("GET", "/v2/health/ready") == (400, b"")
        assert server.http("GET", "/v2/health/live") == (200, b"")
        with grpc.insecure_channel(f"{HOST}:{server.port('GRPCInferenceService')}") as channel:
            assert channel.unary_unary("/grpc.health.v1.Health/Check")(b"") == b"\x08\x02"
        status, body = server.infer("slow")
        assert (status, b"stopping" in body) == (503, True)
        assert [request.result(timeout=30)[0] for request in accepted] == [200, 200]
    assert server.process.wait(timeout=30) == 0


def test_health_is_answered_while_models_load(tmp_path: Path) -> None:
    """And a stop signal in that time ends the server in good order, whatever the model is doing."""
    (tmp_path / "late/1").mkdir(parents=True)
    (tmp_path / "late/config.pbtxt").write_text("""
        backend: "python"
        input { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] }
        output { name: "OUT" data_type: TYPE_INT32 dims: [ -1 ] }
    """)
    (tmp_path / "late/1/model.py").write_text(
        "import time\n"
        "class TritonPythonModel:\n"
        "    def initialize(self, args): time.sleep(600)\n"
        "    def execute(self, requests): return []\n"
    )
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    command = [*LLMSERVE, "serve", *ANY_PORTS, "--http-port", str(port), "--model-repository", str(tmp_path)]
    server = Server(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True), [])
    try:
        wait_until(lambda: is_listening(port), timeout_s=30)
        server.printed.append(f"Started HTTPService at {HOST}:{port}")
        assert server.http("GET", "/v2/health/live") == (200, b"")
        assert server.http("GET", "/v2/health/ready") == (400, b"")
        status, body = server.infer("late")
        assert (status, b"Server is starting" in body) == (503, True)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=30) == 0
    finally:
        server.kill()


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


@pytest.mark.parametrize("hurry", [False, True], ids=["delay", "second-signal"])
def test_balancers_are_told_before_a_request_is_refused(tmp_path: Path, servers: list[Server], hurry: bool) -> None:
    repository = identity_model(tmp_path, "m")
    delay = "600" if hurry else "2"
    servers.append(server := start("--model-repository", str(repository), "--shutdown-delay-secs", delay))
    assert server.http("GET", "/v2/health/ready")[0] == 200
    server.process.send_signal(signal.SIGTERM)
    server.wait_for("No longer ready")
    assert server.http("GET", "/v2/health/ready")[0] == 400
    assert server.http("GET", "/v2/models/m/ready")[0] == 400
    assert server.http("GET", "/v2/health/live")[0] == 200
    assert server.infer("m")[0] == 200
    if hurry:
        server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(timeout=30) == 0


@pytest.mark.parametrize("hurry", [False, True], ids=["exit-timeout", "second-signal"])
def test_what_runs_too_long_is_ended(tmp_path: Path, servers: list[Server], hurry: bool) -> None:
    repository = identity_model(tmp_path, "stuck", delay_ms=600_000)
    timeout = "600" if hurry else "0.5"
    servers.append(server := start("--model-repository", str(repository), "--exit-timeout-secs", timeout))
    with ThreadPoolExecutor() as pool:
        accepted = [pool.submit(server.infer, "stuck") for _ in range(2)]
        wait_until(lambda: server.has_waiting("stuck"))
        server.process.send_signal(signal.SIGINT)
        server.wait_for("Draining")
        if hurry:
            server.process.send_signal(signal.SIGINT)
        assert server.process.wait(timeout=30) == 0
        for request in accepted:
            assert request.exception(timeout=10) is not None or request.result()[0] >= 400


@pytest.mark.parametrize("flag", ["--http-port", "--grpc-port", "--metrics-port"])
def test_a_port_in_use_is_one_clear_error(tmp_path: Path, flag: str) -> None:
    repository = identity_model(tmp_path, "first")
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        done = run("--model-repository", str(repository), *ANY_PORTS, flag, str(port))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"error: cannot listen on {HOST}:{port} ({flag}): the port is already in use; choose another port with {flag}\n"
    )


@pytest.mark.parametrize("more", [(), ("--frontends", "2")])
def test_two_flags_with_the_same_port(tmp_path: Path, more: tuple[str, ...]) -> None:
    done = run("--model-repository", str(identity_model(tmp_path, "first")), "--metrics-port", "8000", *more)
    assert (done.returncode, done.stderr) == (
        2, "error: --http-port and --metrics-port are both 8000; give each its own port\n",
    )  # fmt: skip


def test_a_models_own_folder_is_no_repository(tmp_path: Path) -> None:
    repository = identity_model(tmp_path, "first")
    done = run("--model-repository", str(repository / "first"), *ANY_PORTS)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"is a model's own folder; give its parent: {repository}\n" in done.stderr


def test_an_address_of_another_machine(tmp_path: Path) -> None:
    done = run("--model-repository", str(identity_model(tmp_path, "first")), *ANY_PORTS, "--host", "203.0.113.7")
    assert done.returncode == 1
    assert "cannot listen on 203.0.113.7" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_that_does_not_load_ends_the_server(tmp_path: Path) -> None:
    repository = identity_model(tmp_path, "good")
    (identity_model(tmp_path, "bad") / "bad/config.pbtxt").write_text('backend: "unheard_of"')
    done = run("--model-repository", str(repository), *ANY_PORTS)
    assert done.returncode == 1
    assert re.search(r"\| bad +\| +\| UNAVAILABLE: .*unknown backend 'unheard_of'", done.stdout)
    assert re.search(r"\| good +\| 1 +\| READY ", done.stdout)
    assert done.stderr == "", "the table says why, once"


def test_the_others_can_be_served_all_the_same(tmp_path: Path, servers: list[Server]) -> None:
    repository = identity_model(tmp_path, "good")
    (identity_model(tmp_path, "bad") / "bad/config.pbtxt").write_text('backend: "unheard_of"')
    servers.append(server := start("--model-repository", str(repository), "--no-exit-on-error"))
    assert server.infer("good")[0] == 200
    assert server.http("GET", "/v2/health/ready")[0] == 400
    assert b"has no available versions" in server.infer("bad")[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nothing to serve: give an engine directory, or --model-repository DIR"),
        (["/no/such/engine"], "/no/such/engine"),
        (["--model-repository", "/no/such/folder"], "/no/such/folder is not a directory"),
        (["--model-repository", "{repository}", "--parameter", "first=2"], "expected MODEL.KEY=VALUE"),
        (["--model-repository", "{repository}", "--parameter", "nope.a=2"], "model 'nope' does not exist"),
        (["--http-port", "70000"], "--http-port"),
        (["--model-repository", "{repository}", "--load-model", "first"], "--load-model needs --model-control-mode"),
        (
            ["--model-repository", "{repository}", "--model-control-mode=explicit", "--load-model=*", "--load-model=a"],
            "leave the others out",
        ),
        (
            ["--model-repository", "{repository}", "--model-control-mode=explicit", "--load-model=nope"],
            "model 'nope' does not exist",
        ),
        (["--model-repository", "{repository}", "--grpc-use-ssl=true"], "--grpc-server-cert is missing"),
        (["--model-repository", "ftp://there/models"], "known URLs are s3://, gs://, as://, oss://"),
        (["--model-repository", "{repository}", "--allow-http=false", "--allow-grpc=0"], "nothing to listen on"),
        (["--model-repository", "{repository}", "--rate-limit=sometimes"], "expected off or execution_count"),
        (["--model-repository", "{repository}", "--rate-limit-resource=R:x"], "R:x: expected NAME:COUNT"),
        (
            ["--model-repository", "{repository}", "--speculation=drafts"],
            "--speculation 'drafts': expected off",
        ),
        (
            ["--model-repository", "{repository}", "--chat-template={repository}"],
            "is not a file; give a file with a Jinja",
        ),
        (["--model-repository", "{repository}", "--root-path=llm"], "--root-path llm: expected a path such as /llm"),
        (["--model-repository", "{repository}", "--cors-allow-credentials"], "add --cors-allow-origin"),
        (
            ["--model-repository", "{repository}", "--default-sampling", '{{"temprature": 1}}'],
            "unknown field 'temprature'; known: temperature, top_p",
        ),
        (
            ["--model-repository", "{repository}", "--default-sampling", '{{"top_p": 2}}'],
            "--default-sampling is invalid: top_p: must be at most 1",
        ),
        (["--model-repository", "{repository}", "--cluster=demo"], "demo is not NAMESPACE.NAME"),
        (["--model-repository", "{repository}", "--cluster=a.b"], "NVIDIA Dynamo, in its own environment"),
        (["--model-repository", "{repository}", "--cluster=a.b", "--engine-process"], "no engine runs here"),
        (["--model-repository", "{repository}", "--cache-config=redis,host=x"], "unknown cache 'redis'"),
    ],
)
def test_wrong_arguments(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    repository = identity_model(tmp_path, "first")
    given = [argument.format(repository=repository) for argument in arguments]
    monkeypatch.setattr(sys, "argv", ["llmserve", "serve", *ANY_PORTS, *given])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_engine_and_limits_become_parameters_of_the_right_models() -> None:
    repository, engine = open_repository(packaged_repository()), str(Path("some/engine").absolute())
    configs = [read_model(name, places).config for name, places in list_models([repository]).places.items()]
    given = {config.name: engine_parameters(Path("some/engine"), {"num_threads": "3"}, config) for config in configs}
    assert given == {
        "tensorrt_llm": {"num_threads": "3", "gpt_model_path": engine, "tokenizer_dir": engine},
        "preprocessing": {"tokenizer_dir": engine},
        "postprocessing": {"tokenizer_dir": engine},
        "ensemble": {},
    }
    assert not any(engine_parameters(None, {}, config) for config in configs)
    allowed = {config.name: engine_parameters(None, {}, config, allows_templates=True) for config in configs}
    assert {name: found for name, found in allowed.items() if found} == {
        "preprocessing": {"allow_chat_template": "true"}
    }
    chosen = {config.name: engine_parameters(None, {}, config, template=Path("a.jinja")) for config in configs}
    assert {name: found for name, found in chosen.items() if found} == {
        "preprocessing": {"chat_template": str(Path("a.jinja").absolute())}
    }
    named = [engine_parameters(None, {}, config, template=Path("chatml")) for config in configs]
    assert {"chat_template": "chatml"} in named


@pytest.mark.parametrize("following", [[], ["--threads", "2"], ["./engine"], ["engine"], ["any"], ["docs", "engine"]])
def test_a_gate_without_a_suite_takes_nothing_of_what_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, following: list[str]
) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "manifest.json").touch()
    monkeypatch.chdir(tmp_path)
    names_a_suite = following[:1] in (["any"], ["docs"])
    expected = following if names_a_suite else ["any", *following]
    assert with_any_suite(["--require-gate", *following]) == ["--require-gate", *expected]


def test_adapters_that_are_named_wrongly() -> None:
    given = ("a=x", "a=y", "b", "ensemble=z")
    with pytest.raises(InvalidArgument) as caught:
        parse_adapters(given, {"ensemble"})
    assert [line.removeprefix("  - --adapter ") for line in str(caught.value).splitlines()[1:]] == [
        "a is given twice",
        "b: expected NAME=DIR",
        "ensemble: a model has this name; give the adapter another one",
    ]


def test_a_folder_of_adapters_has_no_models_name(tmp_path: Path) -> None:
    for name in ("ensemble", "style"):
        (tmp_path / name).mkdir()
    with pytest.raises(InvalidArgument, match=f"{tmp_path}: a model has the name ensemble; rename the directory"):
        parse_adapters((), {"ensemble", "preprocessing"}, tmp_path)


def test_parameters_by_model() -> None:
    assert parse_parameters(["a.b=1", "a.c=x=y.z", "m.k=v"]) == {"a": {"b": "1", "c": "x=y.z"}, "m": {"k": "v"}}


def test_settings_of_backends() -> None:
    settings = parse_backend_settings(["default-max-batch-size=8", "python,shm-default-byte-size=4"])
    assert settings.unread() == ["--backend-config python,shm-default-byte-size"]
    assert settings.max_batch_size("onnxruntime") == 8
    assert parse_backend_settings(["onnxruntime,default-max-batch-size=2"]).max_batch_size("onnxruntime") == 2
    assert parse_backend_settings([]).max_batch_size("onnxruntime") == 4
    with pytest.raises(InvalidArgument, match="default-max-batch-size=x: expected a number"):
        make_backends(parse_backend_settings(["default-max-batch-size=x"]))


@pytest.mark.parametrize("text", ["", "a", "a.b", "a=b", ".b=c", "a.=c"])
def test_malformed_parameters(text: str) -> None:
    with pytest.raises(InvalidArgument, match="expected MODEL"):
        parse_parameters([text])


@pytest.mark.parametrize("text", ["", "a", "a,b", "a,=b", ",a=b", "a="])
def test_malformed_backend_settings(text: str) -> None:
    with pytest.raises(InvalidArgument, match="expected BACKEND,KEY=VALUE or KEY=VALUE"):
        parse_backend_settings([text])


def test_a_tritonserver_command_line(tmp_path: Path, servers: list[Server]) -> None:
    """Only the program's name has changed."""
    repository = identity_model(identity_model(tmp_path, "first"), "second")
    servers.append(
        server := start(
            f"--model-store={repository}", "--model-control-mode=explicit", "--load-model=first", "--http-address",
            HOST, "--allow-http=1", "--allow-gpu-metrics=false", "--strict-readiness", "true", "--exit-on-error=true",
            "--pinned-memory-pool-byte-size=0", "--backend-config=python,shm-default-byte-size=1048576", "--id=here",
            "--metrics-config", "summary_latencies=true", "--allow-cpu-metrics=false", "--log-verbose=false",
            "--min-supported-compute-capability", "6.0", "--http-thread-count=8",
        )
    )  # fmt: skip
    printed = "".join(server.printed)
    flags, settings = [line for line in printed.splitlines() if line.startswith("Without effect here: ")]
    assert settings == "Without effect here: --backend-config python,shm-default-byte-size"
    assert flags == (
        "Without effect here: --pinned-memory-pool-byte-size (GPU memory and devices), "
        "--min-supported-compute-capability (GPU memory and devices), --http-thread-count (threads and pools of "
        "tritonserver's own)"
    )
    assert "| second |         | not loaded |" in printed
    assert server.infer("first")[0] == 200
    assert json.loads(server.http("GET", "/v2")[1])["name"] == "here"
    assert 'nv_inference_request_summary_us{model="first",version="1",quantile="0.5"}' in server.metrics()
    assert "nv_cpu_utilization" not in server.metrics()
    assert server.http("GET", "/v2/health/ready")[0] == 200


def test_grpc_over_tls(tmp_path: Path, servers: list[Server]) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert(HOST)
    authority.cert_pem.write_to_path(tmp_path / "root")
    issued.private_key_pem.write_to_path(tmp_path / "key")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "cert")
    repository = identity_model(tmp_path / "models", "first")
    files = [f"--grpc-server-cert={tmp_path / 'cert'}", "--grpc-server-key", str(tmp_path / "key")]
    servers.append(server := start(f"--model-repository={repository}", "--grpc-use-ssl=true", *files))
    assert f":{server.port('GRPCInferenceService')} (TLS)" in "".join(server.printed)
    address = f"{HOST}:{server.port('GRPCInferenceService')}"
    with triton.InferenceServerClient(address, ssl=True, root_certificates=str(tmp_path / "root")) as client:
        assert client.is_model_ready("first")
    servers.append(unprotected := start(f"--model-repository={repository}", *files))
    assert "Without effect here: --grpc-server-cert (without --grpc-use-ssl)" in "".join(unprotected.printed)


@pytest.mark.parametrize("level", ["high", "none"])
def test_answers_over_grpc_are_compressed_when_asked_for(tmp_path: Path, servers: list[Server], level: str) -> None:
    repository = identity_model(tmp_path, "first")
    flag = f"--grpc-infer-response-compression-level={level}"
    servers.append(server := start(f"--model-repository={repository}", flag))
    assert "Without effect" not in "".join(server.printed)
    message = service_pb2.ModelInferRequest(model_name="first", raw_input_contents=[bytes(40_000)])
    message.inputs.add(name="IN", datatype="INT32", shape=[10_000])
    client = RawClient(server.port("GRPCInferenceService"))
    client.call(1, "ModelInfer", message.SerializeToString(), grpc_accept_encoding="gzip")
    head = client.head(1)
    client.socket.close()
    assert head.get("grpc-encoding") == {"high": "gzip", "none": None}[level]


def test_services_that_are_not_wanted(tmp_path: Path, servers: list[Server]) -> None:
    repository = identity_model(tmp_path, "first")
    unwanted = ("--allow-grpc=false", "--allow-web-page=false")
    command = [*LLMSERVE, "serve", *ANY_PORTS, "--model-repository", str(repository), *unwanted]
    server = Server(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    servers.append(server)
    server.wait_for("Metrics Service at")
    assert "GRPCInferenceService" not in "".join(server.printed)
    assert server.infer("first")[0] == 200
    assert server.http("GET", "/")[0] == 404


def test_a_reason_is_wrapped_inside_the_table() -> None:
    table = model_table([ModelStatus("m", "1", "UNAVAILABLE", "two\n  - lines"), ModelStatus("n", "", "X", "q " * 90)])
    assert "| m     | 1       | UNAVAILABLE: two - lines " in table
    assert len({len(line) for line in table.splitlines()}) == 1
    assert len(table.splitlines()[0]) < 130
    assert table.count("q") == 90
