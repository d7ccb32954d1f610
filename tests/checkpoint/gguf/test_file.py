"""A GGUF file as a checkpoint: the same config and the same tensors as the folder that it was converted from."""

from __future__ import annotations

import shutil
import tracemalloc
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize, quantize

from llmserve.checkpoint.expanded import write_expanded
from llmserve.checkpoint.gguf.architectures import ARCHITECTURES
from llmserve.checkpoint.plan import plan_weights
from llmserve.checkpoint.reader import Checkpoint
from llmserve.errors import CheckpointError, Unsupported
from llmserve.models.registry import architecture_for
from llmserve.models.spec import DecoderSpec
from tests.checkpoints import AROUND_ONE, KINDS, MIXTURES, random_tensors
from tests.gguf_files import GGUF_KINDS, make_gguf
from tests.oracle import load_oracle, oracle_logits, reference_logits, relative_error

MXFP4 = gguf.GGMLQuantizationType.MXFP4
# llama.cpp has experts in every layer; sizes are whole blocks of Q8_0
EXPERTS: dict[str, Any] = {"mlp_only_layers": [], "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}
GEMMA = {"query_pre_attn_scalar": 24}  # the head size, which a GGUF file cannot say otherwise


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SIZES_OF_LATENT: dict[str, Any] = {
    "q_lora_rank": 32, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "moe_intermediate_size": 64,
    "rope_scaling": YARN | {"mscale": 0.8, "mscale_all_dim": 0.8},  # llama.cpp has one number for both
}  # fmt: skip


def overrides(kind: str) -> dict[str, Any]:
    if kind == "cohere2":
        return {"sliding_window_pattern": 4, "num_hidden_layers": 4}  # which llama.cpp takes for granted
    if kind == "afmoe":
        return {"moe_intermediate_size": 64, "global_attn_every_n_layers": 4}
    if kind == "exaone-moe":
        return {"moe_intermediate_size": 64}
    if kind == "starcoder2":
        return {"sliding_window": None}  # which llama.cpp leaves out
    if kind == "dots1-moe":
        return {"sliding_window": None, "moe_intermediate_size": 64}  # llama.cpp has no windows
    if kind == "llama4-moe":  # all but the sizes is taken for granted by llama.cpp
        sizes = {"num_hidden_layers": 4, "intermediate_size": 64, "intermediate_size_mlp": 96}
        return sizes | {
            "no_rope_layer_interval": 4,
            "attention_chunk_size": 8192,
            "floor_scale": 8192,
            "attn_scale": 0.1,
        }
    if kind in ("minimax-m2", "hunyuan-moe", "granite-moe", "gpt-oss", "phimoe"):
        return {"intermediate_size": 64}
    if kind == "lfm2-moe":
        # llama.cpp has neither a factor nor a head
        return {"moe_intermediate_size": 64, "routed_scaling_factor": 1.0, "tie_word_embeddings": True}
    if kind == "lfm2":
        return {"block_multiple_of": 32}
    if kind.startswith("deepseek"):
        return SIZES_OF_LATENT
    return GEMMA if kind.startswith("gemma") else EXPERTS if kind in MIXTURES else {}


def spec_of(config: Any) -> DecoderSpec:
    spec: DecoderSpec = architecture_for(config).from_hf(config)
    return spec


def problems_of(path: Path, error: type[Exception] = CheckpointError) -> str:
    with pytest.raises(error) as caught:
        Checkpoint.open(path)
    return str(caught.value)


@pytest.mark.parametrize("kind", GGUF_KINDS)
def test_tensors_are_those_of_the_folder(kind: str, tmp_path: Path) -> None:
    with Checkpoint.open(make_gguf(tmp_path / "m.gguf", kind, **overrides(kind))) as found:
        wanted = random_tensors(KINDS[kind] | overrides(kind), dtype="float32", seed=0)
        assert {name: info.shape for name, info in found.tensors.items()} == {n: t.shape for n, t in wanted.items()}
        for name, tensor in wanted.items():
            if kind.startswith(AROUND_ONE) and name.endswith("norm.weight"):
                assert np.array_equal(found.read(name) + np.float32(1), tensor + np.float32(1))
            else:
                assert np.array_equal(found.read(name), tensor)


@pytest.mark.parametrize("kind", GGUF_KINDS)
def test_the_network_is_that_of_the_folder(kind: str, tmp_path: Path) -> None:
    """All that a config decides. Factors of a rotary embedding are rounded to float32 in the file."""
    with Checkpoint.open(make_gguf(tmp_path / "m.gguf", kind, **overrides(kind))) as checkpoint:
        found, wanted = (asdict(spec_of(config)) for config in (checkpoint.config, KINDS[kind] | overrides(kind)))
    for name in found.keys() & {"rope", "long_rope", "local_rope"}:
        one, other = found.pop(name), wanted.pop(name)
        assert (one or {}) == {key: pytest.approx(value, rel=1e-6) for key, value in (other or {}).items()}
    assert found == wanted


@pytest.mark.parametrize("kind", GGUF_KINDS)
def test_logits_are_those_of_transformers_on_the_expanded_values(kind: str, tmp_path: Path) -> None:
    """Of the whole way: header, config, names, order of rows, plan; and of the folder that stands for the file."""
    sizes = {"intermediate_size": 192, "hidden_size": 64} | overrides(kind)
    path = make_gguf(tmp_path / "m.gguf", kind, stored="Q8_0", **sizes)
    with Checkpoint.open(path) as checkpoint:
        write_expanded(checkpoint, tmp_path / "expanded")
    ids = [int(i) for i in np.random.default_rng(1).integers(3, 320, 40)]
    wanted = oracle_logits(load_oracle(tmp_path / "expanded"), ids)
    assert relative_error(reference_logits(path)(ids), wanted) < 2e-5
    assert relative_error(reference_logits(tmp_path / "expanded")(ids), wanted) < 2e-5


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"llama.rope.freq_base": None}, {"rope_theta": 10000.0}),
        ({"llama.rope.scale_linear": 4.0}, {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, {"rope_scaling": None}),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 64,
                "llama.rope.scaling.yarn_beta_fast": 16.0,
                "llama.rope.scaling.yarn_attn_factor": 0.878,
            },
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                    "beta_fast": 16.0,
                }
            },
        ),
        ({"llama.attention.head_count_kv": None, "llama.attention.key_length": None}, {"num_key_value_heads": 4}),
        ({"llama.attention.layer_norm_rms_epsilon": 1e-5}, {"rms_norm_eps": 1e-5}),
        ({"tokenizer.ggml.eos_token_id": 7}, {"eos_token_id": 7}),
    ],
    ids=lambda value: next(iter(value)),
)
def test_metadata(metadata: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    with Checkpoint.open(make_gguf(tmp_path / "m.gguf", metadata=metadata)) as found:
        assert {key: found.config.get(key) for key in expected} == expected


@pytest.mark.parametrize(("layers", "scalar"), [(1, 16), (46, 18)])
def test_gemma_2_of_27b_scales_attention_by_width(layers: int, scalar: int, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 72, "num_attention_heads": 4, "head_dim": 16, "num_hidden_layers": layers}
    with Checkpoint.open(make_gguf(tmp_path / "m.gguf", "gemma2", **sizes)) as found:
        assert found.config["query_pre_attn_scalar"] == scalar


def test_the_language_models_of_glm_v_are_refused(tmp_path: Path) -> None:
    """Their queries and keys are ordered otherwise."""
    metadata = {"glm4.rope.dimension_sections": [8, 12, 12, 0]}
    with pytest.raises(CheckpointError, match=r"glm4\.rope\.dimension_sections: language models of GLM-V"):
        Checkpoint.open(make_gguf(tmp_path / "m.gguf", "glm4", metadata=metadata))


def test_mistral_3_whose_queries_do_not_grow_is_mistral(tmp_path: Path) -> None:
    metadata = {"mistral3.attention.temperature_scale": None, "mistral3.rope.scaling.yarn_log_multiplier": None}
    with Checkpoint.open(make_gguf(tmp_path / "m.gguf", "ministral3", metadata=metadata)) as found:
        assert spec_of(found.config).architecture == "MistralForCausalLM"
        assert spec_of(found.config).windows == ()


def test_internlm_2_is_a_llama_of_another_name(tmp_path: Path) -> None:
    """llama.cpp's converter takes apart what is one tensor in its checkpoints."""
    llama = make_gguf(tmp_path / "llama.gguf")
    path = make_gguf(tmp_path / "m.gguf", architecture=gguf.MODEL_ARCH.INTERNLM2)
    with Checkpoint.open(path) as found:
        assert spec_of(found.config).architecture == "LlamaForCausalLM"
    assert np.array_equal(reference_logits(path)(range(3, 40)), reference_logits(llama)(range(3, 40)))


def test_stablelm_in_parallel_and_with_plain_heads(tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "m.gguf", "stablelm", use_parallel_residual=True, qk_layernorm=False)
    with Checkpoint.open(path) as found:
        wanted = {"use_parallel_residual": True, "qk_layernorm": False, "use_qkv_bias": False}
        assert {key: found.config[key] for key in wanted} == wanted


def test_gemma_3_without_a_window(tmp_path: Path) -> None:
    metadata = {"gemma3.attention.sliding_window": None}
    with Checkpoint.open(make_gguf(tmp_path / "m.gguf", "gemma3", metadata=metadata)) as found:
        assert spec_of(found.config).windows == ()


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({"qwen3moe.expert_gating_func": 2}, "qwen3moe.expert_gating_func 2 is not supported: it changes the network"),
        ({"qwen3moe.expert_weights_scale": 2.5}, "qwen3moe.expert_weights_scale 2.5"),
        ({"qwen3moe.expert_used_count": None}, "qwen3moe.expert_used_count must be an integer from 1"),
    ],
)
def test_other_mixtures_of_experts_are_refused(metadata: dict[str, Any], problem: str, tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "m.gguf", "qwen3-moe", metadata=metadata, **EXPERTS)
    with pytest.raises((CheckpointError, Unsupported), match=problem):
        Checkpoint.open(path)


