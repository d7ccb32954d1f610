"""What `serve --frontends N` gives its servers, and what it finds before it starts any."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer

from llmserve.cli import front_ends
from llmserve.cli.app import app
from llmserve.cli.front_ends import FrontEnds, HeldPorts, find_engine, flags
from llmserve.cli.pipelines import packaged_repository
from llmserve.cli.serve import server_settings
from llmserve.cli.serve_options import ServeOptions
from llmserve.errors import InvalidArgument, Unavailable
from llmserve.frontends.shared.restrictions import VARIABLES
from llmserve.serving.observe.several import added_up
from llmserve.wire.listener import claim_port
from tests.engine.directories import make_engine_directory

SEQUENCES = """
backend: "identity" max_batch_size: 4
sequence_batching { }
input [{ name: "INPUT0" data_type: TYPE_INT32 dims: [1] }]
output [{ name: "OUTPUT0" data_type: TYPE_INT32 dims: [1] }]
"""


def test_options_become_a_command_line_and_come_back() -> None:
    default = ServeOptions()
    changed = {
        each.name: not value for each in fields(ServeOptions) if isinstance(value := getattr(default, each.name), bool)
    }
    options = ServeOptions(
        **changed,  # type: ignore[arg-type]
        engine=Path("/engines/one"), http_port=1, host="h", exit_timeout_secs=1.5, http_header_forward_pattern="-.*",
        model_repository=["/a", "/b"], require_gate=["any"], served_model_name=["x", "y z"],
        parameter=["tensorrt_llm.num_threads=2"], trace_config=["mode=opentelemetry"], cluster="a.b",
    )  # fmt: skip
    commands = typer.main.get_command(app)
    assert isinstance(commands, typer.core.TyperGroup)
    context = commands.commands["serve"].make_context("serve", flags(options))
    for each in fields(ServeOptions):
        assert given(context.params[each.name]) == given(getattr(options, each.name)), each.name


def given(value: Any) -> Any:
    return list(value) or None if isinstance(value, (list, tuple)) else value


def test_the_engine_of_the_repository_is_found(tmp_path: Path) -> None:
    engine = make_engine_directory(tmp_path / "engine")
    options = ServeOptions(engine=engine, threads=3, parameter=["tensorrt_llm.max_queue_size=7"])
    found = find_engine(server_settings(options))
    assert (found.engine_dir, found.tokenizer_dir, found.engine.threads) == (engine, engine, 3)
    assert found.engine.scheduler.max_queue_size == 7


def test_models_of_one_server_are_refused(tmp_path: Path) -> None:
    engine = make_engine_directory(tmp_path / "engine")
    repository = tmp_path / "models"
    shutil.copytree(packaged_repository() / "tensorrt_llm", repository / "tensorrt_llm")
    shutil.copytree(packaged_repository() / "tensorrt_llm", repository / "another")
    config = repository / "another" / "config.pbtxt"
    config.write_text(config.read_text().replace('"tensorrt_llm"', '"another"', 1))
    (repository / "sequences" / "1").mkdir(parents=True)
    (repository / "sequences" / "config.pbtxt").write_text(SEQUENCES)
    given = ["tensorrt_llm.gpt_model_path=/one", "another.gpt_model_path=/two"]
    options = ServeOptions(engine=engine, model_repository=[str(repository)], parameter=given)
    with pytest.raises(InvalidArgument) as caught:
        find_engine(server_settings(options))
    assert "model 'sequences' batches sequences" in str(caught.value)
    assert "the models must use one engine, but they use 2: " in str(caught.value)


@pytest.mark.parametrize("flag", ["--http-port", "--grpc-port"])
def test_a_port_that_is_taken_is_named(flag: str) -> None:
    with claim_port("127.0.0.1", 0, flag) as taken:
        ports = {"http_port": 0, "grpc_port": 0} | {flag[2:].replace("-", "_"): taken.getsockname()[1]}
        with pytest.raises(Unavailable, match=f"{flag}.*already in use"):
            HeldPorts(ServeOptions(host="127.0.0.1", **ports))


def test_held_ports_are_shared_with_servers_only() -> None:
    held = HeldPorts(ServeOptions(host="127.0.0.1", http_port=0, grpc_port=0))
    port = held.options.http_port
    try:
        with (
            claim_port("127.0.0.1", port, "--http-port", shared=True) as one,
            claim_port("127.0.0.1", port, "--http-port", shared=True) as other,
        ):
            assert one.getsockname() == other.getsockname()
            with pytest.raises(Unavailable, match="already in use"):
                claim_port("127.0.0.1", port, "--http-port")
    finally:
        held.close()


SERVER = """
import sys
print("table", flush=True)
print(flush=True)
print("x" * 200_000, flush=True)
%s
print("Started Metrics Service at 127.0.0.1:1", flush=True)
sys.stdin.read()
"""


def several(monkeypatch: pytest.MonkeyPatch, program: str) -> FrontEnds:
    """Two servers that are this program. They use an engine elsewhere."""
    monkeypatch.setattr(front_ends, "SERVE", (sys.executable, "-c", program))
    options = ServeOptions(
        host="127.0.0.1", http_port=0, grpc_port=0, metrics_port=0, frontends=2, engine_socket=Path("/e.sock")
    )
    return FrontEnds(options, None, {})


async def end_when(front: FrontEnds, is_due: Callable[[str], bool], capsys: pytest.CaptureFixture[str]) -> str:
    """SIGTERM when it has said so much. All that it has said."""
    running, said = asyncio.ensure_future(front.run()), ""
    while not (is_due(said) or running.done()):
        await asyncio.sleep(0.01)
        said += capsys.readouterr().out
    if not running.done():
        os.kill(os.getpid(), signal.SIGTERM)
    return f"{said}{capsys.readouterr().out}exit code {await running}"


def test_whatever_models_print_a_server_gets_ready(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    front = several(monkeypatch, SERVER % "")
    said = asyncio.run(end_when(front, lambda text: "Metrics" in text, capsys))
    assert said.startswith(f"table\n\n{'x' * 200_000}\nStarted Metrics Service at 127.0.0.1:")
    assert said.endswith("exit code 0")


def test_a_server_that_does_not_start_ends_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The other one is ready, or still on its way."""
    first_only = f"import os; os.close(os.open({str(tmp_path / 'mine')!r}, os.O_CREAT | os.O_EXCL))"
    front = several(monkeypatch, SERVER % first_only)
    said = asyncio.run(end_when(front, lambda text: False, capsys))
    assert said.endswith("a server has ended with exit code 1 before it was ready\nexit code 1")


