"""A quantized folder as a checkpoint: the tensors and the network of the original, in the values that it stores."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from llmserve.checkpoint.expanded import write_expanded
from llmserve.checkpoint.plan import WeightPlan, plan_weights
from llmserve.checkpoint.reader import Checkpoint
from llmserve.errors import CheckpointError
from llmserve.models.registry import architecture_for
from tests.checkpoints import make_checkpoint, write_tensors
from tests.oracle import load_oracle, oracle_logits, reference_logits, relative_error
from tests.quantized_files import METHODS, gptq, make_packed_experts, make_quantized, mxfp4

IDS = [int(i) for i in np.random.default_rng(1).integers(3, 320, 40)]
Q_PROJ = "model.layers.0.self_attn.q_proj"


def plan_of(checkpoint: Checkpoint) -> WeightPlan:
    architecture = architecture_for(checkpoint.config)
    return plan_weights(checkpoint, architecture.params(architecture.from_hf(checkpoint.config)), architecture.ignored)


@pytest.mark.parametrize("method", METHODS)
def test_tensors_are_those_of_the_original(method: str, tmp_path: Path) -> None:
    wanted = make_quantized(tmp_path, METHODS[method])
    with Checkpoint.open(tmp_path) as found:
        assert {name: info.shape for name, info in found.tensors.items()} == {n: t.shape for n, t in wanted.items()}
        for name, tensor in wanted.items():
            assert np.array_equal(found.read(name).astype(np.float32), tensor), name
        assert "quantization_config" not in found.config
        assert json.loads(found.text_file("config.json") or b"") == found.config
        (kind,) = found.rounded_shares
        assert found.rounded_shares[kind] == pytest.approx(0.68, abs=0.02)
        assert kind in found.notes[0]
        plan_of(found)


@pytest.mark.parametrize("method", METHODS)
def test_logits_are_those_of_transformers_on_the_expanded_values(method: str, tmp_path: Path) -> None:
    make_quantized(tmp_path / "q", METHODS[method])
    with Checkpoint.open(tmp_path / "q") as checkpoint:
        write_expanded(checkpoint, tmp_path / "expanded")
    wanted = oracle_logits(load_oracle(tmp_path / "expanded"), IDS)
    assert relative_error(reference_logits(tmp_path / "q")(IDS), wanted) < 2e-5


@pytest.mark.parametrize("kind", ["baichuan2-7b", "phi3", "qwen2", "qwen3", "gemma3"])
def test_every_family(kind: str, tmp_path: Path) -> None:
    """Fused modules, biases, norms of heads."""
    sizes: dict[str, Any] = {"hidden_size": 96, "head_dim": 24} if kind == "gemma3" else {}
    wanted = make_quantized(tmp_path, gptq(), kind, **sizes)
    with Checkpoint.open(tmp_path) as found:
        plan_of(found)
        assert all(np.array_equal(found.read(name).astype(np.float32), tensor) for name, tensor in wanted.items())


def test_products_of_two_matrices(tmp_path: Path) -> None:
    make_quantized(tmp_path / "q", METHODS["fp8-block"], "deepseek-v3-moe")
    with Checkpoint.open(tmp_path / "q") as checkpoint:
        write_expanded(checkpoint, tmp_path / "expanded")
    wanted = oracle_logits(load_oracle(tmp_path / "expanded"), IDS)
    assert relative_error(reference_logits(tmp_path / "q")(IDS), wanted) < 2e-5


@pytest.mark.parametrize("format", ["sharded", "bin", "bin-sharded"])
def test_every_layout_of_files(format: str, tmp_path: Path) -> None:
    wanted = make_quantized(tmp_path, gptq(), format=format)
    with Checkpoint.open(tmp_path) as found:
        assert all(np.array_equal(found.read(name).astype(np.float32), tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize("method", ["fp8-tensor", "modelopt"])
def test_scales_of_activations_and_of_the_cache_are_left_out(method: str, tmp_path: Path) -> None:
    names = ("q_proj.input_scale", "k_proj.k_scale", "v_proj.output_scale", "k_scale", "v_scale")
    scales = {f"model.layers.0.self_attn.{name}": np.ones((), np.float32) for name in names}
    wanted = make_quantized(tmp_path, METHODS[method], tensors=scales)
    with Checkpoint.open(tmp_path) as found:
        assert found.tensors.keys() == wanted.keys()
        plan_of(found)


def test_exponents_may_be_bytes(tmp_path: Path) -> None:
    scales = np.random.default_rng(1).integers(110, 120, (2, 2), dtype=np.uint8)
    make_quantized(tmp_path, METHODS["fp8-exponents"], tensors={f"{Q_PROJ}.weight_scale_inv": scales})
    with Checkpoint.open(tmp_path) as found:
        read = found.read(f"{Q_PROJ}.weight")
        stored = found.read("model.layers.0.self_attn.q_proj.weight")
        assert np.isfinite(stored).all()
    make_quantized(tmp_path, METHODS["fp8-exponents"], tensors={f"{Q_PROJ}.weight_scale_inv": scales + np.uint8(1)})
    with Checkpoint.open(tmp_path) as found:
        assert np.array_equal(found.read(f"{Q_PROJ}.weight"), 2 * read)


def test_groups_with_schemes_of_their_own(tmp_path: Path) -> None:
    """What is named goes before all that are linear; a group whose weights are floats means nothing."""
    int8, int4 = METHODS["int8"], METHODS["packed-int4"]
    own = int8.encode(np.random.default_rng(1), 64, 64)
    parts: dict[str, Any] = {f"{Q_PROJ}.{part}": None for part in ("weight_packed", "weight_scale", "weight_shape")}
    groups = {
        "all": int4.config["config_groups"]["group_0"] | {"format": "pack-quantized"},
        "cache": {"targets": ["LlamaAttention"], "weights": None},
        "own": int8.config["config_groups"]["group_0"] | {"format": "int-quantized", "targets": ["re:.*q_proj$"]},
    }
    make_quantized(
        tmp_path,
        int4,
        num_hidden_layers=1,
        tensors=parts | {f"{Q_PROJ}.{part}": values for part, values in own.parts.items()},
        config={"format": "mixed-precision", "config_groups": groups},
    )
    with Checkpoint.open(tmp_path) as found:
        plan_of(found)
        assert np.array_equal(found.read(f"{Q_PROJ}.weight"), own.weight)
        assert set(found.rounded_shares) == {
            "compressed-tensors int4 (groups of 16)",
            "compressed-tensors int8 (per channel)",
        }


@pytest.mark.parametrize("groups", [{}, {"group_0": {"targets": [], "weights": None}}])
def test_a_folder_that_quantizes_only_the_kv_cache(groups: dict[str, Any], tmp_path: Path) -> None:
    """Its weights are as they were, and the cache's scales are not used."""
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    description = {
        "quant_method": "compressed-tensors", "format": "dense", "quantization_status": "compressed",
        "config_groups": groups, "kv_cache_scheme": scheme,
    }  # fmt: skip
    make_checkpoint(tmp_path, "llama", quantization_config=description)
    weights = load_file(tmp_path / "model.safetensors")
    scales = {f"model.layers.0.self_attn.{part}_scale": np.ones(1, np.float16) for part in "kv"}
    write_tensors(tmp_path, weights | scales, "safetensors")
    with Checkpoint.open(tmp_path) as found:
        plan_of(found)
        assert found.tensors.keys() == weights.keys()
        assert np.array_equal(found.read(f"{Q_PROJ}.weight"), weights[f"{Q_PROJ}.weight"])
        assert not found.notes


