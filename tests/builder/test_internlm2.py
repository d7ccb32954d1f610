"""InternLM 2 against transformers' Llama: the same numbers under other names, and with rows in another order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmserve.checkpoint.plan import plan_weights
from llmserve.checkpoint.reader import Checkpoint
from llmserve.errors import CheckpointError
from llmserve.models.registry import architecture_for
from tests.checkpoints import KINDS, LLAMA3_SCALING, random_tensors, write_json, write_tensors
from tests.oracle import load_oracle, oracle_logits, reference_logits, relative_error

PROMPT = tuple(int(i) for i in np.random.default_rng(7).integers(3, 320, size=90))
PUBLISHED = (
    ("model.embed_tokens", "model.tok_embeddings"), ("lm_head", "output"), ("self_attn.o_proj", "attention.wo"),
    ("input_layernorm", "attention_norm"), ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "feed_forward.w1"), ("mlp.up_proj", "feed_forward.w3"), ("mlp.down_proj", "feed_forward.w2"),
)  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "as published": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "with biases": {"attention_bias": True, "num_hidden_layers": 3},
    "tied": {"tie_word_embeddings": True, "num_attention_heads": 8},
    "one key/value head": {"num_key_value_heads": 1, "rope_scaling": LLAMA3_SCALING},
    "as many key/value heads": {"num_key_value_heads": 4, "rope_scaling": {"type": "linear", "factor": 2.0}},
}


def make_twins(path: Path, **overrides: Any) -> tuple[Path, Path]:
    """A Llama, and the same network as InternLM 2 publishes it."""
    config = KINDS["llama"] | overrides
    tensors = random_tensors(config | {"attention_bias": False}, dtype="float32", seed=1)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config["hidden_size"] // heads
    if config["attention_bias"]:
        rng = np.random.default_rng(2)
        for i in range(config["num_hidden_layers"]):
            for module, rows in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads), ("o_proj", heads)):
                bias = rng.standard_normal(rows * head_dim).astype(np.float32)
                tensors[f"model.layers.{i}.self_attn.{module}.bias"] = bias
    for folder in ("llama", "internlm2"):
        (path / folder).mkdir(parents=True)
    write_json(path / "llama" / "config.json", config)
    write_tensors(path / "llama", tensors, "safetensors")
    own = {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": config["attention_bias"]}
    config = {key: value for key, value in config.items() if key not in ("attention_bias", "mlp_bias")} | own
    write_json(path / "internlm2" / "config.json", config)
    write_tensors(path / "internlm2", published(tensors, heads // kv_heads, head_dim), "sharded")
    return path / "llama", path / "internlm2"


def published(tensors: dict[str, NDArray[Any]], queries: int, head_dim: int) -> dict[str, NDArray[Any]]:
    """Each key/value head after the queries that read it."""
    found = {}
    for name, tensor in tensors.items():
        if ".k_proj." in name or ".v_proj." in name:
            continue
        if ".q_proj." in name:
            parts = [tensor.reshape(-1, queries, head_dim, *tensor.shape[1:])]
            for letter in "kv":
                other = tensors[name.replace(".q_proj.", f".{letter}_proj.")]
                parts.append(other.reshape(-1, 1, head_dim, *tensor.shape[1:]))
            tensor = np.concatenate(parts, axis=1).reshape(-1, *tensor.shape[1:])
            name = name.replace("self_attn.q_proj", "attention.wqkv")
        for llama, own in PUBLISHED:
            name = name.replace(llama, own)
        found[name] = np.ascontiguousarray(tensor)
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_is_a_llama_in_other_rows(variant: str, tmp_path: Path) -> None:
    """Of the same program with the same parameters, bit for bit, which every engine is made of."""
    llama, internlm2 = make_twins(tmp_path, **VARIANTS[variant])
    found = reference_logits(internlm2)(PROMPT)
    assert relative_error(found, oracle_logits(load_oracle(llama), PROMPT)) < 1e-5
    plans = []
    for path in (llama, internlm2):
        with Checkpoint.open(path) as checkpoint:
            architecture = architecture_for(checkpoint.config)
            spec = architecture.from_hf(checkpoint.config)
            plan = plan_weights(checkpoint, architecture.params(spec), architecture.ignored)
            plans.append(
                (architecture.program(spec), {each.name: plan.load(each.name, "float32") for each in plan.params})
            )
    (program, params), (own_program, own_params) = plans
    assert own_program == program
    assert own_params.keys() == params.keys()
    assert all(np.array_equal(own_params[name], params[name]) for name in params)


def test_rows_are_read_in_pieces(tmp_path: Path) -> None:
    _, path = make_twins(tmp_path)
    with Checkpoint.open(path) as checkpoint:
        architecture = architecture_for(checkpoint.config)
        plan = plan_weights(checkpoint, architecture.params(architecture.from_hf(checkpoint.config)), ())
        rows = plan.rows("layers.1.attn.qkv", "float32")
        pieces = [rows[begin : begin + 24] for begin in range(0, 128, 24)]
        np.testing.assert_array_equal(np.concatenate(pieces), plan.load("layers.1.attn.qkv", "float32"))


def test_what_the_config_asks_for_otherwise_is_refused(tmp_path: Path) -> None:
    config = KINDS["llama"] | {
        "model_type": "internlm2",
        "architectures": ["InternLM2ForCausalLM"],
        "pretraining_tp": 2,
    }
    with pytest.raises(CheckpointError, match="pretraining_tp 2 is not supported"):
        architecture_for(config).from_hf(config)
