"""GGUF files of networks with attention over a latent (`deepseek2`), in the forms that llama.cpp has written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from llmserve.checkpoint.plan import plan_weights
from llmserve.checkpoint.reader import Checkpoint
from llmserve.errors import CheckpointError
from llmserve.models.registry import architecture_for
from tests.checkpoints import KINDS, make_checkpoint, random_tensors
from tests.gguf_files import Changes, make_gguf
from tests.oracle import load_oracle, oracle_logits, reference_logits, relative_error

IDS = [int(i) for i in np.random.default_rng(1).integers(3, 320, 40)]
KV_B = "model.layers.1.self_attn.kv_b_proj.weight"
OLD: dict[str, Any] = {
    "deepseek2.attention.head_count_kv": 4,
    "deepseek2.attention.key_length": 28,
    "deepseek2.attention.value_length": 12,
    "deepseek2.attention.key_length_mla": None,
    "deepseek2.attention.value_length_mla": None,
    "deepseek2.expert_gating_func": None,
    "deepseek2.expert_group_count": None,
    "deepseek2.expert_group_used_count": None,
}


def test_files_from_before_keys_and_values_were_separate(tmp_path: Path) -> None:
    """They have no groups either: llama.cpp computed V2-Lite, and the others as if they had none."""
    changes = Changes(joined_heads=True)
    path = make_gguf(tmp_path / "m.gguf", "deepseek-v2-moe", metadata=OLD, changes=changes)
    folder = make_checkpoint(tmp_path / "c", "deepseek-v2-moe", with_tokenizer=False, topk_method="greedy")
    wanted = random_tensors(KINDS["deepseek-v2-moe"], dtype="float32", seed=0)
    with Checkpoint.open(path) as checkpoint:
        assert {name: info.shape for name, info in checkpoint.tensors.items()} == {
            n: t.shape for n, t in wanted.items()
        }
        assert np.array_equal(checkpoint.read(KV_B), wanted[KV_B])
    assert relative_error(reference_logits(path)(IDS), oracle_logits(load_oracle(folder), IDS)) < 1e-5


def test_glm_4_7_flash_is_a_deepseek_v3(tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "m.gguf", "glm4-lite-moe", architecture=gguf.MODEL_ARCH.DEEPSEEK2)
    folder = make_checkpoint(tmp_path / "c", "glm4-lite-moe", with_tokenizer=False)
    assert relative_error(reference_logits(path)(IDS), oracle_logits(load_oracle(folder), IDS)) < 1e-5


def test_rows_of_both_parts(tmp_path: Path) -> None:
    wanted = random_tensors(KINDS["deepseek-v3-moe"], dtype="float32", seed=0)[KV_B]
    with Checkpoint.open(make_gguf(tmp_path / "m.gguf", "deepseek-v3-moe")) as checkpoint:
        rows = checkpoint.rows(KV_B)
        for begin, end in ((0, 20), (20, 32), (31, 33), (5, 100), (0, len(wanted))):
            assert np.array_equal(rows[begin:end], wanted[begin:end])


def test_parts_that_do_not_fit_are_named(tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "m.gguf", "deepseek-v3-moe")
    path.write_bytes(path.read_bytes().replace(b"blk.1.attn_v_b.weight", b"blk.3.attn_v_b.weight"))
    with Checkpoint.open(path) as checkpoint:
        architecture = architecture_for(checkpoint.config)
        params = architecture.params(architecture.from_hf(checkpoint.config))
        with pytest.raises(CheckpointError, match=r"tensor blk\.1\.attn_k_b\.weight has shape \[5, 40, 20\]"):
            plan_weights(checkpoint, params, ())


def test_layers_that_draft_tokens_are_left_out(tmp_path: Path) -> None:
    metadata = {"deepseek2.nextn_predict_layers": 1}
    path = make_gguf(tmp_path / "m.gguf", "deepseek-v3-moe", num_hidden_layers=3, metadata=metadata)
    with Checkpoint.open(path) as checkpoint:
        architecture = architecture_for(checkpoint.config)
        spec = architecture.from_hf(checkpoint.config)
        assert spec.num_layers == 2
        plan_weights(checkpoint, architecture.params(spec), spec.ignored)
