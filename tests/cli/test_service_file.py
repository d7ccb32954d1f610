"""`llmserve serve --service FILE`: a service of PAI-EAS."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer

from llmserve.cli.app import app
from llmserve.cli.service_file import read_services
from llmserve.errors import InvalidArgument

SERVICE = {
    "name": "baichuan2_triton",
    "processor": "triton",
    "processor_params": [
        "--model-repository=oss://bucket/models", "--allow-http=true", "--pinned-memory-pool-byte-size=1",
    ],
    "metadata": {"instance": 1, "cpu": 8, "gpu": 1, "memory": 32000},
    "cloud": {"computing": {"instance_type": "ecs.gn7i-c8g1.2xlarge"}},
}  # fmt: skip


def written(folder: Path, **changes: Any) -> Path:
    file = folder / "service.json"
    file.write_text(json.dumps({key: value for key, value in (SERVICE | changes).items() if value is not None}))
    return file


def parsed(*arguments: str) -> dict[str, Any]:
    commands: Any = typer.main.get_command(app)
    context = commands.commands["serve"].make_context("serve", list(arguments))
    return dict(context.params)


def test_its_parameters_are_flags_and_the_rest_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path)
    found = parsed("--service", str(file), "--http-port=8123")
    assert (found["model_repository"], found["allow_http"], found["http_port"]) == (["oss://bucket/models"], True, 8123)
    shown = capsys.readouterr().err
    names = "name, metadata.instance, metadata.cpu, metadata.gpu, metadata.memory, cloud.computing"
    assert shown.startswith(f"Without effect here: {names} of {file} (the platform's), --pinned-memory-pool-byte-size")


def test_problems_are_told_all_at_once(tmp_path: Path) -> None:
    params = ["--allow-sagemaker=true", "--modl-repository=x", "--http-port=one"]
    file = written(tmp_path, processor="tensorflow_gpu_1.15", processor_params=params)
    with pytest.raises(InvalidArgument) as caught:
        parsed(f"--service={file}", "--log-verbos=1")
    told = str(caught.value)
    for part in (
        "(5 problems)",
        'processor must be triton, got "tensorflow_gpu_1.15"',
        "--allow-sagemaker is not supported",
        "no option --modl-repository; did you mean --model-repository?",
        "no option --log-verbos; did you mean --log-verbose?",
        "--http-port: ",
    ):
        assert part in told


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "must be a JSON object"),
        ('{"processor": "triton"}', "processor_params must be a list of flags"),
        ('{"processor": "triton", "processor_params": [1]}', "got [1]"),
    ],
)
def test_a_file_that_is_none(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "service.json"
    file.write_text(text)
    assert problem in read_services(["--service", str(file)]).problems[0]
    assert "No such file" in read_services([f"--service={file}2"]).problems[0]


@pytest.mark.parametrize("arguments", [[], ["engine"], ["--service"]])
def test_a_command_line_without_a_file(arguments: list[str]) -> None:
    assert read_services(arguments).arguments == arguments
