"""Names of the classes that an output scores, from the file in `label_filename` of a model's config."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.errors import ModelConfigError, raise_problems
from llmserve.serving.config.files import read_inside

Labels: TypeAlias = Mapping[str, tuple[str, ...]]  # output -> a name for each class, in order


def read_labels(config: ModelConfig, model_dir: Path) -> Labels:
    """Read the label files, one class per line. Raises `ModelConfigError` if a file cannot be read."""
    labels: dict[str, tuple[str, ...]] = {}
    problems: list[str] = []
    for output in config.output:
        if not output.label_filename:
            continue
        try:
            text = read_inside(model_dir, output.label_filename).decode()
        except (OSError, UnicodeDecodeError) as error:
            problems.append(f"label_filename of output '{output.name}' cannot be read: {error}")
            continue
        labels[output.name] = tuple(line.strip() for line in text.splitlines())
    raise_problems(ModelConfigError, f"model '{config.name}' cannot be loaded", problems)
    return labels


def labels_of_steps(config: ModelConfig, models: Mapping[str, Labels]) -> Labels:
    """The labels of an ensemble's tensors, taken from the steps that produce them; `models`: the steps' labels."""
    return {
        tensor: models[step.model_name][output]
        for step in config.ensemble_scheduling.step
        for output, tensor in step.output_map.items()
        if output in models.get(step.model_name, {})
    }