def test_what_early_versions_of_compressed_tensors_wrote(tmp_path: Path) -> None:
    """Their key and status, one number as a scale, and zero points of a scheme that has none."""
    module = "model.layers.0.self_attn.k_proj"
    zeros: dict[str, Any] = {
        f"{module}.weight_zero_point": np.zeros((32, 1), np.int8),
        f"{module}.input_scale": np.ones(1, np.float16),
    }
    wanted = make_quantized(tmp_path, METHODS["int8"], tensors=zeros, config={"quantization_status": "frozen"})
    content = json.loads((tmp_path / "config.json").read_text())
    content["compression_config"] = content.pop("quantization_config") | {"sparsity_config": {"format": "dense"}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with Checkpoint.open(tmp_path) as found:
        plan_of(found)
        assert found.tensors.keys() == wanted.keys()
        assert np.array_equal(found.read(f"{module}.weight"), wanted[f"{module}.weight"])


def test_mxfp4(tmp_path: Path) -> None:
    wanted = make_quantized(tmp_path, mxfp4(), intermediate_size=192)
    with Checkpoint.open(tmp_path) as found:
        plan_of(found)
        assert all(np.array_equal(found.read(name).astype(np.float32), tensor) for name, tensor in wanted.items())
        assert "MXFP4" in found.rounded


def test_modelopts_own_file(tmp_path: Path) -> None:
    make_quantized(tmp_path, METHODS["modelopt"])
    content = json.loads((tmp_path / "config.json").read_text())
    del content["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    with Checkpoint.open(tmp_path) as found:
        assert "FP8 (per tensor)" in found.rounded


def test_a_quantized_head(tmp_path: Path) -> None:
    encoded = gptq().encode(np.random.default_rng(1), 320, 64)
    head = {f"lm_head.{part}": values for part, values in encoded.parts.items()}
    make_quantized(tmp_path, gptq(), tensors=head | {"lm_head.weight": None})
    with Checkpoint.open(tmp_path) as found:
        assert np.array_equal(found.read("lm_head.weight"), encoded.weight)
        plan_of(found)


def test_a_bias_of_zeros_that_the_network_has_not_is_left_out(tmp_path: Path) -> None:
    """AutoGPTQ wrote one for every module."""
    zeros = np.zeros(64, np.float16)
    make_quantized(tmp_path / "q", gptq(), tensors={f"{Q_PROJ}.bias": zeros})
    with Checkpoint.open(tmp_path / "q") as found:
        plan_of(found)
        write_expanded(found, tmp_path / "expanded")
    load_oracle(tmp_path / "expanded")
    make_quantized(tmp_path / "r", gptq(), tensors={f"{Q_PROJ}.bias": zeros + np.float16(1)})
    with Checkpoint.open(tmp_path / "r") as found, pytest.raises(CheckpointError, match=r"q_proj\.bias is not part of"):
        plan_of(found)


def test_a_bias_of_zeros_that_the_network_has_is_kept(tmp_path: Path) -> None:
    make_quantized(tmp_path, gptq(), "qwen2", tensors={f"{Q_PROJ}.bias": np.zeros(64, np.float16)})
    with Checkpoint.open(tmp_path) as found:
        assert not plan_of(found).load("layers.0.attn.qkv.bias", "float32")[:64].any()


def test_a_module_may_be_stored_as_it_was(tmp_path: Path) -> None:
    plain = np.ones((64, 64), np.float16)
    parts: dict[str, Any] = {f"{Q_PROJ}.{part}": None for part in ("qweight", "qzeros", "scales", "g_idx")}
    make_quantized(tmp_path, gptq(), tensors=parts | {f"{Q_PROJ}.weight": plain})
    with Checkpoint.open(tmp_path) as found:
        plan_of(found)
        assert np.array_equal(found.read(f"{Q_PROJ}.weight"), plain)


def test_the_plan_speaks_of_the_weight_and_of_how_it_is_stored(tmp_path: Path) -> None:
    make_quantized(tmp_path, gptq())
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"intermediate_size": 160}))
    with Checkpoint.open(tmp_path) as found, pytest.raises(CheckpointError) as caught:
        plan_of(found)
    named = r"model.layers.0.mlp.up_proj.weight (stored as qweight) has shape [176, 64], config.json requires [160, 64]"
    assert named in str(caught.value)