# The servers say what they find in their environment, and end.
ENVIRONMENT = """
import sys
from pathlib import Path
from llmserve.cli import front_ends
from llmserve.cli.serve_options import ServeOptions
program = "import os; print([os.environ.get(name) for name in %r])"
front_ends.SERVE = (sys.executable, "-c", program)
front_ends.serve_by_several(ServeOptions(
    host="127.0.0.1", http_port=0, grpc_port=0, metrics_port=0, frontends=2, engine_socket=Path("/e.sock")
))
"""


def test_every_server_knows_the_keys_of_the_environment() -> None:
    """Without them it would be open to everybody."""
    values = ["health:a=1", "health:b=2", "user-0123456789abcdef", "admin-0123456789abcdef"]
    environment = {**os.environ, **dict(zip(VARIABLES, values, strict=True))}
    command = [sys.executable, "-c", ENVIRONMENT % (VARIABLES,)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert str(values) in done.stdout, done.stderr


def test_the_end_does_not_wait_for_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    begun = tmp_path / "begun"
    front = several(monkeypatch, SERVER % f"open({str(begun)!r}, 'w').close(); sys.stdin.read()")
    assert asyncio.run(end_when(front, lambda text: begun.exists(), capsys)) == "exit code 0"


def test_a_quantile_is_that_of_the_servers_that_have_one() -> None:
    """One that has answered nothing for a minute has none."""
    sample = 'nv_inference_queue_summary_us{model="m",quantile="0.5"}'
    head = "# TYPE nv_inference_queue_summary_us summary"
    assert added_up([f"{head}\n{sample} {value}\n" for value in ("NaN", "5", "NaN", "3")]) == f"{head}\n{sample} 5\n"
    assert added_up([f"{head}\n{sample} NaN\n"] * 2) == f"{head}\n{sample} NaN\n"


def test_metrics_of_servers_are_added_up() -> None:
    page = """# HELP nv_inference_count Number of inferences
# TYPE nv_inference_count counter
nv_inference_count{{model="m"}} {count}
# TYPE llmserve_generation_tokens_total counter
llmserve_generation_tokens_total{{model="m"}} {tokens}
# TYPE nv_inference_queue_summary_us summary
nv_inference_queue_summary_us_sum{{model="m"}} {count}
nv_inference_queue_summary_us{{model="m",quantile="0.5"}} {half}
# TYPE own gauge
own 1
"""
    pages = [page.format(count=2, tokens=5.0, half=0.5), "", page.format(count=3, tokens=7.0, half=0.25)]
    assert added_up(pages) == page.format(count=5, tokens=7, half=0.5).replace("own 1", "own 2")
