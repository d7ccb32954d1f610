"""The text files beside a model: the position limit of a checkpoint and of an engine directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmserve.stages.files import TextFiles


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({"max_position_embeddings": 512, "model_max_length": 4096}, 512),
        ({"model_max_length": 4096}, 4096),
        ({"max_position_embeddings": 512, "rope_scaling": {"type": "linear", "factor": 2.0}}, 1024),
        ({}, None),
        ({"build_config": {"max_seq_len": 24}, "max_position_embeddings": 512}, 24),
    ],
)
def test_longest_sequence(config: dict[str, Any], limit: int | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert TextFiles.read(tmp_path).max_seq_len == limit