def test_heads_of_llama_4_are_not_normed_of_128_experts(tmp_path: Path) -> None:
    for count, head_norm in ((16, True), (128, False)):
        path = make_gguf(tmp_path / "m.gguf", "llama4-moe", **overrides("llama4-moe") | {"num_local_experts": count})
        with Checkpoint.open(path) as found:
            assert found.config["use_qk_norm"] is head_norm
    metadata = {"llama4.attention.sliding_window": 0, "llama4.attention.sliding_window_pattern": 5}
    problems = problems_of(make_gguf(tmp_path / "m.gguf", "llama4-moe", metadata=metadata))
    assert "llama4.attention.sliding_window must be 8192" in problems
    assert "llama4.attention.sliding_window_pattern must be 4" in problems


def test_phi_3_5_moe_scales_cosines_as_published(tmp_path: Path) -> None:
    """A converter writes another factor: that of Phi-3."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [1.5 + 0.25 * i for i in range(8)]}
    scale = dict.fromkeys(("short_mscale", "long_mscale"), 1.243163121016122)
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 64, **factors, **scale}
    with Checkpoint.open(make_gguf(tmp_path / "m.gguf", "phimoe", rope_scaling=rope)) as found:
        wanted = asdict(spec_of(KINDS["phimoe"] | {"rope_scaling": rope}))
        assert asdict(spec_of(found.config)) == wanted


def test_layers_that_draft_tokens_are_left_out(tmp_path: Path) -> None:
    """As a file has them: the last block is one, with tensors that others do not have."""
    path = make_gguf(tmp_path / "m.gguf", "glm4-moe", num_hidden_layers=3, metadata={"glm4moe.nextn_predict_layers": 1})
    with Checkpoint.open(path) as checkpoint:
        spec = spec_of(checkpoint.config)
        assert spec.num_layers == 2
        params = architecture_for(checkpoint.config).params(spec)
        assert len(plan_weights(checkpoint, params, spec.ignored).params) == len(params)
    exaone: dict[str, Any] = {"num_hidden_layers": 4, "metadata": {"exaone-moe.nextn_predict_layers": 1}}
    with Checkpoint.open(make_gguf(tmp_path / "e.gguf", "exaone-moe", **exaone)) as checkpoint:
        spec = spec_of(checkpoint.config)
        assert spec.num_layers == len(spec.windows) == 3
        params = architecture_for(checkpoint.config).params(spec)
        assert len(plan_weights(checkpoint, params, ()).params) == len(params)
    glm = ARCHITECTURES["glm4moe"]
    for own, name in (("eh_proj", "eh_proj"), ("shared_head_norm", "shared_head.norm")):
        assert glm.to_hf(f"blk.2.nextn.{own}.weight") == f"model.layers.2.{name}.weight"
        assert glm.knows(f"blk.2.nextn.{own}.weight")


def test_gates_without_their_ups_are_named(tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "m.gguf", "gpt-oss")
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_up_exps.weight", b"blk.3.ffn_up_exps.weight"))
    with Checkpoint.open(path) as checkpoint:
        params = architecture_for(checkpoint.config).params(spec_of(checkpoint.config))
        with pytest.raises(CheckpointError, match=r"tensor blk\.1\.ffn_gate_exps\.weight has shape \[7, 48, 64\]"):
            plan_weights(checkpoint, params, ())


def test_experts_in_mxfp4_are_those_of_the_gguf_package(tmp_path: Path) -> None:
    """As gpt-oss is published: attention in another type."""
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64}
    path = make_gguf(tmp_path / "m.gguf", "gpt-oss", stored="MXFP4", **sizes)
    wanted = random_tensors(KINDS["gpt-oss"] | sizes, dtype="float32", seed=0)
    with Checkpoint.open(path) as checkpoint:
        for name in ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"):
            outputs = wanted[f"model.layers.1.{name}"].swapaxes(1, 2)
            rounded = dequantize(quantize(outputs, MXFP4), MXFP4).swapaxes(1, 2)
            assert np.array_equal(checkpoint.read(f"model.layers.1.{name}"), rounded)
        assert checkpoint.rounded_shares.keys() == {"MXFP4"}


def test_experts_that_are_missing_are_named(tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "m.gguf", "olmoe", metadata={"olmoe.expert_count": 9})
    with Checkpoint.open(path) as checkpoint:
        params = architecture_for(checkpoint.config).params(spec_of(checkpoint.config))
        with pytest.raises(CheckpointError) as caught:
            plan_weights(checkpoint, params, ())
    assert "tensor blk.0.ffn_gate_exps.weight [48, 64] is missing" in str(caught.value)
    assert "tensor blk.1.ffn_gate_inp.weight has shape [7, 64]" in str(caught.value)


@pytest.mark.parametrize(
    ("metadata", "error", "problem"),
    [
        ({"general.architecture": "mamba"}, Unsupported, "architecture 'mamba'"),
        (
            {"general.architecture": 7},
            Unsupported,
            "supported: afmoe, arcee, bert, cohere2, command-r, deepseek2, dots1, ernie4_5, ernie4_5-moe, exaone-moe, ",
        ),
        ({"llama.expert_count": 8}, CheckpointError, "llama.expert_used_count must be an integer from 1"),
        ({"llama.expert_count": [8, 8]}, Unsupported, "llama.expert_count"),
        ({"llama.attention.causal": False}, Unsupported, "llama.attention.causal False"),
        ({"llama.block_count": None}, CheckpointError, "llama.block_count must be an integer from 1"),
        ({"llama.context_length": 0}, CheckpointError, "llama.context_length must be an integer from 1"),
        ({"llama.attention.head_count": [4, 2]}, CheckpointError, "llama.attention.head_count must be an integer"),
        ({"llama.embedding_length": "64"}, CheckpointError, "llama.embedding_length must be an integer"),
        ({"llama.rope.freq_base": float("nan")}, CheckpointError, "llama.rope.freq_base must be a positive number"),
        ({"llama.rope.scaling.type": "dynamic"}, CheckpointError, "llama.rope.scaling.type 'dynamic' is not supported"),
        ({"llama.rope.dimension_count": 8}, CheckpointError, "llama.rope.dimension_count must be the head size (16)"),
        ({"llama.attention.value_length": 8}, CheckpointError, "keys and values of different lengths"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_networks_that_are_refused(
    metadata: dict[str, Any], error: type[Exception], problem: str, tmp_path: Path
) -> None:
    message = problems_of(make_gguf(tmp_path / "m.gguf", metadata=metadata), error)
    assert problem in message
    assert "m.gguf" in message


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({"lfm2.attention.head_count_kv": [2, 0]}, "lfm2.attention.head_count_kv must be 3 whole numbers"),
        ({"lfm2.attention.head_count_kv": [2, 0, 1]}, "lfm2.attention.head_count_kv must be one number, or 0"),
        ({"lfm2.attention.head_count_kv": [0.0] * 3}, "lfm2.attention.head_count_kv must be 3 whole numbers"),
        ({"lfm2.shortconv.l_cache": None}, "lfm2.shortconv.l_cache must be an integer from 1"),
    ],
    ids=str,
)
def test_layers_that_are_refused(metadata: dict[str, Any], problem: str, tmp_path: Path) -> None:
    assert problem in problems_of(make_gguf(tmp_path / "m.gguf", "lfm2", metadata=metadata))


def test_all_problems_are_listed_at_once(tmp_path: Path) -> None:
    metadata = {"llama.block_count": None, "llama.context_length": None, "tokenizer.ggml.model": "plamo2"}
    message = problems_of(make_gguf(tmp_path / "m.gguf", metadata=metadata))
    for part in ("3 problems", "llama.block_count", "llama.context_length", "'plamo2'"):
        assert part in message


def test_a_window_of_some_layers_of_qwen_is_refused(tmp_path: Path) -> None:
    metadata = {"qwen2.attention.sliding_window": 16}
    message = problems_of(make_gguf(tmp_path / "m.gguf", "qwen2", metadata=metadata))
    assert "but the file does not name its layers" in message


def test_rope_factors_and_scaling_together_are_refused(tmp_path: Path) -> None:
    metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    assert "both rope_freqs.weight" in problems_of(make_gguf(tmp_path / "m.gguf", "llama3-rope", metadata=metadata))


def test_the_plan_speaks_of_the_names_in_the_file(tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "m.gguf", metadata={"llama.feed_forward_length": 100, "llama.block_count": 3})
    with Checkpoint.open(path) as found:
        architecture = architecture_for(found.config)
        params = architecture.params(architecture.from_hf(found.config))
        with pytest.raises(CheckpointError) as caught:
            plan_weights(found, params, architecture.ignored)
    for part in (
        "does not fit its metadata",
        "tensor blk.0.ffn_up.weight has shape [176, 64], metadata requires [100, 64]",
        "tensor blk.2.attn_q.weight [64, 64] is missing",
    ):
        assert part in str(caught.value)


def test_a_matrix_is_expanded_a_piece_at_a_time(tmp_path: Path) -> None:
    """Of an embedding of 32 MB in float16, whose float32 values would be 64 MB."""
    sizes: dict[str, Any] = {"vocab_size": 1 << 16, "hidden_size": 256, "intermediate_size": 32, "num_hidden_layers": 1}
    with Checkpoint.open(make_gguf(tmp_path / "m.gguf", "llama-tied", stored="Q8_0", **sizes)) as found:
        architecture = architecture_for(found.config)
        plan = plan_weights(found, architecture.params(architecture.from_hf(found.config)), architecture.ignored)
        tracemalloc.start()
        assert plan.load("embed", "float16").nbytes == 32 << 20
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < (32 + 40) << 20  # two pieces of 16 MB, and what their making takes


def test_numbers_that_are_not_finite_are_found(tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "m.gguf", stored="Q8_0", intermediate_size=192)
    place = gguf.GGUFReader(path).get_tensor(0)
    assert place.name == "token_embd.weight"
    content = bytearray(path.read_bytes())
    content[place.data_offset : place.data_offset + 2] = b"\x00\x7e"  # the scale of the first block
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tensor token_embd\.weight has NaN or infinite values"):
        reference_logits(path)([3, 4])


def test_a_folder_with_one_file(tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "m.gguf", tokenizer="pieces")
    with Checkpoint.open(tmp_path) as folder, Checkpoint.open(path) as file:
        assert folder.config == file.config
        assert folder.digest() == file.digest()
        assert folder.file_names == file.file_names == ("m.gguf",)
        assert folder.text_file("tokenizer.model") == file.text_file("tokenizer.model") is not None


def test_a_folder_with_several_files(tmp_path: Path) -> None:
    shutil.copy(make_gguf(tmp_path / "m.gguf"), tmp_path / "n.gguf")
    assert "several .gguf files (m.gguf, n.gguf)" in problems_of(tmp_path)


def test_a_folders_own_tokenizer_is_taken_first(tmp_path: Path) -> None:
    """Then the file's may be one that we cannot make. A file that is named alone has nothing beside it."""
    path = make_gguf(tmp_path / "m.gguf", metadata={"tokenizer.ggml.model": "plamo2"})
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text('{"model_type": "another"}')
    with Checkpoint.open(tmp_path) as found:
        assert found.text_file("tokenizer.json") == b"{}"
        assert found.config["model_type"] == "llama"
        assert b"LlamaForCausalLM" in (found.text_file("config.json") or b"")
    assert "'plamo2'" in problems_of(path)


def test_what_was_rounded_is_said(tmp_path: Path) -> None:
    with Checkpoint.open(make_gguf(tmp_path / "q.gguf", stored="Q8_0", intermediate_size=192)) as found:
        (note,) = found.notes
        assert "100% Q8_0" in note
    with Checkpoint.open(make_gguf(tmp_path / "f.gguf", stored="F16")) as found:
        assert found.notes == ()


def test_a_tensor_outlives_its_file(tmp_path: Path) -> None:
    with Checkpoint.open(make_gguf(tmp_path / "m.gguf")) as found:
        tensor = found.read("model.norm.weight")
    assert np.isfinite(tensor).all()
    assert not tensor.flags.writeable
