"""Architecture files: what they read from a config, what they refuse, which tensors they claim."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmserve.builder.quantization import MATRICES
from llmserve.checkpoint.gguf import architectures as gguf
from llmserve.errors import CheckpointError, Unsupported
from llmserve.models.graph import OpKind
from llmserve.models.registry import ARCHITECTURES, MODEL_TYPES, architecture_for, position_limit
from llmserve.models.spec import Combine, DecoderSpec, Pooling
from tests.checkpoints import KINDS, LONGROPE, tensor_shapes

MODELS_PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"


def spec_of(kind: str, **overrides: Any) -> DecoderSpec:
    config = KINDS[kind] | overrides
    spec: DecoderSpec = architecture_for(config).from_hf(config)
    return spec


def problems_of(kind: str, **overrides: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        spec_of(kind, **overrides)
    return str(caught.value)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_params_claim_the_published_tensors(kind: str) -> None:
    architecture = architecture_for(KINDS[kind])
    params = architecture.params(spec_of(kind))
    claimed = {name: shape for p in params for name, shape in zip(p.sources, p.source_shapes, strict=True)}
    assert claimed == tensor_shapes(KINDS[kind])


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_program_uses_every_parameter_with_its_shape(kind: str) -> None:
    architecture = architecture_for(KINDS[kind])
    spec = spec_of(kind)
    shapes = {param.name: param.shape for param in architecture.params(spec)}
    ops = architecture.program(spec).ops
    assert {name for op in ops for name in op.weights} == set(shapes)
    for op in ops:
        if op.kind in (OpKind.LINEAR, OpKind.LOGITS):
            assert shapes[op.weights[0]][0] == op.width


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_matrix_products_and_only_those_may_be_quantized(kind: str) -> None:
    architecture = architecture_for(KINDS[kind])
    spec = spec_of(kind)
    ops = architecture.program(spec).ops
    products = {name for op in ops for name in op.weights[: MATRICES.get(op.kind, 0)]}
    chooses = {
        name
        for name in products
        if name.endswith((".router", "mlp.gate", "attn.gates", ".altup.prediction", ".altup.correction"))
    }
    products -= chooses
    assert {param.name for param in architecture.params(spec) if param.quantizable} == products


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_decoder_can_pool(kind: str) -> None:
    """Its program is the same up to the head, without a selection of rows, and with the last norm."""
    architecture = architecture_for(KINDS[kind])
    spec = spec_of(kind)
    whole = architecture.program(spec)
    pooling = architecture.program(replace(spec, pooling=Pooling("last", normalize=True)))
    assert [op.kind for op in pooling.ops] == [
        *(op.kind for op in whole.ops[:-1] if op.kind is not OpKind.SELECT_ROWS), OpKind.POOL
    ]  # fmt: skip
    made = {op.output for op in pooling.ops}
    assert all(name in made for op in pooling.ops for name in op.inputs)
    assert (pooling.pools, pooling.needs_whole, pooling.output_width) == (True, False, spec.hidden_size)
    assert architecture.program(replace(spec, pooling=Pooling("mean"))).needs_whole
    assert not whole.pools


def test_tied_embeddings_are_two_parameters_with_one_source() -> None:
    params = {param.name: param for param in architecture_for(KINDS["llama-tied"]).params(spec_of("llama-tied"))}
    assert params["head"].sources == params["embed"].sources == ("model.embed_tokens.weight",)
    assert params["head"].duplicates == ("lm_head.weight",)


def test_the_program_prints() -> None:
    text = str(architecture_for(KINDS["qwen3"]).program(spec_of("qwen3")))
    assert "rms_norm(v3, @layers.0.attn.q_norm) eps=1e-06 groups=4" in text
    assert text.splitlines()[-1].endswith("[320] = logits(v36, @head)")


def test_mistral_and_qwen_windows() -> None:
    assert spec_of("mistral").windows == (16, 16)
    assert spec_of("mistral", sliding_window=None).windows == ()
    assert spec_of("qwen2").windows == ()
    assert spec_of("qwen2", use_sliding_window=True).windows == (0, 0, 16)
    assert spec_of("qwen2", use_sliding_window=True, sliding_window=None).windows == ()
    types = ["full_attention", "sliding_attention", "full_attention"]
    assert spec_of("qwen2", use_sliding_window=True, layer_types=types).windows == (0, 16, 0)
    assert spec_of("qwen2", layer_types=["full_attention"] * 3).windows == ()


def test_missing_keys_mean_what_they_mean_in_transformers() -> None:
    config = {key: value for key, value in KINDS["qwen3"].items() if key not in ("head_dim", "rope_theta")}
    config = {key: value for key, value in config.items() if key != "num_key_value_heads"}
    spec = architecture_for(config).from_hf(config)
    assert (spec.head_dim, spec.num_kv_heads) == (128, 4)
    assert spec.rope.inv_freq[1] == pytest.approx(10000.0 ** (-2 / 128))
    mistral = {key: value for key, value in KINDS["mistral"].items() if key != "sliding_window"}
    assert architecture_for(mistral).from_hf(mistral).windows == (4096, 4096)
    mixtral = {key: value for key, value in KINDS["mixtral"].items() if key != "rope_theta"}
    assert architecture_for(mixtral).from_hf(mixtral) == spec_of("mixtral", rope_theta=1e6)


@pytest.mark.parametrize(
    ("kind", "overrides", "message"),
    [
        ("llama", {"hidden_act": "relu"}, "hidden_act 'relu' is not supported; supported: 'silu', 'swish', 'gelu'"),
        ("llama", {"hidden_size": None}, "hidden_size must be an integer from 1 to 2147483647, it is missing"),
        ("llama", {"hidden_size": "64"}, "hidden_size must be an integer"),
        ("llama", {"hidden_size": 66}, "hidden_size (66) must be a multiple of num_attention_heads (4)"),
        ("llama", {"num_hidden_layers": True}, "num_hidden_layers must be an integer"),
        ("llama", {"num_hidden_layers": 10**6}, "num_hidden_layers must be an integer from 1 to 10000"),
        ("llama", {"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads (3)"),
        ("llama", {"rms_norm_eps": -1.0}, "rms_norm_eps must be a positive number, got -1.0"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number, got nan"),
        ("llama", {"attention_bias": "yes"}, "attention_bias must be true or false, got 'yes'"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "already quantized (quantization_config: gptq)"),
        ("llama", {"head_dim": 15}, "an even head size, got 15"),
        ("mistral", {"attention_bias": True}, "attention_bias True is not supported"),
        ("starcoder2", {"hidden_act": "silu"}, "hidden_act 'silu' is not supported; supported: 'gelu', 'gelu_new'"),
        ("cohere2", {"use_parallel_block": False}, "use_parallel_block False is not supported"),
        ("llama4-moe", {"layer_types": ["chunked_attention"]}, "layer_types must be a list of num_hidden_layers (3)"),
        ("lfm2", {"full_attn_idxs": 2}, "full_attn_idxs must be a list of layers, got 2"),
        ("lfm2", {"layer_types": ["conv", "mamba", "full_attention"]}, "layer types 'mamba' are not supported"),
        ("lfm2", {"conv_L_cache": 1}, "conv_L_cache must be an integer from 2 to"),
        ("lfm2", {"block_ffn_dim_multiplier": 1e308}, "from 1 to 2147483647, adjusted it is 4294967296"),
        ("bamba", {"mamba_n_heads": 5}, "mamba_n_heads (5) must be a multiple of mamba_n_groups (2)"),
        ("bamba", {"mamba_d_head": 7}, "mamba_n_heads (6) times mamba_d_head (7) must be the inner width, 120"),
        ("bamba", {"attn_layer_indices": 1}, "attn_layer_indices must be a list of layers, got 1"),
        ("bamba", {"attn_layer_indices": []}, "layer_types must have a layer of full_attention"),
        ("bamba", {"time_step_limit": [0.0, 1.0]}, "time_step_limit [0.0, 1.0] is not supported"),
        ("bamba", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: 'silu', 'swish'"),
        ("falcon-h1", {"mlp_multipliers": [1.0]}, "mlp_multipliers must be a list of 2 positive numbers, got [1.0]"),
        ("falcon-h1", {"ssm_multipliers": [1.0, 1.0, 0.0, 1.0, 1.0]}, "ssm_multipliers must be a list of 5 positive"),
        ("falcon-h1", {"mamba_d_ssm": 64, "mamba_d_head": 16}, "must be the inner width, 64"),
        ("nemotron-h", {"hybrid_override_pattern": "M*X"}, "layer types 'X' are not supported"),
        ("nemotron-h-moe", {"mlp_bias": True}, "mlp_bias True is not supported; supported: False"),
        ("nemotron-h-moe", {"n_group": 4}, "n_group (4) and topk_group (2) must make groups of two experts or more"),
        ("nemotron-h-moe", {"moe_latent_size": 0}, "moe_latent_size must be an integer from 1"),
        ("nemotron-h", {"hybrid_override_pattern": "M-M"}, "layers_block_type must have a layer of full_attention"),
        ("nemotron-h", {"hybrid_override_pattern": None}, "hybrid_override_pattern letters, of layers, got []"),
        ("nemotron-h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu' is not supported; supported: 'relu2'"),
        ("nemotron-h", {"tie_word_embeddings": True}, "tie_word_embeddings True is not supported; supported: False"),
        ("gemma3n", {"altup_active_idx": 3}, "altup_active_idx must be an integer from 0 to 2"),
        ("gemma3n", {"intermediate_size": [96]}, "or a list of one for each of 4 layers"),
        ("gemma3n", {"activation_sparsity_pattern": 1.0}, "activation_sparsity_pattern must be a number from 0"),
        ("gemma4", {"layer_types": ["sliding_attention", "conv"] * 2}, "layer type 'conv' is not supported"),
        ("gemma4", {"num_kv_shared_layers": 3}, "num_kv_shared_layers (3) must leave a layer of each type"),
        ("gemma4", {"vocab_size_per_layer_input": 7}, "vocab_size_per_layer_input must be vocab_size"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all' is not supported"),
        ("gemma4", {"per_layer_config": {"1": {"head_dim": 8}}}, "per_layer_config must say the same of each layer"),
        ("gemma4", {"rope_parameters": 3}, "rope_parameters must be an object with full_attention and"),
        ("gemma4-moe", {"num_global_key_value_heads": 3}, "3 key/value heads must divide num_attention_heads (4)"),
        ("gemma4-moe", {"top_k_experts": 8}, "top_k_experts (8) must be at most num_experts (7)"),
        ("granite4-h", {"layer_types": ["mamba", "attention", "conv"]}, "layer types 'conv' are not supported"),
        ("granite4-h", {"layer_types": ["mamba"] * 3}, "layer_types must have a layer of full_attention"),
        ("qwen3.5", {"linear_num_value_heads": 3}, "(3) must be a multiple of linear_num_key_heads (2)"),
        ("qwen3.5", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be an integer from 2 to"),
        ("qwen3.5", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: 'silu', 'swish'"),
        ("qwen3.5", {"layer_types": ["mamba", "conv", "full_attention"]}, "layer types 'conv', 'mamba' are not supp"),
        ("qwen3.5", {"layer_types": ["linear_attention"] * 3}, "layer_types must have a layer of full_attention"),
        ("qwen3-next-moe", {"layer_types": ["full_attention"]}, "layer_types must be a list of num_hidden_layers (3)"),
        ("llama4-moe", {"attention_chunk_size": None}, "attention_chunk_size must be an integer"),
        ("llama4-moe", {"moe_layers": ["1"]}, "moe_layers must be a list of integers, got ['1']"),
        ("phimoe", {"num_experts_per_tok": 4}, "num_experts_per_tok 4 is not supported; supported: 2"),
        ("phimoe", {"rope_scaling": {"type": "longrope"}}, "short_mscale must be a positive number, got None"),
        ("glm4-moe", {"n_group": 2, "topk_group": 1}, "n_group (2) and topk_group (1) must make groups of two experts"),
        ("deepseek-v2-moe", {"norm_topk_prob": True}, "norm_topk_prob True is not supported; supported: False"),
        ("deepseek-v2-moe", {"topk_method": "noaux_tc"}, "supported: 'greedy', 'group_limited_greedy'"),
        ("deepseek-v3-moe", {"num_key_value_heads": 1}, "num_key_value_heads must be num_attention_heads (5), got 1"),
        ("deepseek-v3-moe", {"attention_bias": True}, "attention_bias True is not supported; supported: False"),
        ("deepseek-v3-moe", {"topk_method": "greedy"}, "topk_method 'greedy' is not supported; supported: 'noaux_tc'"),
        ("deepseek-v3-moe", {"kv_lora_rank": 4}, "kv_lora_rank (4) must be at least qk_rope_head_dim (8)"),
        ("deepseek-v3-moe", {"qk_rope_head_dim": 7}, "an even head size, got 7"),
        ("deepseek-v3-moe", {"v_head_dim": 0}, "v_head_dim must be an integer from 1"),
        ("glm4-lite-moe", {"mlp_layer_types": ["dense"]}, "a list of 2 times 'dense' or 'sparse'"),
        ("glm4-lite-moe", {"first_k_dense_replace": 2}, "first_k_dense_replace 2 is not supported; supported: 1"),
        ("glm4-moe", {"n_group": 7, "topk_group": 3}, "n_group (7) and topk_group (3) must make groups"),
        ("mixtral", {"n_group": 5}, "n_group 5 is not supported"),
        ("gemma2", {"hidden_activation": "relu"}, "hidden_activation 'relu' is not supported"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention True is not supported"),
        ("gemma2", {"is_causal": False}, "is_causal False is not supported; supported: True"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a positive number"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping must be a positive number, got -1.0"),
        ("gemma2", {"layer_types": ["sliding_attention"]}, "layer_types must be a list of num_hidden_layers (2)"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not supported"),
        (
            "gemma3",
            {"rope_parameters": {"rope_type": "default"}},
            "an object with full_attention and sliding_attention",
        ),
        ("gemma3", {"rope_scaling": {"rope_type": "linear"}}, "full_attention: rope type 'linear' needs a positive"),
        ("phi3", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: 'silu'"),
        ("phi3", {"partial_rotary_factor": 0.1}, "partial_rotary_factor 0.1 turns no even part of a head of 16"),
        ("phi3", {"rope_scaling": "longrope"}, "rope_parameters or rope_scaling must be an object, got 'longrope'"),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear' is not supported"),
        ("phi4-mini", {"rope_scaling": LONGROPE | {"long_factor": [1.0]}}, "long_factor must be a list of 6 positive"),
        ("phi4-mini", {"rope_scaling": LONGROPE | {"short_mscale": 1.2}}, "rope parameter 'short_mscale' is unknown"),
        ("phi4-mini", {"rope_scaling": LONGROPE | {"factor": 0}}, "factor must be a positive number, got 0"),
        ("mistral", {"layer_types": ["full_attention"] * 2}, "layer_types is not supported for Mistral"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv 8.0 is not supported"),
        ("olmoe", {"num_experts_per_tok": 8}, "num_experts_per_tok (8) must be at most num_experts (7)"),
        ("mixtral", {"num_experts_per_tok": 6}, "num_experts_per_tok (6) must be at most num_local_experts (5)"),
        ("qwen3-moe", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported; supported: 'softmax'"),
        ("qwen3-moe", {"use_sliding_window": True}, "use_sliding_window True is not supported"),
        ("qwen2-moe", {"mlp_only_layers": 1}, "mlp_only_layers must be a list of integers, got 1"),
        ("qwen2-moe", {"moe_intermediate_size": None}, "moe_intermediate_size must be an integer"),
        ("qwen2-moe", {"decoder_sparse_step": 0}, "decoder_sparse_step must be an integer from 1"),
        ("mistral", {"sliding_window": 0}, "sliding_window must be an integer from 1"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types must be a list of num_hidden_layers (3) names"),
        ("qwen2", {"layer_types": ["linear_attention"] * 3}, "layer type 'linear_attention' is not supported"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "but use_sliding_window is off"),
        ("afmoe", {"score_func": "softmax"}, "score_func 'softmax' is not supported; supported: 'sigmoid'"),
        ("afmoe", {"attention_bias": True}, "attention_bias True is not supported; supported: False"),
        ("exaone-moe", {"mlp_layer_types": ["moe"]}, "mlp_layer_types must be a list of 3 times 'dense' or 'sparse'"),
        ("exaone-moe", {"num_experts": 2}, "num_experts_per_tok (3) must be at most num_experts (2)"),
        ("cohere", {"use_parallel_block": False}, "use_parallel_block False is not supported"),
        ("cohere2-moe", {"expert_selection_fn": "tanh"}, "expert_selection_fn 'tanh' is not supported"),
        (
            "cohere2-moe",
            {"shared_expert_combination_strategy": "max"},
            "shared_expert_combination_strategy 'max' is not supported; supported: 'average', 'sum'",
        ),
        ("mellum-moe", {"rope_parameters": {"rope_theta": 5e5}}, "an object with full_attention and sliding_attention"),
        ("granite-swa", {"layer_rope_theta": [1e4, 1e4, -1]}, "layer_rope_theta must be a list of 3 numbers from 0"),
        ("granite-swa", {"layer_rope_theta": [1e4]}, "layer_rope_theta must be a list of 3 numbers from 0, got [10000"),
        ("hyperclovax", {"residual_multiplier": 0.5}, "residual_multiplier 0.5 is not supported; supported: 1.0"),
        ("helium", {"head_dim": 20}, "num_attention_heads times head_dim must be hidden_size (64)"),
        ("phi", {"qk_layernorm": True}, "qk_layernorm True is not supported; supported: False"),
        ("olmo", {"clip_qkv": 8.0}, "clip_qkv 8.0 is not supported; supported: None"),
        ("baichuan2-7b", {"rope_theta": 5e5}, "rope_theta 500000.0 is not supported"),
        ("baichuan2-7b", {"tie_word_embeddings": True}, "tie_word_embeddings True is not supported"),
        ("baichuan2-7b", {"num_key_value_heads": 2}, "num_key_value_heads 2 is not supported"),
    ],
)
def test_values_that_we_do_not_know_are_refused(kind: str, overrides: dict[str, Any], message: str) -> None:
    assert message in problems_of(kind, **overrides)


def test_all_problems_come_in_one_error() -> None:
    message = problems_of("llama", hidden_act="relu", vocab_size=0, rope_scaling={"rope_type": "su", "factor": 2.0})
    assert "(3 problems)" in message
    assert all(text in message for text in ("hidden_act", "vocab_size", "rope type 'su'"))


def test_registry() -> None:
    assert architecture_for({"model_type": "llama"}) is MODEL_TYPES["llama"]
    assert architecture_for({"architectures": ["LlamaForCausalLM"], "model_type": "mistral"}) is MODEL_TYPES["mistral"]
    assert architecture_for({"architectures": ["BaiChuanForCausalLM"]}) is ARCHITECTURES["BaichuanForCausalLM"]
    with pytest.raises(Unsupported, match=r"'GPT2LMHeadModel' is not supported; supported: .*LlamaForCausalLM"):
        architecture_for({"architectures": ["GPT2LMHeadModel"], "model_type": "llama"})
    wrong: list[dict[str, Any]] = [{}, {"architectures": []}, {"architectures": 3}, {"model_type": ["llama"]}]
    for config in wrong:
        with pytest.raises(Unsupported):
            architecture_for(config)


def test_the_page_of_models_has_a_row_for_each_family() -> None:
    rows = re.findall(r"^\| [^|]+ \| `([\w-]+)` \| (?:`([\w-]+)`)? ?\|", MODELS_PAGE.read_text(), re.MULTILINE)
    assert {model_type for model_type, _ in rows} == set(MODEL_TYPES)
    others = ("internlm2", "qwen3next")  # read as networks of other names
    in_gguf = {(each.model_type, each.name) for each in (*gguf.ALL, gguf.MIXTRAL) if each.name not in others} | {
        ("qwen3_next", "qwen3next"),
        ("mistral", "llama"),
        ("roberta", "bert"),
        ("xlm-roberta", "bert"),
        ("internlm2", "internlm2"),
        *((model_type, "deepseek2") for model_type in ("deepseek_v3", "glm4_moe_lite", "kimi_k2")),
        ("olmo3", "olmo2"),
    }
    assert {row for row in rows if row[1]} == in_gguf


def test_norm_head_is_normalized_at_load() -> None:
    head = architecture_for(KINDS["baichuan2-7b"]).params(spec_of("baichuan2-7b"))[-1]
    assert (head.name, head.combine) == ("head", Combine.NORMALIZE_ROWS)
    assert architecture_for(KINDS["baichuan1-7b"]).params(spec_of("baichuan1-7b"))[-1].combine is Combine.COPY


SIZES = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 4}
SIZES |= {"intermediate_size": 6400, "vocab_size": 32064, "max_position_embeddings": 131072}
FACTORS = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64, "short_mscale": 1.243, "long_mscale": 1.243}

DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "attention_bias": False, "ep_size": 1,
    "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168, "kv_lora_rank": 512, "moe_layer_freq": 1,
    "moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06, "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128,
}  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        {  # of Phi-3.5-MoE
            "architectures": ["PhiMoEForCausalLM"], "model_type": "phimoe", "attention_bias": True,
            "hidden_act": "silu", "input_jitter_noise": 0.01, "lm_head_bias": True,
            "num_experts_per_tok": 2, "num_local_experts": 16,
            "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-05, "router_jitter_noise": 0.01,
            "rope_scaling": FACTORS | {"original_max_position_embeddings": 4096, "type": "longrope"},
            "rope_theta": 10000.0, "sliding_window": 131072, "tie_word_embeddings": False,
        },
        {  # of Command R7B
            "architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2", "attention_bias": False, "head_dim": 128,
            "cache_implementation": "hybrid", "hidden_act": "silu", "layer_norm_eps": 1e-05, "layer_switch": 4,
            "logit_scale": 0.25, "order_of_interleaved_layers": "local_attn_first", "rope_scaling": None,
            "position_embedding_type": "rope_gptj", "rope_theta": 50000, "rotary_pct": 1.0, "sliding_window": 4096,
            "sliding_window_pattern": 4, "use_embedding_sharing": True, "use_gated_activation": True,
            "use_parallel_block": True, "use_parallel_embedding": True,
        },
        {  # of StarCoder2 3B
            "architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2", "activation_function": "gelu",
            "hidden_act": "gelu_pytorch_tanh", "layer_norm_epsilon": 1e-05, "mlp_type": "default",
            "norm_epsilon": 1e-05, "norm_type": "layer_norm", "rope_theta": 999999.4420358813, "sliding_window": 4096,
            "use_bias": True,
        },
        {  # of DeepSeek-V2-Lite
            "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "attention_bias": False,
            "aux_loss_alpha": 0.001, "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048,
            "kv_lora_rank": 512, "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "seq_aux": True,
            "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16,
            "num_experts_per_tok": 6, "num_key_value_heads": 16, "q_lora_rank": None, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000, "routed_scaling_factor": 1.0,
            "rope_scaling": DEEPSEEK_V3["rope_scaling"] | {"mscale": 0.707, "mscale_all_dim": 0.707},
            "scoring_func": "softmax", "topk_group": 1, "topk_method": "greedy", "v_head_dim": 128,
        },
        DEEPSEEK_V3,
        DEEPSEEK_V3 | {  # of Kimi K2
            "model_type": "kimi_k2", "first_k_dense_replace": 1, "n_group": 1, "n_routed_experts": 384, "topk_group": 1,
            "num_attention_heads": 64, "num_key_value_heads": 64, "num_nextn_predict_layers": 0,
            "rope_scaling": DEEPSEEK_V3["rope_scaling"] | {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
            "rope_theta": 50000.0, "routed_scaling_factor": 2.827,
        },
        {  # of GLM-4.7-Flash
            "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "attention_bias": False,
            "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048, "kv_lora_rank": 512, "n_group": 1,
            "moe_intermediate_size": 1536, "n_routed_experts": 64, "n_shared_experts": 1, "norm_topk_prob": True,
            "num_attention_heads": 20, "num_experts_per_tok": 4, "num_key_value_heads": 20, "q_lora_rank": 768,
            "num_nextn_predict_layers": 1, "partial_rotary_factor": 1.0, "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000,
            "routed_scaling_factor": 1.8, "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 256,
        },
        {  # of Llama 4 Scout's language model
            "architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text", "attention_chunk_size": 8192,
            "attn_temperature_tuning": 4, "for_llm_compressor": False, "head_dim": 128, "hidden_act": "silu",
            "interleave_moe_layer_step": 1, "intermediate_size_mlp": 16384, "no_rope_layers": [],
            "num_experts_per_tok": 1, "num_local_experts": 16, "output_router_logits": False, "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3",
            },
            "rope_theta": 500000.0, "router_aux_loss_coef": 0.001, "use_qk_norm": True,
        },
        {  # of Command R+
            "architectures": ["CohereForCausalLM"], "model_type": "cohere", "attention_bias": False,
            "hidden_act": "silu", "layer_norm_eps": 1e-05, "logit_scale": 0.8333333333333334,
            "max_position_embeddings": 8192, "model_max_length": 131072, "pretraining_tp": 1,
            "rope_theta": 75000000.0, "use_qk_norm": True,
        },
        {  # of HyperCLOVA X SEED Think 14B
            "architectures": ["HyperCLOVAXForCausalLM"], "model_type": "hyperclovax", "attention_bias": False,
            "attention_multiplier": 0.0078125, "embedding_multiplier": 10.0, "embd_pdrop": 0.0, "head_dim": 128,
            "hidden_act": "silu", "logits_scaling": 0.125, "mlp_bias": False, "residual_multiplier": 1.0,
            "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 100000000, "resid_pdrop": 0.0,
            "use_post_norm": True,
        },
        {  # of Phi-2
            "architectures": ["PhiForCausalLM"], "model_type": "phi", "attention_dropout": 0.0, "embd_pdrop": 0.0,
            "hidden_size": 2560, "num_key_value_heads": 32,
            "hidden_act": "gelu_new", "layer_norm_eps": 1e-05, "partial_rotary_factor": 0.4, "qk_layernorm": False,
            "resid_pdrop": 0.1, "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False,
        },
        {  # of OLMo 7B
            "architectures": ["OlmoForCausalLM"], "model_type": "olmo", "attention_bias": False, "clip_qkv": None,
            "hidden_act": "silu", "pretraining_tp": 1, "rope_scaling": None, "rope_theta": 10000.0,
            "tie_word_embeddings": False,
        },
        {  # of Pythia 2.8B
            "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "hidden_act": "gelu",
            "hidden_size": 2560, "layer_norm_eps": 1e-05, "num_key_value_heads": 32, "rotary_emb_base": 10000,
            "rotary_pct": 0.25, "tie_word_embeddings": False, "use_parallel_residual": True,
        },
        {  # of K-EXAONE
            "architectures": ["ExaoneMoEForCausalLM"], "model_type": "exaone_moe", "first_k_dense_replace": 1,
            "head_dim": 128, "hidden_act": "silu", "is_moe_layer": [False, True, True, True],
            "layer_types": [*["sliding_attention"] * 3, "full_attention"],
            "mlp_layer_types": ["dense", *["sparse"] * 3],
            "moe_intermediate_size": 2048, "n_group": 1, "norm_topk_prob": True, "num_experts": 128,
            "num_experts_per_tok": 8, "num_nextn_predict_layers": 1, "num_shared_experts": 1, "rms_norm_eps": 1e-05,
            "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid", "sliding_window": 128, "sliding_window_pattern": "LLLG",
            "tf_legacy_loss": False, "topk_group": 1, "topk_method": "noaux_tc",
        },
        {  # of AFM-4.5B
            "architectures": ["ArceeForCausalLM"], "model_type": "arcee", "attention_bias": False, "head_dim": 128,
            "hidden_act": "relu2", "mlp_bias": False, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
            "rope_scaling": {
                "beta_fast": 32.0, "beta_slow": 1.0, "factor": 20.0, "mscale": 1.0,
                "original_max_position_embeddings": 4096, "rope_type": "yarn", "type": "yarn",
            },
        },
        {  # of Trinity Mini
            "architectures": ["AfmoeForCausalLM"], "model_type": "afmoe", "attention_dropout": 0.0,
            "global_attn_every_n_layers": 4, "head_dim": 128, "hidden_act": "silu", "load_balance_coeff": 0.001,
            "moe_intermediate_size": 1024, "mup_enabled": True, "n_group": 1, "num_dense_layers": 2,
            "num_expert_groups": 1, "num_experts": 128, "num_experts_per_tok": 8, "num_limited_groups": 1,
            "num_shared_experts": 1, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000,
            "route_norm": True, "route_scale": 2.826, "score_func": "sigmoid", "sliding_window": 2048,
            "topk_group": 1, "use_grouped_mm": True,
        },
    ],
    ids=lambda config: config["model_type"],
)  # fmt: skip
def test_configs_as_published_are_read(config: dict[str, Any]) -> None:
    architecture = architecture_for(config)
    spec = architecture.from_hf(SIZES | config)
    assert architecture.params(spec)
    assert len(architecture.program(spec).ops) > 4 * 8


def test_command_r_reads_more_than_its_positions_say() -> None:
    """As the config of 2024 says it; that of August of the same year has the limit in both keys."""
    config = KINDS["cohere"] | {"max_position_embeddings": 64, "model_max_length": 512}
    assert spec_of("cohere", **config).max_position_embeddings == position_limit(config) == 512


def test_gemma_3_leaves_out_most_of_its_sizes() -> None:
    """As the config of 4B does."""
    text = {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    spec: DecoderSpec = architecture_for(config).from_hf(config)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.vocab_size) == (8, 4, 256, 262_208)
    assert spec.windows[:6] == (1024,) * 5 + (0,)
    assert spec.tied_embeddings


@pytest.mark.parametrize("architectures", [["DeciLMForCausalLM"], ["LlamaForCausalLM"], None])
def test_a_network_that_no_file_reads_is_refused_by_name(architectures: list[str] | None) -> None:
    config = KINDS["llama"] | {"architectures": architectures, "model_type": "nemotron-nas"}
    with pytest.raises(Unsupported, match=r"(DeciLMForCausalLM|nemotron-nas)' is not supported; supported: "):
        architecture_for(config)
