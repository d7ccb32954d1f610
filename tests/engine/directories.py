"""A small but complete engine directory, made without a builder. Its engine file holds no engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from llmserve.engine.directory.artifact import CONFIG_FILE, ENGINE_FILE, MANIFEST_FILE, hash_file
from llmserve.engine.directory.manifest import FileRecord, Manifest, Source

OPTIONS = {
    "dtype": "float16", "quantization": "", "max_batch_size": 4, "max_num_tokens": 32, "max_seq_len": 64,
    "tokens_per_block": 8, "target": "cpu",
}  # fmt: skip
CONFIG = {
    "pretrained_config": {"vocab_size": 320, "num_hidden_layers": 2, "hidden_size": 64},
    "build_config": {"max_seq_len": 64, "max_batch_size": 4, "max_num_tokens": 32},
}
MANIFEST = Manifest(
    engine_digest="e" * 64,
    target="cpu",
    device={"isa": "portable"},
    source=Source("c" * 64, "LlamaForCausalLM", ("config.json", "model.safetensors")),
    options=OPTIONS,
    tensors={"embed": "a" * 64},
    files={},
    tools={"llmserve": "0"},
)


def make_engine_directory(path: Path, files: dict[str, bytes] | None = None) -> Path:
    path.mkdir(parents=True)
    contents = {CONFIG_FILE: json.dumps(CONFIG).encode(), ENGINE_FILE: bytes(range(256)) * 16} | (files or {})
    for name, content in contents.items():
        (path / name).write_bytes(content)
    seal(path, MANIFEST)
    return path


def seal(path: Path, manifest: Manifest) -> None:
    """Write a manifest that records the files as they are now."""
    records = {
        file.name: FileRecord(file.stat().st_size, hash_file(file))
        for file in path.iterdir()
        if file.name != MANIFEST_FILE
    }
    (path / MANIFEST_FILE).write_text(replace(manifest, files=records).to_json())
