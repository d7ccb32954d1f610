"""GGUF files of networks whose layers differ or have a state: the network of the folder that was converted."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmserve.checkpoint.expanded import write_expanded
from llmserve.checkpoint.plan import plan_weights
from llmserve.checkpoint.reader import Checkpoint
from llmserve.errors import CheckpointError, Unsupported
from llmserve.models.registry import architecture_for
from tests.checkpoints import KINDS, make_checkpoint, random_tensors
from tests.gguf_files import HYBRID_KINDS, Changes, make_gguf
from tests.oracle import load_oracle, oracle_logits, reference_logits, relative_error

IDS = [int(i) for i in np.random.default_rng(1).integers(3, 320, 40)]
# Qwen3-Next is read by the names of Qwen3.5, and Falcon-H1's multipliers are part of the weights
CHANGED = ("qwen3-next-moe", "falcon-h1")


def overrides(kind: str) -> dict[str, Any]:
    """Sizes that are whole blocks of Q8_0, and what llama.cpp takes for granted."""
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 192}
    if kind.startswith("qwen3"):
        sizes |= {"linear_value_head_dim": 32}
    if kind.startswith("qwen3") and kind.endswith("moe"):
        sizes |= {"mlp_only_layers": [], "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}
    if kind == "nemotron-h-moe":
        sizes |= {
            "hybrid_override_pattern": "ME*ME",
            "moe_latent_size": 32,
            "intermediate_size": 32,
        }  # all MLPs have experts
    if kind == "granite4-h":
        sizes["shared_intermediate_size"] = 192
    if kind == "granite4-h-moe":
        sizes |= {"shared_intermediate_size": 96, "intermediate_size": 64}
    return sizes


def problems_of(path: Path) -> str:
    """Of its header, its config, or its plan: none reads a weight."""

    def plan() -> None:
        with Checkpoint.open(path) as checkpoint:
            architecture = architecture_for(checkpoint.config)
            spec = architecture.from_hf(checkpoint.config)
            plan_weights(checkpoint, architecture.params(spec), (*architecture.ignored, *spec.ignored))

    with pytest.raises((CheckpointError, Unsupported)) as caught:
        plan()
    return str(caught.value)


@pytest.mark.parametrize("kind", HYBRID_KINDS)
def test_a_file_is_the_network_of_the_folder(kind: str, tmp_path: Path) -> None:
    """By transformers on the folder: names, order of rows and columns, decays, norms, multipliers."""
    folder = make_checkpoint(tmp_path / "folder", kind, with_tokenizer=False, **overrides(kind))
    file = make_gguf(tmp_path / "m.gguf", kind, **overrides(kind))
    assert relative_error(reference_logits(file)(IDS), oracle_logits(load_oracle(folder), IDS)) < 1e-4


@pytest.mark.parametrize("kind", [kind for kind in HYBRID_KINDS if kind not in CHANGED])
def test_config_and_tensors_are_those_of_the_folder(kind: str, tmp_path: Path) -> None:
    config = KINDS[kind] | overrides(kind)
    with Checkpoint.open(make_gguf(tmp_path / "m.gguf", kind, **overrides(kind))) as found:
        spec, wanted = (asdict(architecture_for(each).from_hf(each)) for each in (found.config, config))
        if kind.startswith(("granite4-h", "nemotron-h")):
            wanted["max_position_embeddings"] = 1 << 20  # what the converter writes of them
        assert spec == wanted
        for name, tensor in random_tensors(config, dtype="float32", seed=0).items():
            assert found.tensors[name].shape == tensor.shape
            tolerance = 1e-6 if name.endswith(("A_log", "norm.weight")) else 0.0
            np.testing.assert_allclose(found.read(name), tensor, rtol=tolerance, atol=tolerance)
            for piece in (slice(1, len(tensor) - 1), slice(len(tensor) - 2, len(tensor))):
                np.testing.assert_array_equal(found.rows(name)[piece], found.read(name)[piece])


@pytest.mark.parametrize("kind", ["qwen3-next-moe", "qwen3.5", "granite4-h", "gemma4-moe"])
def test_logits_are_those_of_transformers_on_the_expanded_values(kind: str, tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "m.gguf", kind, stored="Q8_0", **overrides(kind))
    with Checkpoint.open(path) as checkpoint:
        write_expanded(checkpoint, tmp_path / "expanded")
    wanted = oracle_logits(load_oracle(tmp_path / "expanded"), IDS)
    assert relative_error(reference_logits(path)(IDS), wanted) < 1e-4


@pytest.mark.parametrize(("stored", "kept"), [("Q8_0", True), ("Q4_K", False)])
def test_columns_in_another_order_are_blocks_where_these_fit_heads(stored: str, kept: bool, tmp_path: Path) -> None:
    """Of Qwen3.5's value heads: 32 columns are a head, and a block of Q8_0."""
    sizes: dict[str, Any] = {
        "linear_num_value_heads": 8,
        "hidden_size": 256,
        "intermediate_size": 256,
        "linear_value_head_dim": 32,
    }
    path = make_gguf(tmp_path / "m.gguf", "qwen3.5", stored=stored, **sizes)
    name = "model.layers.0.linear_attn.out_proj.weight"
    with Checkpoint.open(path) as checkpoint:
        rows: Any = checkpoint.rows(name)
        blocks = rows.blocks(slice(2, 9))
        assert (blocks is not None) is kept
        if blocks is not None:
            np.testing.assert_array_equal(blocks.weight, rows[2:9])


