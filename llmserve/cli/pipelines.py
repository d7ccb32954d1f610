"""The path of the packaged model repository, and the parameters that put an engine directory into a repository."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

import llmserve
from llmserve.errors import NotFound
from llmserve.stages.named_templates import NAMES

ENGINE_BACKEND = "tensorrtllm"
ALLOW_TEMPLATE, TEMPLATE = "allow_chat_template", "chat_template"  # parameters of a model's config
ENGINE_PATH, TOKENIZER_PATH = "gpt_model_path", "tokenizer_dir"  # parameters of a model's config


def packaged_repository(*, pools: bool = False) -> Path:
    """`ensemble`, `preprocessing`, `tensorrt_llm`, `postprocessing`: in the wheel, or in the source tree.

    `pools`: the one for engines that compute embeddings or scores, without postprocessing.
    """
    package, name = Path(llmserve.__file__).parent, "pipelines-embeddings" if pools else "pipelines"
    candidates = (package / "_data" / name, package.parent / name)
    found = next((path for path in candidates if path.is_dir()), None)
    if found is None:
        raise NotFound(f"the packaged model repository is missing ({candidates[0]}); reinstall llmserve")
    return found


def engine_parameters(
    engine: Path | None,
    limits: Mapping[str, str],
    config: ModelConfig,
    *,
    allows_templates: bool = False,
    template: Path | None = None,
) -> dict[str, str]:
    """Parameters that make a model of a repository use `engine`, its tokenizer and these limits. `allows_templates`: in
    requests. `template`: a file or name that replaces the checkpoint's template."""
    path = "" if engine is None else str(engine.absolute())
    if config.backend == ENGINE_BACKEND:
        return {**limits, ENGINE_PATH: path, TOKENIZER_PATH: path} if path else dict(limits)
    wanted = {ALLOW_TEMPLATE: "true"} if allows_templates else {}
    if template is not None:
        is_name = str(template) in NAMES and not template.is_file()
        wanted[TEMPLATE] = str(template if is_name else template.absolute())
    chosen = {key: value for key, value in wanted.items() if key in config.parameters}
    return {**chosen, **({TOKENIZER_PATH: path} if path and TOKENIZER_PATH in config.parameters else {})}
