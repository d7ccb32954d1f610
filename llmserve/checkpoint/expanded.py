"""Any checkpoint as a Hugging Face folder with its values in float32, for those who read nothing else."""

from __future__ import annotations

import json
from pathlib import Path

from llmserve.checkpoint.reader import Checkpoint
from llmserve.checkpoint.safetensors_writer import Planned, SafetensorsWriter

TEXT_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "generation_config.json")


def write_expanded(checkpoint: Checkpoint, folder: Path) -> None:
    """Into `folder`, which is made. Holds two tensors in memory."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**checkpoint.config, "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in TEXT_FILES:
        if (content := checkpoint.text_file(name)) is not None:
            (folder / name).write_bytes(content)
    kept = {name: info for name, info in checkpoint.tensors.items() if name not in checkpoint.surplus}
    planned = {name: Planned("float32", info.shape) for name, info in kept.items()}
    with SafetensorsWriter(folder / "model.safetensors", planned) as writer:
        for name in planned:
            writer.write(name, checkpoint.read(name).astype("float32"))