def test_blocks_that_draft_tokens_are_left_out(tmp_path: Path) -> None:
    """As a file has them: the last block is one, of attention, with tensors that others do not have."""
    sizes: dict[str, Any] = {"num_hidden_layers": 4, "full_attention_interval": 2}
    path = make_gguf(tmp_path / "m.gguf", "qwen3.5", metadata={"qwen35.nextn_predict_layers": 2}, **sizes)
    with Checkpoint.open(path) as checkpoint:
        assert checkpoint.config["num_hidden_layers"] == 2
        assert not any(name.startswith(("model.layers.2", "model.layers.3")) for name in checkpoint.tensors)
    assert np.isfinite(reference_logits(path)(IDS)).all()


@pytest.mark.parametrize("kind", ["qwen3.5", "qwen3.5-moe"])
def test_one_block_that_drafts_tokens_is_a_network_of_its_own(kind: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"num_hidden_layers": 4, "full_attention_interval": 2}
    width, rng = KINDS[kind]["hidden_size"], np.random.default_rng(0)
    own = {name: rng.standard_normal(width, np.float32) for name in ("enorm", "hnorm", "shared_head_norm")}
    own["eh_proj"] = rng.standard_normal((width, 2 * width), np.float32)
    changes = Changes(added={f"blk.3.nextn.{name}.weight": tensor for name, tensor in own.items()})
    metadata = {f"{kind.replace('.', '').replace('-', '')}.nextn_predict_layers": 1}
    path = make_gguf(tmp_path / "m.gguf", kind, metadata=metadata, changes=changes, **sizes)
    original = random_tensors(KINDS[kind] | sizes, dtype="float32", seed=0)
    with Checkpoint.open(path) as checkpoint:
        network = architecture_for(checkpoint.config)
        assert checkpoint.config["num_hidden_layers"] == 3
        plan_weights(checkpoint, network.params(network.from_hf(checkpoint.config)), network.ignored)
        layer = network.drafter
        assert layer is not None
        params = layer.params(layer.from_hf(checkpoint.config))
        plan = plan_weights(checkpoint, params, layer.ignored)
        loaded = {param.name: plan.load(param.name, "float32") for param in params}
    np.testing.assert_array_equal(loaded["joint.linear"], own["eh_proj"])
    np.testing.assert_allclose(loaded["joint.norm"], np.concatenate((own["enorm"], own["hnorm"])) - 1, atol=1e-6)
    np.testing.assert_allclose(loaded["norm"], own["shared_head_norm"] - 1, atol=1e-6)
    matrices = {"layers.0.attn.output": "self_attn.o_proj.weight"}
    if kind == "qwen3.5":
        matrices["layers.0.mlp.down"] = "mlp.down_proj.weight"
    for name, source in matrices.items():
        np.testing.assert_array_equal(loaded[name], original[f"model.layers.3.{source}"])


def test_gate_and_up_of_experts_may_be_one_tensor(tmp_path: Path) -> None:
    own = overrides("qwen3.5-moe")
    apart = make_gguf(tmp_path / "m.gguf", "qwen3.5-moe", **own)
    fused = make_gguf(tmp_path / "n.gguf", "qwen3.5-moe", changes=Changes(fused_experts=True), **own)
    assert b"ffn_gate_up_exps" in fused.read_bytes()
    np.testing.assert_array_equal(reference_logits(fused)(IDS), reference_logits(apart)(IDS))


