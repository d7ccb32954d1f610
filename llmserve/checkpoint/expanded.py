"""Writes any checkpoint as a Hugging Face folder in float32, for programs that read no other format."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from llmserve.checkpoint.reader import GENERATION_CONFIG_NAME, Checkpoint
from llmserve.checkpoint.safetensors_writer import Planned, SafetensorsWriter
from llmserve.core import TOKENIZER_FILES


def write_expanded(
    checkpoint: Checkpoint, folder: Path, advance: Callable[[int], None] = lambda num_tensors: None
) -> None:
    """Write to `folder`, which is created. Holds two tensors in memory; `advance` receives each tensor that is
    written."""
    write_text_files(checkpoint, folder)
    planned = _planned(checkpoint)
    with SafetensorsWriter(folder / "model.safetensors", planned) as writer:
        for name in planned:
            writer.write(name, checkpoint.read(name).astype("float32"))
            advance(1)


def write_text_files(checkpoint: Checkpoint, folder: Path) -> None:
    """Write everything except the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**checkpoint.config, "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in (*TOKENIZER_FILES, GENERATION_CONFIG_NAME):
        checkpoint.copy_text_file(name, folder / name)


def expanded_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of the weights that `write_expanded` writes."""
    return sum(planned.num_bytes for planned in _planned(checkpoint).values())


def _planned(checkpoint: Checkpoint) -> dict[str, Planned]:
    kept = (name for name in checkpoint.tensors if name not in checkpoint.surplus)
    return {name: Planned("float32", checkpoint.tensors[name].shape) for name in kept}
