"""Where the packaged model repository is, and how an engine directory is put into a repository."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

import llmserve
from llmserve.errors import NotFound
from llmserve.serving.repository import scan_repositories

ENGINE_BACKEND = "tensorrtllm"
ENGINE_PATH, TOKENIZER_PATH = "gpt_model_path", "tokenizer_dir"  # parameters of a model's config

Overrides = dict[str, dict[str, str]]  # model -> parameter -> value


def packaged_repository() -> Path:
    """`ensemble`, `preprocessing`, `tensorrt_llm`, `postprocessing`: in the wheel, or in the source tree."""
    package = Path(llmserve.__file__).parent
    candidates = (package / "_data" / "pipelines", package.parent / "pipelines")
    found = next((path for path in candidates if path.is_dir()), None)
    if found is None:
        raise NotFound(f"the packaged model repository is missing ({candidates[0]}); reinstall llmserve")
    return found


def engine_overrides(
    repositories: Sequence[Path], engine: Path | None, engine_parameters: Mapping[str, str]
) -> Overrides:
    """Parameters that make every model of the repositories use `engine` (its tokenizer, too) with these limits."""
    overrides: Overrides = {}
    for source in scan_repositories(repositories):
        parameters = dict(engine_parameters) if source.config.backend == ENGINE_BACKEND else {}
        if engine is not None:
            parameters |= _paths(source.config, str(engine.absolute()))
        if parameters:
            overrides[source.name] = parameters
    return overrides


def _paths(config: ModelConfig, engine: str) -> dict[str, str]:
    if config.backend == ENGINE_BACKEND:
        return {ENGINE_PATH: engine, TOKENIZER_PATH: engine}
    return {TOKENIZER_PATH: engine} if TOKENIZER_PATH in config.parameters else {}
