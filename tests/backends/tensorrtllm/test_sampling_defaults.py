"""What generation_config.json may say of sampling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmserve.backends.tensorrtllm.sampling_defaults import sampling_defaults

QWEN = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}


@pytest.mark.parametrize(
    ("config", "defaults"),
    [
        ({**QWEN, "do_sample": True, "eos_token_id": [1, 2], "max_new_tokens": 7}, QWEN),
        ({}, {}),
        ({"temperature": None, "top_p": "1", "top_k": True, "min_p": [0]}, {}),
        ({"temperature": -1, "top_p": 0, "top_k": 0.5, "min_p": 2, "repetition_penalty": 0}, {}),
        ({"temperature": float("nan"), "top_k": float("inf")}, {}),
    ],
)
def test_what_can_be_used_is_taken(tmp_path: Path, config: dict[str, Any], defaults: dict[str, float]) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert sampling_defaults(tmp_path) == defaults


def test_a_checkpoint_need_not_say_anything(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == {}
