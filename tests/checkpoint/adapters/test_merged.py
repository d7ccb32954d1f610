"""A checkpoint with an adapter in it computes what PEFT's model computes, and what does not fit is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llmserve.builder.reference import ReferenceModel
from llmserve.checkpoint.adapters.adapted import open_checkpoint
from llmserve.checkpoint.plan import plan_weights
from llmserve.checkpoint.reader import Checkpoint
from llmserve.errors import CheckpointError
from llmserve.models.registry import architecture_for
from tests.adapters import USUAL_MODULES, adapted_model, make_adapter, save_adapter
from tests.checkpoints import make_checkpoint
from tests.oracle import oracle_logits, relative_error

IDS = [1, 70, 35, 190, 17, 101, 44, 17, 260, 9]


def logits_of(checkpoint: Checkpoint) -> Any:
    architecture = architecture_for(checkpoint.config)
    spec = architecture.from_hf(checkpoint.config)
    plan = plan_weights(checkpoint, architecture.params(spec), architecture.ignored)
    return ReferenceModel(architecture.program(spec), lambda name: plan.load(name, "float32")).logits(IDS)


OPTIONS: dict[str, dict[str, Any]] = {
    "rank-stabilized": {"use_rslora": True, "r": 3, "lora_alpha": 5},
    "dora": {"use_dora": True},
    "patterns": {
        "rank_pattern": {"k_proj": 2, "^model.layers.1.mlp.up_proj": 5}, "alpha_pattern": {"layers.0.*.v_proj": 3},
    },
    "one layer": {"layers_to_transform": [1]},
    "whole modules": {"modules_to_save": ["lm_head", "embed_tokens", "input_layernorm"]},
    "an embedding": {"target_modules": ["embed_tokens", "q_proj", "lm_head"]},
    "biases": {"bias": "all"},
}  # fmt: skip


@pytest.mark.parametrize("what", OPTIONS)
@pytest.mark.parametrize("kind", ["qwen2", "llama-tied"])
def test_what_peft_offers(kind: str, what: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "c", kind)
    model = adapted_model(folder, **{"target_modules": USUAL_MODULES, **OPTIONS[what]})
    save_adapter(model, tmp_path / "a")
    with open_checkpoint(folder, tmp_path / "a") as checkpoint:
        assert relative_error(logits_of(checkpoint), oracle_logits(model, IDS)) < 1e-5


def test_pieces_of_a_weight_are_the_whole(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "c", "llama")
    make_adapter(tmp_path / "a", folder, use_dora=True)
    with open_checkpoint(folder, tmp_path / "a") as checkpoint:
        name = "model.layers.0.mlp.up_proj.weight"
        whole, rows = checkpoint.read(name), checkpoint.rows(name)
        pieces = [rows[begin : begin + 7] for begin in range(0, len(whole), 7)]
        np.testing.assert_array_equal(np.concatenate(pieces), whole)
        with Checkpoint.open(folder) as base:
            assert checkpoint.digest() != base.digest()


def config(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def edit(adapter: Path) -> None:
        content = json.loads((adapter / "adapter_config.json").read_text())
        change(content)
        (adapter / "adapter_config.json").write_text(json.dumps(content))

    return edit


def tensors(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def edit(adapter: Path) -> None:
        content = dict(load_file(adapter / "adapter_model.safetensors"))
        change(content)
        save_file(content, adapter / "adapter_model.safetensors")

    return edit


A, B = (f"base_model.model.model.layers.0.self_attn.q_proj.lora_{each}.weight" for each in "AB")
WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "another method": (config(lambda c: c.update(peft_type="IA3")), "peft_type is 'IA3'"),
    "another rank": (config(lambda c: c.update(r=5)), "do not have the rank 5"),
    "no rank": (config(lambda c: c.update(r="4")), "r must be an integer above 0"),
    "an alpha that is no number": (config(lambda c: c.update(lora_alpha=None)), "lora_alpha must be a number"),
    "a slow pattern": (config(lambda c: c.update(rank_pattern={"(a+)+b": 2})), "pattern '(a+)+b' is not supported"),
    "a key of tomorrow": (config(lambda c: c.update(use_warp=True)), "use_warp is not supported"),
    "experts": (config(lambda c: c.update(target_parameters=["mlp.experts"])), "target_parameters is not supported"),
    "PiSSA": (config(lambda c: c.update(init_lora_weights="pissa")), "path_initial_model_for_weight_conversion"),
    "no config": (lambda a: (a / "adapter_config.json").unlink(), "adapter_config.json is missing"),
    "no weights": (lambda a: (a / "adapter_model.safetensors").unlink(), "adapter_model.safetensors is missing"),
    "a pickle": (lambda a: (a / "adapter_model.safetensors").rename(a / "adapter_model.bin"), "safe_serialization"),
    "half a pair": (tensors(lambda t: t.pop(A)), "only one of LoRA's two matrices"),
    "NaN": (tensors(lambda t: t[A].fill(np.nan)), "NaN or infinite"),
    "integers": (tensors(lambda t: t.update({A: t[A].astype(np.int32)})), "has dtype int32"),
    "another base": (tensors(lambda t: t.update({B: t[B][:-1].copy()})), "has the shape"),
    "a foreign tensor": (tensors(lambda t: t.update({"base_model.model.eye.weight": t[A]})), "changes eye.weight"),
    "a foreign name": (tensors(lambda t: t.update({"x": t[A]})), "does not begin with base_model.model."),
    "a bias of LoRA": (tensors(lambda t: t.update({B.replace("weight", "bias"): t[B][0]})), "is not supported"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_is_refused_by_name(what: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "c", "llama")
    make_adapter(tmp_path / "a", folder)
    damage, words = WRONG[what]
    damage(tmp_path / "a")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder, tmp_path / "a")
    assert words in str(caught.value)


def test_all_problems_are_listed(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "c", "llama")
    other = make_checkpoint(tmp_path / "o", "llama", num_hidden_layers=3, hidden_size=96)
    make_adapter(tmp_path / "a", other)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder, tmp_path / "a")
    said = str(caught.value)
    assert "model.layers.2.mlp.up_proj.weight, but the checkpoint has no such tensor" in said
    assert "model.layers.0.self_attn.q_proj.weight has the shape [64, 64] in the checkpoint, but [96, 96]" in said