def test_the_digest_covers_the_other_config_files(tmp_path: Path) -> None:
    make_quantized(tmp_path, gptq())
    with Checkpoint.open(tmp_path) as found:
        digest = found.digest()
    (tmp_path / "quantize_config.json").write_text('{"bits": 4}')
    with Checkpoint.open(tmp_path) as found:
        assert found.digest() != digest


def test_a_matrix_is_expanded_a_piece_at_a_time(tmp_path: Path) -> None:
    """Of a matrix of 16 MB in float16, whose float32 values would be 32 MB."""
    sizes: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 1, "vocab_size": 320}
    make_quantized(tmp_path, gptq(), num_attention_heads=16, num_key_value_heads=1, **sizes)
    with Checkpoint.open(tmp_path) as found:
        plan = plan_of(found)
        tracemalloc.start()
        assert plan.load("layers.0.mlp.gate_up", "float16").nbytes == 32 << 20
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < (32 + 40) << 20


def test_numbers_that_are_not_finite_are_found(tmp_path: Path) -> None:
    scales = np.full((4, 64), np.nan, np.float16)
    make_quantized(tmp_path, gptq(), tensors={f"{Q_PROJ}.scales": scales})
    with pytest.raises(CheckpointError, match=r"q_proj\.weight \(stored as qweight\) has NaN or infinite values"):
        reference_logits(tmp_path)([3, 4])


def test_eight_bits_without_a_config_are_no_weights(tmp_path: Path) -> None:
    make_quantized(tmp_path, METHODS["fp8-tensor"], config={"quant_method": None, "activation_scheme": None})
    content = json.loads((tmp_path / "config.json").read_text())
    del content["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    with Checkpoint.open(tmp_path) as found, pytest.raises(CheckpointError) as caught:
        plan_of(found)
    assert f"{Q_PROJ}.weight has dtype float8_e4m3fn; supported: float64, float32" in str(caught.value)
    assert f"{Q_PROJ}.weight_scale is not part of this architecture" in str(caught.value)


def test_the_experts_of_gpt_oss(tmp_path: Path) -> None:
    """A network from a folder as it is published has the logits of one whose experts transformers has expanded."""
    make_checkpoint(tmp_path / "expanded", "gpt-oss", intermediate_size=64, with_tokenizer=False)
    write_tensors(tmp_path / "expanded", make_packed_experts(tmp_path / "packed"), "safetensors")
    prompt = list(range(3, 60))
    found, wanted = (reference_logits(tmp_path / name)(prompt) for name in ("packed", "expanded"))
    assert np.array_equal(found, wanted)
