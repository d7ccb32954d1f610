"""What `serve --frontends N` gives its servers, and what it finds before it starts any."""

from __future__ import annotations

import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer

from llmserve.cli.app import app
from llmserve.cli.front_ends import HeldPorts, find_engine, flags
from llmserve.cli.pipelines import packaged_repository
from llmserve.cli.serve import server_settings
from llmserve.cli.serve_options import ServeOptions
from llmserve.errors import InvalidArgument, Unavailable
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
    assert "the models must use one engine, and they use 2: " in str(caught.value)


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
