"""`llmserve export triton`: writes an engine as a model repository for a Triton server."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from llmserve.builder.triton_repository import TritonBackend, TritonExport
from llmserve.cli.pipelines import packaged_repository
from llmserve.cli.termination import terminated_as_exception
from llmserve.engine.directory.artifact import EngineDirectory


class ExportFormat(Enum):
    TRITON = "triton"


def command(
    format: Annotated[ExportFormat, typer.Argument(help="What to write: a Triton model repository.")],
    engine: Annotated[Path, typer.Argument(help="Engine directory.")],
    output: Annotated[Path, typer.Option(help="The model repository; must not exist, or be empty.")],
    backend: Annotated[
        TritonBackend,
        typer.Option(help="What runs the engine there: llmserve in Triton's Python backend, or TensorRT-LLM's own."),
    ] = TritonBackend.PYTHON,
    copy: Annotated[
        bool, typer.Option("--copy/--no-copy", help="Copy the engine into the repository, or name its path.")
    ] = True,
    mounted_at: Annotated[
        Path | None,
        typer.Option(help="With --backend tensorrtllm: the repository's path on the server.", show_default="--output"),
    ] = None,
) -> None:
    """Write a model repository that a Triton Inference Server loads: the same four models."""
    directory = EngineDirectory.open(engine)
    export = TritonExport(directory, packaged_repository(), output, backend, self_contained=copy, mounted_at=mounted_at)
    with terminated_as_exception():
        export.write()
    typer.echo(f"{output}: ensemble, preprocessing, tensorrt_llm, postprocessing")
    typer.echo(_next_step(backend, output))


def _next_step(backend: TritonBackend, output: Path) -> str:
    start = f"pip install llmserve 'numpy<2'; then: tritonserver --model-repository={output}"
    if backend is TritonBackend.PYTHON:
        return f"in the server's Python: {start}"
    return f"the server's TensorRT-LLM must be the engine's; in its Python, for the tokenizer: {start}"
