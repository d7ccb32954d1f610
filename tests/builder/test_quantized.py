"""An engine from a quantized folder is the engine of the weights that it stands for."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.builder.plan import plan_build
from llmserve.checkpoint.expanded import write_expanded
from llmserve.checkpoint.reader import Checkpoint
from llmserve.cli import inspect as inspect_command
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.errors import CheckpointError
from llmserve.stages.files import TextFiles
from tests.builder.fake_target import FakeTarget
from tests.quantized_files import METHODS, gptq, make_quantized

FLOAT32 = BuildOptions(dtype="float32")


@pytest.mark.parametrize("method", METHODS)
def test_the_engine_digest_is_that_of_the_expanded_folder(method: str, tmp_path: Path) -> None:
    make_quantized(tmp_path / "q", METHODS[method])
    with Checkpoint.open(tmp_path / "q") as checkpoint:
        write_expanded(checkpoint, tmp_path / "expanded")
    one = build_engine(tmp_path / "expanded", tmp_path / "one", FLOAT32, target=FakeTarget())
    other = build_engine(tmp_path / "q", tmp_path / "other", FLOAT32, target=FakeTarget())
    assert one.engine_digest == other.engine_digest


def test_the_directory_says_what_it_was_and_what_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_quantized(tmp_path / "q", gptq())
    assert "GPTQ int4" in plan_build(tmp_path / "q", FLOAT32, target=FakeTarget(), measure=lambda: 1e9).notes[0]
    with caplog.at_level(logging.WARNING):
        manifest = build_engine(tmp_path / "q", tmp_path / "e", BuildOptions(max_seq_len=64))
    assert "69% GPTQ int4 (groups of 16)" in caplog.text
    assert manifest.source.rounded == "69% GPTQ int4 (groups of 16)"
    assert EngineDirectory.open(tmp_path / "e").manifest.source == manifest.source
    assert "quantization_config" not in json.loads((tmp_path / "e/hf_config.json").read_text())
    assert TextFiles.read(tmp_path / "q").max_seq_len == 256
    app = typer.Typer()
    app.command()(inspect_command.command)
    assert "69% GPTQ int4 (groups of 16), expanded" in CliRunner().invoke(app, [str(tmp_path / "e")]).output


def test_a_bad_folder_leaves_nothing(tmp_path: Path) -> None:
    make_quantized(tmp_path / "q", gptq(), config={"bits": 2})
    with pytest.raises(CheckpointError, match="bits 2 is not supported"):
        build_engine(tmp_path / "q", tmp_path / "e", FLOAT32, target=FakeTarget())
    assert [path.name for path in tmp_path.iterdir()] == ["q"]