@pytest.mark.parametrize(
    ("kind", "metadata", "problem"),
    [
        (
            "qwen3.5",
            {"qwen35.ssm.inner_size": 191},
            "qwen35.ssm.inner_size (191) must be a multiple of qwen35.ssm.time",
        ),
        ("qwen3.5", {"qwen35.ssm.state_size": None}, "qwen35.ssm.state_size must be an integer from 1"),
        (
            "qwen3.5",
            {"qwen35.ssm.group_count": 4},
            "linear_num_value_heads (6) must be a multiple of linear_num_key_heads",
        ),
        ("qwen3.5", {"qwen35.full_attention_interval": 3}, "tensor blk.1.attn_qkv.weight [240, 64] is missing"),
        ("qwen3.5", {"qwen35.expert_count": 4}, "qwen35.expert_count 4 is not supported: it changes the network"),
        ("qwen3.5-moe", {"qwen35moe.expert_used_count": None}, "qwen35moe.expert_used_count must be an integer from 1"),
        ("qwen3.5", {"qwen35.attention.recurrent_layers": [True]}, "qwen35.attention.recurrent_layers must be 3 flags"),
        (
            "qwen3.5",
            {"qwen35.attention.recurrent_layers": [True] * 3},
            "layer_types must have a layer of full_attention",
        ),
        ("qwen3.5", {"qwen35.block_count": 2**31 - 1}, "num_hidden_layers must be"),
        ("gemma4", {"gemma4.attention.key_length": 2**31 - 1}, "tensor rope_freqs.weight must be 1073741823 factors"),
        ("granite4-h", {"granitehybrid.rope.scaling.finetuned": True}, "Bamba is not supported as GGUF"),
        ("granite4-h", {"granitehybrid.rope.scaling.finetuned": None}, "Bamba is not supported as GGUF"),
        ("granite4-h", {"granitehybrid.attention.head_count_kv": [0, 2]}, "head_count_kv must be 3 whole numbers"),
        ("granite4-h", {"granitehybrid.ssm.inner_size": 96}, "must be the inner width"),
        (
            "falcon-h1",
            {"falcon-h1.rope.dimension_count": 8},
            "falcon-h1.rope.dimension_count must be the head size (16)",
        ),
        (
            "nemotron-h",
            {"nemotron_h.feed_forward_length": [9, 8, 0, 0, 8]},
            "nemotron_h.feed_forward_length must be one",
        ),
        ("nemotron-h", {"nemotron_h.feed_forward_length": [0, 8, 8, 0, 8]}, "must not both be set for one layer"),
        ("nemotron-h", {"nemotron_h.expert_count": 4}, "nemotron_h.expert_count 4 is not supported: it changes"),
        ("nemotron-h-moe", {"nemotron_h_moe.expert_gating_func": 1}, "nemotron_h_moe.expert_gating_func must be 2"),
        ("nemotron-h-moe", {"nemotron_h_moe.moe_latent_size": None}, "tensor blk.1.ffn_latent_down.weight is not part"),
        (
            "gemma3n",
            {"gemma3n.activation_sparsity_scale": [0.1]},
            "gemma3n.activation_sparsity_scale must be 4 numbers",
        ),
        ("gemma3n", {"gemma3n.altup.num_inputs": 4}, "tensor altup_proj.weight"),
        ("gemma4", {"gemma4.attention.sliding_window_pattern": [True]}, "sliding_window_pattern must be 4 flags"),
        (
            "gemma4",
            {"gemma4.rope.dimension_count_swa": 8},
            "gemma4.rope.dimension_count_swa must be the keys' size (20)",
        ),
        ("gemma4", {"gemma4.attention.head_count_kv": [2, 2, 1, 2]}, "gemma4.attention.head_count_kv must be the same"),
        (
            "gemma4",
            {"gemma4.feed_forward_length": [192, 192, 100, 100]},
            "gemma4.feed_forward_length must be one number",
        ),
        (
            "gemma4",
            {"gemma4.attention.key_length_swa": None},
            "gemma4.attention.key_length_swa must be an integer from 1",
        ),
        (
            "gemma4",
            {"gemma4.embedding_length_per_layer_input": 8},
            "tensor per_layer_token_embd.weight has shape [320, 48]",
        ),
    ],
    ids=str,
)
def test_networks_that_are_refused(kind: str, metadata: dict[str, Any], problem: str, tmp_path: Path) -> None:
    assert problem in problems_of(make_gguf(tmp_path / "m.gguf", kind, metadata=metadata, **overrides(kind)))


@pytest.mark.parametrize(
    ("kind", "name", "other", "problem"),
    [
        (
            "gemma3n",
            "altup_unembd_proj.weight",
            "altup_x.weight",
            "tensor altup_unembd_proj.weight [64, 64] is missing",
        ),
        ("gemma4", "rope_freqs.weight", "rope_frequ.weight", "tensor rope_freqs.weight is missing"),
        (
            "qwen3-next-moe",
            "blk.0.attn_qkv.weight",
            "blk.00.ssm_in.weight",
            "it has ssm_in.weight, which llama.cpp's converter",
        ),
        ("nemotron-h", "blk.3.ssm_a", "blk.3.ssm_x", "tensor blk.3.ssm_a [6] is missing"),
        ("falcon-h1", "output.weight", "outpux.weight", "a head tied to the embedding has lost its multiplier"),
    ],
)
def test_tensors_that_are_missing_are_named(kind: str, name: str, other: str, problem: str, tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "m.gguf", kind, changes=Changes(renamed={name: other}), **overrides(kind))
    assert problem in problems_of(path)


def test_decays_that_grow_are_found(tmp_path: Path) -> None:
    path = make_gguf(
        tmp_path / "m.gguf", "nemotron-h", changes=Changes(negated=("blk.0.ssm_a",)), **overrides("nemotron-h")
    )
    with pytest.raises(CheckpointError, match=r"tensor blk\.0\.ssm_a has NaN or infinite values"):
        reference_logits(path)([3, 4])
