"""A model repository for a Triton server, around an engine directory: `llmserve export triton`.

It has the four models of the packaged pipelines. A model finds its files below its own directory
($$TRITON_MODEL_DIRECTORY), because a server copies each model separately from an object store; so each has its own copy
of the tokenizer. A repository that is not self-contained has only configs and code, and refers to the engine's path.

    tensorrt_llm/1/engine/         the engine directory
    preprocessing/1/tokenizer/     its text files; postprocessing/ likewise
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.builder.output import staged_directory
from llmserve.builder.triton_contract import ENGINE_MODEL, TENSORRT_LLM_RELEASE, compiled_model, ensemble_of_contract
from llmserve.core import TOKENIZER_FILES
from llmserve.engine.directory.artifact import (
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    HF_CONFIG_FILE,
    EngineDirectory,
)
from llmserve.engine.registry import runtime_for
from llmserve.errors import AlreadyExists, Unsupported
from llmserve.stages.files import MODEL_DIRECTORY

CONFIG_PBTXT = "config.pbtxt"
ENSEMBLE = "ensemble"
ENGINE_FOLDER, TOKENIZER_FOLDER = "1/engine", "1/tokenizer"
TEXT_FILES = (*TOKENIZER_FILES, CONFIG_FILE, HF_CONFIG_FILE, GENERATION_CONFIG_FILE)


class TritonBackend(Enum):
    """The backend that runs the engine in the server."""

    PYTHON = "python"  # llmserve, behind Triton's Python backend
    TENSORRTLLM = "tensorrtllm"  # TensorRT-LLM's own C++ backend


@dataclass(frozen=True, slots=True)
class TritonExport:
    engine: EngineDirectory
    pipelines: Path  # the packaged repository
    output: Path
    backend: TritonBackend = TritonBackend.PYTHON
    self_contained: bool = True
    mounted_at: Path | None = None  # path of `output` on the server; None: the same path

    def write(self) -> None:
        """Write `output` completely or not at all. Raises `AlreadyExists` unless it is free or empty."""
        if makes := self.engine.info().pooling:
            raise Unsupported(f"{self.engine.path} makes {makes}, so it cannot be exported; use `llmserve serve`")
        if self.backend is TritonBackend.TENSORRTLLM:
            _check_compiled(self.engine)
        if self.output.exists() and (not self.output.is_dir() or any(self.output.iterdir())):
            raise AlreadyExists(f"{self.output} exists; remove it, or choose another --output")
        with staged_directory(self.output) as repository:
            for source in sorted(path for path in self.pipelines.iterdir() if path.is_dir()):
                self._write_model(source, repository / source.name)

    def _write_model(self, source: Path, model: Path) -> None:
        config = text_format.Parse((source / CONFIG_PBTXT).read_text(), ModelConfig())
        (model / "1").mkdir(parents=True)
        if config.name == ENGINE_MODEL:
            config = self._engine_model(config)
        elif config.name == ENSEMBLE:
            if self.backend is TritonBackend.TENSORRTLLM:
                config = ensemble_of_contract(config)
        else:
            self._point(config, {"tokenizer_dir": TOKENIZER_FOLDER})
            self._copy(TEXT_FILES, model / TOKENIZER_FOLDER)
        if config.backend == "python":
            shutil.copyfile(source / "1/model.py", model / "1/model.py")
        if config.name == ENGINE_MODEL:
            self._copy(tuple(path.name for path in self.engine.path.iterdir()), model / ENGINE_FOLDER)
        (model / CONFIG_PBTXT).write_text(self._header() + text_format.MessageToString(config))

    def _engine_model(self, config: ModelConfig) -> ModelConfig:
        if self.backend is TritonBackend.PYTHON:
            config.backend = "python"
            self._point(config, {"gpt_model_path": ENGINE_FOLDER, "tokenizer_dir": ENGINE_FOLDER})
            return config
        # This backend reads the paths as they are.
        place = (self.mounted_at or self.output).absolute() / ENGINE_MODEL / ENGINE_FOLDER
        return compiled_model(config, self.engine, place if self.self_contained else self.engine.path.absolute())

    def _point(self, config: ModelConfig, folders: Mapping[str, str]) -> None:
        """Set parameters that are paths: below the model's own directory, or the engine's current path."""
        for key, folder in folders.items():
            here = f"{MODEL_DIRECTORY}/{folder}" if self.self_contained else str(self.engine.path.absolute())
            config.parameters[key].string_value = here

    def _copy(self, names: tuple[str, ...], folder: Path) -> None:
        if not self.self_contained:
            return
        folder.mkdir()
        for name in names:
            source = self.engine.path / name
            if source.is_dir():
                shutil.copytree(source, folder / name)
            elif source.exists():
                (folder / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(source, folder / name)

    def _header(self) -> str:
        manifest = self.engine.manifest
        return (
            f"# Written by llmserve export triton: {manifest.source.architecture} {manifest.dtype}, engine digest\n"
            f"# {manifest.engine_digest}\n\n"
        )


def _check_compiled(engine: EngineDirectory) -> None:
    """Refuse engines that TensorRT-LLM's C++ backend cannot run: all that its builder did not compile."""
    manifest = engine.manifest
    backend = TritonBackend.TENSORRTLLM.value
    if backend not in runtime_for(manifest.target).triton_backends(manifest):
        mode = manifest.device.get("mode")
        raise Unsupported(
            f"{engine.path} is a {manifest.target} engine{f' in {mode} mode' if mode else ''}; --backend {backend} "
            f"needs one that TensorRT-LLM {TENSORRT_LLM_RELEASE} has compiled; leave out the flag: the Python backend "
            "runs this one"
        )
