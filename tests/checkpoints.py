"""Tiny random checkpoints of every architecture, in the published layout and in every file format.

`make_checkpoint` writes what a Hugging Face folder has: config.json (published style), generation_config.json, weights
and a small tokenizer. The weights are random but sized so that activations stay near 1 and greedy output varies. The
tensor names and shapes are written out here or asked of transformers, independently of `llmserve.models`, so that they
test it.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from tests.tiny_tokenizers import sentencepiece_model, write_byte_level_tokenizer

DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
AROUND_ONE = ("gemma", "nemotron", "qwen3_next", "qwen3_5", "vaultgemma")  # norms multiply with one more than is stored
WRITTEN_OUT = ("baichuan", "llama", "mistral", "qwen2", "qwen3")  # by model type: tensor names are written out below
FORMATS = ("safetensors", "sharded", "bin", "bin-sharded")

COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "use_cache": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
BAICHUAN: dict[str, Any] = COMMON | {
    "architectures": ["BaichuanForCausalLM"],
    "model_type": "baichuan",
    "vocab_size": 512,
    "model_max_length": 256,
    "tie_word_embeddings": False,
}
LLAMA: dict[str, Any] = COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,  # small, so that every branch of the rule is met with a head size of 16
}
QWEN: dict[str, Any] = COMMON | {
    "vocab_size": 320,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
    "sliding_window": 16,
    "max_window_layers": 2,
    "tie_word_embeddings": False,
}
GEMMA: dict[str, Any] = COMMON | {
    "hidden_size": 72,  # whose root is no number of bfloat16
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "vocab_size": 320,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "query_pre_attn_scalar": 20,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "sliding_window": 16,
    "attention_bias": False,
    "tie_word_embeddings": True,
}
PHI: dict[str, Any] = COMMON | {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "vocab_size": 320,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "original_max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "sliding_window": 40,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 2.0], "long_factor": [1, 2, 4, 6.5, 9, 16]}
EXPERTS: dict[str, Any] = {
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
# The Baichuan kinds carry the explicit keys: they are too small to be told apart as the published models are.
KINDS: dict[str, dict[str, Any]] = {
    "baichuan2-7b": BAICHUAN | {"max_position_embeddings": 256, "position_embedding": "rope", "norm_head": True},
    # six heads: the ALiBi rule for head counts that are no power of two
    "baichuan2-13b": BAICHUAN
    | {"hidden_size": 96, "num_attention_heads": 6, "position_embedding": "alibi", "norm_head": True},
    "baichuan1-7b": BAICHUAN | {"max_position_embeddings": 256, "position_embedding": "rope", "norm_head": False},
    "llama": LLAMA,
    "llama3-rope": LLAMA | {"rope_theta": 500000.0, "rope_scaling": LLAMA3_SCALING},
    "llama-tied": LLAMA | {"tie_word_embeddings": True},
    "mistral": COMMON
    | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "vocab_size": 320,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "sliding_window": 16,
        "tie_word_embeddings": False,
    },
    # soft caps so low that they bend scores and logits of this size
    "gemma2": GEMMA
    | {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 4.0,
    },
    "gemma3": GEMMA
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 3,
        "sliding_window_pattern": 2,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "phi3": PHI,
    "phi4-mini": PHI
    | {
        "original_max_position_embeddings": 128,
        "partial_rotary_factor": 0.75,
        "rope_scaling": LONGROPE,
        "sliding_window": None,
        "tie_word_embeddings": True,
    },
    "qwen2": QWEN | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_hidden_layers": 3},
    "qwen3": QWEN
    | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32, "attention_bias": False},
}


KINDS |= {
    # with one plain layer
    "qwen3-moe": QWEN
    | EXPERTS
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": 3,
        "head_dim": 32,
        "num_experts": 7,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
    "qwen2-moe": QWEN
    | EXPERTS
    | {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "num_experts": 7,
        "shared_expert_intermediate_size": 80,
        "norm_topk_prob": False,
    },
    "olmoe": QWEN
    | EXPERTS
    | {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "intermediate_size": 48,
        "num_experts": 7,
        "clip_qkv": None,
        "norm_topk_prob": False,
    },
    "mixtral": QWEN
    | EXPERTS
    | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": 112,
        "num_local_experts": 5,
        "sliding_window": None,
    },
}
# Families that change little of Llama. Heads are six for two of keys, and of a size that is no part of the width.
DENSE: dict[str, Any] = QWEN | {"num_attention_heads": 6, "head_dim": 16, "num_hidden_layers": 3}
KINDS |= {
    "smollm3": QWEN | {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "num_hidden_layers": 4},
    "olmo2": QWEN | {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "num_attention_heads": 8},
    "olmo3": QWEN
    | {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "num_hidden_layers": 4,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "attention_factor": 1.2,
            "original_max_position_embeddings": 64,
        },
    },
    "granite": QWEN
    | {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.08,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
        "rms_norm_eps": 1e-3,  # so that it is seen
    },
    "granite-moe": QWEN
    | {
        "architectures": ["GraniteMoeForCausalLM"],
        "model_type": "granitemoe",
        "intermediate_size": 48,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.08,
        "residual_multiplier": 0.22,
        "logits_scaling": 6.0,
    },
    "seed-oss": DENSE | {"architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss", "attention_bias": True},
    "exaone4": DENSE | {"architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4", "sliding_window_pattern": 3},
    "hunyuan": DENSE
    | {
        "architectures": ["HunYuanDenseV1ForCausalLM"],
        "model_type": "hunyuan_v1_dense",
        "rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0, "beta_fast": 32, "mscale": 1.0},
        "tie_word_embeddings": True,
    },
    "hunyuan-moe": DENSE
    | {
        "architectures": ["HunYuanMoEV1ForCausalLM"],
        "model_type": "hunyuan_v1_moe",
        "intermediate_size": 48,
        "num_experts": 7,
        "moe_topk": 3,
        "rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0},
    },
    "glm": DENSE | {"architectures": ["GlmForCausalLM"], "model_type": "glm", "attention_bias": True},
    "glm4": DENSE | {"architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "attention_bias": True},
    "ernie4.5": DENSE
    | {"architectures": ["Ernie4_5ForCausalLM"], "model_type": "ernie4_5", "tie_word_embeddings": True},
}
CHOOSERS: dict[str, Any] = DENSE | {
    "num_hidden_layers": 2,
    "intermediate_size": 80,
    "moe_intermediate_size": 48,
    "num_experts_per_tok": 3,
}
KINDS |= {
    "glm4-moe": CHOOSERS
    | {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "n_routed_experts": 7,
        "n_shared_experts": 2,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "use_qk_norm": True,
        "num_nextn_predict_layers": 0,
    },
    "minimax-m2": CHOOSERS
    | {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "model_type": "minimax_m2",
        "num_local_experts": 7,
        "rotary_dim": 8,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "scoring_func": "sigmoid",
        "intermediate_size": 48,
    },
    "ernie4.5-moe": CHOOSERS
    | {
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "model_type": "ernie4_5_moe",
        "num_attention_heads": 4,
        "moe_num_experts": 7,
        "moe_k": 3,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "tie_word_embeddings": True,
    },
}
KINDS["gpt-oss"] = CHOOSERS | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "intermediate_size": 48,
    "num_local_experts": 7,
    "attention_bias": True,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False},
}
GRANITE: dict[str, Any] = KINDS["granite-moe"] | {"shared_intermediate_size": 80}
KINDS |= {
    "gemma": GEMMA | {"architectures": ["GemmaForCausalLM"], "model_type": "gemma"},
    # transformers wants the width to be a multiple of the heads here
    "internlm3": DENSE
    | {"architectures": ["InternLM3ForCausalLM"], "model_type": "internlm3", "num_attention_heads": 8},
    "cwm": DENSE
    | {
        "architectures": ["CwmForCausalLM"],
        "model_type": "cwm",
        "num_attention_heads": 8,
        "rope_scaling": LLAMA3_SCALING,
    },
    "granite-shared-moe": GRANITE
    | {"architectures": ["GraniteMoeSharedForCausalLM"], "model_type": "granitemoeshared"},
    "granite4-moe": GRANITE
    | {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "layer_types": ["attention"] * 2,
        "position_embedding_type": "rope",
        "mamba_n_heads": 8,
    },
    "dots1-moe": CHOOSERS
    | {
        "architectures": ["Dots1ForCausalLM"],
        "model_type": "dots1",
        "n_routed_experts": 7,
        "n_shared_experts": 2,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "max_window_layers": 1,
    },
    "solar-open-moe": CHOOSERS
    | {
        "architectures": ["SolarOpenForCausalLM"],
        "model_type": "solar_open",
        "n_routed_experts": 7,
        "n_shared_experts": 1,
    },
}
# attention over a latent: heads whose keys, values and latent are of different sizes
LATENT: dict[str, Any] = {
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "head_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 40,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 20,
    "v_head_dim": 12,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}
YARN_OF_LATENT: dict[str, Any] = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0}
KINDS |= {
    # transformers wants the width to be a multiple of the heads here
    "deepseek-v2-moe": CHOOSERS
    | LATENT
    | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "n_routed_experts": 12,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
    },
    "deepseek-v3-moe": CHOOSERS
    | LATENT
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "n_routed_experts": 12,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "rope_scaling": YARN_OF_LATENT | {"mscale_all_dim": 0.8, "beta_fast": 32, "beta_slow": 1},
    },
    "glm4-lite-moe": CHOOSERS
    | LATENT
    | {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",
        "n_routed_experts": 7,
        "qk_nope_head_dim": 12,
        "v_head_dim": 20,
    },
}
KINDS |= {
    # windows in two of three layers, which are those that turn
    "cohere2": QWEN
    | {
        "architectures": ["Cohere2ForCausalLM"],
        "model_type": "cohere2",
        "num_hidden_layers": 3,
        "sliding_window_pattern": 3,
        "logit_scale": 0.25,
        "layer_norm_eps": 1e-3,  # so that it is seen
        "tie_word_embeddings": True,
    },
    "starcoder2": QWEN
    | {
        "architectures": ["Starcoder2ForCausalLM"],
        "model_type": "starcoder2",
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": 1e-3,
        "use_bias": True,
    },
    "stablelm": QWEN
    | {
        "architectures": ["StableLmForCausalLM"],
        "model_type": "stablelm",
        "layer_norm_eps": 1e-3,
        "partial_rotary_factor": 0.5,
        "qk_layernorm": True,
    },
    "nemotron": DENSE
    | {
        "architectures": ["NemotronForCausalLM"],
        "model_type": "nemotron",
        "hidden_act": "relu2",
        "norm_eps": 1e-3,
        "mlp_bias": False,
    },
}
# queries grow every 24 tokens
KINDS["ministral"] = KINDS["mistral"] | {
    "architectures": ["MinistralForCausalLM"],
    "model_type": "ministral",
    "head_dim": 24,
    "num_hidden_layers": 3,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
}
KINDS["ministral3"] = DENSE | {
    "architectures": ["Ministral3ForCausalLM"],
    "model_type": "ministral3",
    "sliding_window": None,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 24,
        "max_position_embeddings": 256,
        "llama_4_scaling_beta": 0.5,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
}
# stretches of 24 tokens, and queries that grow every 20
KINDS["llama4-moe"] = CHOOSERS | {
    "architectures": ["Llama4ForCausalLM"],
    "model_type": "llama4_text",
    "num_hidden_layers": 3,
    "intermediate_size": 48,
    "intermediate_size_mlp": 80,
    "num_local_experts": 7,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "no_rope_layer_interval": 3,
    "attention_chunk_size": 24,
    "floor_scale": 20,
    "attn_scale": 0.4,
    "rms_norm_eps": 1e-3,
}
KINDS["phimoe"] = QWEN | {
    "architectures": ["PhimoeForCausalLM"],
    "model_type": "phimoe",
    "intermediate_size": 48,
    "num_local_experts": 7,
    "num_experts_per_tok": 2,
    "router_jitter_noise": 0.01,
    "sliding_window": None,
    "lm_head_bias": True,
    "attention_bias": True,
    "rms_norm_eps": 1e-3,
}
# heads of sizes that are no multiple of anything, and three that one key head serves
DELTA_NET: dict[str, Any] = QWEN | {
    "num_hidden_layers": 3,
    "head_dim": 24,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "full_attention_interval": 2,
    "attention_bias": False,
}
SHARED_EXPERT = {"num_experts": 7, "shared_expert_intermediate_size": 80}
MROPE = {"mrope_section": [1, 1, 1], "mrope_interleaved": True, "rope_type": "default", "rope_theta": 1000000.0}
KINDS |= {
    "qwen3-next-moe": DELTA_NET
    | EXPERTS
    | SHARED_EXPERT
    | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
    "qwen3.5": DELTA_NET
    | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "rope_parameters": MROPE | {"partial_rotary_factor": 0.25},
        "tie_word_embeddings": True,
    },
    "qwen3.5-moe": DELTA_NET
    | EXPERTS
    | SHARED_EXPERT
    | {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "num_hidden_layers": 2,
        "rope_parameters": MROPE | {"partial_rotary_factor": 0.25},
    },
}
LFM2: dict[str, Any] = QWEN | {
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "conv_L_cache": 3,
    "conv_bias": False,
    "norm_eps": 1e-3,  # so that it is seen
}
KINDS |= {
    "lfm2": LFM2
    | {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "block_ff_dim": 176,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
        "tie_word_embeddings": True,
    },
    "lfm2-moe": LFM2
    | {
        "architectures": ["Lfm2MoeForCausalLM"],
        "model_type": "lfm2_moe",
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "num_dense_layers": 1,
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.5,
    },
}
# heads of Mamba in groups of three, whose sizes are no multiple of anything
MAMBA: dict[str, Any] = QWEN | {
    "num_hidden_layers": 3,
    "mamba_n_heads": 6,
    "mamba_d_head": "auto",
    "mamba_n_groups": 2,
    "mamba_d_state": 19,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "rms_norm_eps": 1e-3,  # so that it is seen
}
KINDS |= {
    "bamba": MAMBA
    | {
        "architectures": ["BambaForCausalLM"],
        "model_type": "bamba",
        "hidden_size": 60,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "attn_layer_indices": [1],
        "attn_rotary_emb": 10,
    },
    "granite4-h-moe": MAMBA
    | GRANITE
    | {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "position_embedding_type": "nope",
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "rms_norm_eps": 1e-3,
    },
}
KINDS |= {
    # every multiplier is another number
    "falcon-h1": MAMBA
    | {
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "num_hidden_layers": 2,
        "mamba_d_ssm": 90,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "projectors_bias": False,
        "attention_bias": False,
        "mlp_bias": False,
        "embedding_multiplier": 1.7,
        "lm_head_multiplier": 0.6,
        "key_multiplier": 0.8,
        "attention_in_multiplier": 1.3,
        "attention_out_multiplier": 0.7,
        "ssm_in_multiplier": 1.2,
        "ssm_out_multiplier": 0.9,
        "mlp_multipliers": [1.1, 0.75],
        "ssm_multipliers": [0.85, 1.15, 0.95, 1.05, 1.25],
    },
    "nemotron-h": {key: value for key, value in QWEN.items() if key != "rope_theta"}
    | {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M-*M-",
        "num_hidden_layers": 5,
        "head_dim": 20,
        "mamba_num_heads": 6,
        "mamba_head_dim": 13,
        "n_groups": 3,
        "ssm_state_size": 11,
        "conv_kernel": 4,
        "chunk_size": 16,
        "use_bias": False,
        "use_conv_bias": True,
        "mlp_hidden_act": "relu2",
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-3,  # so that it is seen
    },
}
KINDS["nemotron-h-moe"] = KINDS["nemotron-h"] | {
    "hybrid_override_pattern": "ME*-E",
    "num_hidden_layers": 5,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 80,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
# the last two layers read keys and values of the others, and heads have two sizes
GEMMA4: dict[str, Any] = {key: value for key, value in GEMMA.items() if key not in ("rope_theta", "hidden_act")} | {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "head_dim": 20,
    "global_head_dim": 36,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 320,
    "attention_k_eq_v": False,
    "final_logit_softcapping": 3.0,
    "rms_norm_eps": 1e-3,  # so that it is seen
}
GEMMA3N: dict[str, Any] = GEMMA4 | {
    "architectures": ["Gemma3nForCausalLM"],
    "model_type": "gemma3n_text",
    "head_dim": 16,
    "rope_theta": 300000.0,
    "rope_local_base_freq": 10000.0,
    "vocab_size_per_layer_input": 300,
    "altup_num_inputs": 3,
    "altup_active_idx": 1,
    "laurel_rank": 5,
    "activation_sparsity_pattern": [0.8, 0.0, 0.0, 0.6],
    "intermediate_size": [96, 96, 80, 96],
}
for unknown in ("global_head_dim", "use_double_wide_mlp", "attention_k_eq_v"):
    del GEMMA3N[unknown]
KINDS |= {
    "gemma3n": GEMMA3N,
    "gemma4": GEMMA4,
    # keys of full attention are its values, too, and of fewer heads
    "gemma4-moe": GEMMA4
    | {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 7,
        "top_k_experts": 3,
        "moe_intermediate_size": 48,
        "final_logit_softcapping": None,
    },
}
KINDS |= {
    "arcee": DENSE
    | {
        "architectures": ["ArceeForCausalLM"],
        "model_type": "arcee",
        "num_attention_heads": 8,
        "hidden_act": "relu2",
    },
    "afmoe": CHOOSERS
    | {
        "architectures": ["AfmoeForCausalLM"],
        "model_type": "afmoe",
        "num_hidden_layers": 3,
        "num_experts": 7,
        "num_shared_experts": 2,
        "num_dense_layers": 1,
        "route_scale": 2.5,
        "global_attn_every_n_layers": 3,
        "mup_enabled": True,
    },
    "exaone-moe": CHOOSERS
    | {
        "architectures": ["ExaoneMoeForCausalLM"],
        "model_type": "exaone_moe",
        "num_hidden_layers": 3,
        "num_experts": 7,
        "num_shared_experts": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "sliding_window_pattern": 3,
    },
    "cohere": QWEN
    | {
        "architectures": ["CohereForCausalLM"],
        "model_type": "cohere",
        "logit_scale": 0.25,
        "layer_norm_eps": 1e-3,  # so that it is seen
        "tie_word_embeddings": True,
        "use_qk_norm": True,
    },
    "cohere2-moe": CHOOSERS
    | {
        "architectures": ["Cohere2MoeForCausalLM"],
        "model_type": "cohere2_moe",
        "num_hidden_layers": 3,
        "intermediate_size": 48,
        "prefix_dense_intermediate_size": 80,
        "num_experts": 7,
        "num_shared_experts": 2,
        "first_k_dense_replace": 1,
        "sliding_window_pattern": 2,
        "logit_scale": 0.25,
        "layer_norm_eps": 1e-3,  # so that it is seen
        "tie_word_embeddings": True,
    },
    "mellum-moe": {key: value for key, value in CHOOSERS.items() if key != "rope_theta"}
    | {
        "architectures": ["MellumForCausalLM"],
        "model_type": "mellum",
        "num_hidden_layers": 3,
        "num_experts": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "norm_topk_prob": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
}
# the layers with a window turn by a theta of their own
GRANITE_SWA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "layer_rope_theta": [500000.0, 1000.0, 0],
}
KINDS |= {
    "granite-swa": KINDS["granite"]
    | GRANITE_SWA
    | {"architectures": ["GraniteSWAForCausalLM"], "model_type": "granite_swa"},
    "granite-swa-moe": GRANITE
    | GRANITE_SWA
    | {"architectures": ["GraniteMoeSWAForCausalLM"], "model_type": "granitemoe_swa"},
    "hyperclovax": KINDS["granite"]
    | {
        "architectures": ["HyperCLOVAXForCausalLM"],
        "model_type": "hyperclovax",
        "head_dim": 24,
        "logits_scaling": 0.125,
        "residual_multiplier": 1.0,
    },
    "helium": QWEN
    | {
        "architectures": ["HeliumForCausalLM"],
        "model_type": "helium",
        "head_dim": 16,
        "attention_bias": True,
    },
}
KINDS |= {
    "flex-olmo-moe": QWEN
    | {
        "architectures": ["FlexOlmoForCausalLM"],
        "model_type": "flex_olmo",
        "num_attention_heads": 8,
        "intermediate_size": 48,
        "num_experts": 7,
        "num_experts_per_tok": 3,
    },
    "vaultgemma": KINDS["gemma2"] | {"architectures": ["VaultGemmaForCausalLM"], "model_type": "vaultgemma"},
    "jais2": {key: value for key, value in QWEN.items() if key != "rms_norm_eps"}
    | {
        "architectures": ["Jais2ForCausalLM"],
        "model_type": "jais2",
        "hidden_act": "relu2",
        "layer_norm_eps": 1e-3,  # so that it is seen
        "attention_bias": True,
        "mlp_bias": True,
    },
    "phi": QWEN
    | {
        "architectures": ["PhiForCausalLM"],
        "model_type": "phi",
        "hidden_act": "gelu_new",
        "layer_norm_eps": 1e-3,  # so that it is seen
        "partial_rotary_factor": 0.25,
    },
}
KINDS |= {
    "olmo": {key: value for key, value in QWEN.items() if key != "rms_norm_eps"}
    | {"architectures": ["OlmoForCausalLM"], "model_type": "olmo", "num_attention_heads": 8},
    "nanochat": QWEN
    | {
        "architectures": ["NanoChatForCausalLM"],
        "model_type": "nanochat",
        "hidden_act": "relu2",
        "rms_norm_eps": 1e-3,  # so that it is seen
        "final_logit_softcapping": 4.0,
    },
}
KINDS["gpt-neox"] = QWEN | {
    "architectures": ["GPTNeoXForCausalLM"],
    "model_type": "gpt_neox",
    "num_key_value_heads": 4,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-3,  # so that it is seen
    "rotary_emb_base": 10000,
    "rotary_pct": 0.5,
}
del KINDS["gpt-neox"]["rope_theta"]
KINDS["granite4-h"] = KINDS["granite4-h-moe"] | {"num_local_experts": 0, "mamba_n_groups": 4}
KINDS["granite4"] = KINDS["granite4-moe"] | {"num_local_experts": 0, "position_embedding_type": "nope"}
MIXTURES = tuple(kind for kind in KINDS if kind.endswith(("moe", "mixtral", "minimax-m2", "gpt-oss")))
WITH_STATES = (
    "bamba",
    "falcon-h1",
    "granite4-h",
    "granite4-h-moe",
    "lfm2",
    "lfm2-moe",
    "nemotron-h",
    "nemotron-h-moe",
    "qwen3-next-moe",
    "qwen3.5",
    "qwen3.5-moe",
)
W1_NAMES = ("block_sparse_moe", "w1", "w3", "w2")
EXPERT_NAMES = dict.fromkeys(("mixtral", "minimax_m2", "phimoe"), W1_NAMES)  # else "mlp" and the names of an MLP
EXPERT_NAMES["lfm2_moe"] = ("feed_forward", *W1_NAMES[1:])


def make_checkpoint(
    path: Path,
    kind: str,
    *,
    dtype: str = "float32",
    format: str = "safetensors",
    seed: int = 0,
    with_tokenizer: bool = True,
    **config_overrides: Any,
) -> Path:
    """Write a checkpoint of `kind` (a key of KINDS) into the folder `path`, which is made, and return it.

    `format` is one of FORMATS. Overrides replace keys of config.json; `None` is written as null.
    """
    config = KINDS[kind] | {"torch_dtype": dtype} | config_overrides
    path.mkdir(parents=True, exist_ok=True)
    write_json(path / "config.json", config)
    write_json(path / "generation_config.json", generation_config(config))
    write_tensors(path, random_tensors(config, dtype=dtype, seed=seed), format)
    if with_tokenizer:
        write_tokenizer(path, config)
    return path


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def generation_config(config: dict[str, Any]) -> dict[str, Any]:
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    roles = {"user_token_id": 195, "assistant_token_id": 196} if config["model_type"] == "baichuan" else {}
    return ids | roles | {"do_sample": False, "max_new_tokens": 32}


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The published tensor names of `config`'s architecture, and their shapes."""
    if config["model_type"] not in WRITTEN_OUT:
        return transformers_shapes(json.dumps(config))
    hidden, inter, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for i in range(config["num_hidden_layers"]):
        layer = attention_shapes(config) | {
            "mlp.gate_proj.weight": (inter, hidden),
            "mlp.up_proj.weight": (inter, hidden),
            "mlp.down_proj.weight": (hidden, inter),
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
        }
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


@cache
def transformers_shapes(config: str) -> dict[str, tuple[int, ...]]:
    """What transformers' own model of this config.json would save."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**json.loads(config)))
    tied = model.all_tied_weights_keys
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied}
    return published_experts(model.config.model_type, shapes)


def published_experts(model_type: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Experts one by one, but for Granite: transformers has those of a layer in one tensor."""
    if model_type == "gpt_neox":
        return {name.replace("lm_head", "embed_out"): shape for name, shape in shapes.items()}
    if model_type in ("gpt_oss", "granitemoe_swa", "llama4_text", "qwen3_5_moe_text", "gemma4_text", "gemma3n_text"):
        return shapes
    if model_type.startswith("granitemoe"):
        published = {"router.weight": "router.layer.weight"}
        published |= {"experts.gate_up_proj": "input_linear.weight", "experts.down_proj": "output_linear.weight"}
        renamed = {name: ".block_sparse_moe.".join(_parts(name, published)) for name in shapes}
        return {renamed[name]: shape for name, shape in shapes.items()}
    if model_type == "nemotron_h":
        return {
            published: shape[1:] if ".experts." in name else shape
            for name, shape in shapes.items()
            for published in _each_expert(name, shape)
        }
    module, gate, up, down = EXPERT_NAMES.get(model_type, ("mlp", "gate_proj", "up_proj", "down_proj"))
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        layer, _, rest = name.partition(".feed_forward." if model_type == "lfm2_moe" else ".mlp.")
        if rest == "experts.gate_up_proj":
            parts, rows = [gate, up], shape[1] // 2
        elif rest == "experts.down_proj":
            parts, rows = [down], shape[1]
        else:
            rest = rest.removeprefix("gate.") if "moe_statics" in rest else rest
            rest = rest.removeprefix("gate.") if model_type == "exaone_moe" and "correction" in rest else rest
            rest = rest if model_type == "afmoe" else rest.replace("router.", "gate.")
            found[f"{layer}.{module}.{rest}" if rest else name] = shape
            continue
        for expert in range(shape[0]):
            found |= {f"{layer}.{module}.experts.{expert}.{part}.weight": (rows, shape[2]) for part in parts}
    return found


def _each_expert(name: str, shape: tuple[int, ...]) -> list[str]:
    layer, separator, part = name.partition(".experts.")
    return [f"{layer}.experts.{number}.{part}.weight" for number in range(shape[0])] if separator else [name]


def _parts(name: str, published: dict[str, str]) -> tuple[str, ...]:
    layer, separator, rest = name.partition(".block_sparse_moe.")
    return (layer, published[rest]) if separator else (layer,)


def attention_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    if config["model_type"] == "baichuan":
        return {"self_attn.W_pack.weight": (3 * hidden, hidden), "self_attn.o_proj.weight": (hidden, hidden)}
    rows = {"q": heads * head_dim, "k": config["num_key_value_heads"] * head_dim}
    rows["v"] = rows["k"]
    shapes: dict[str, tuple[int, ...]] = {f"self_attn.{n}_proj.weight": (rows[n], hidden) for n in "qkv"}
    shapes["self_attn.o_proj.weight"] = (hidden, heads * head_dim)
    if config["model_type"] == "qwen2":
        shapes |= {f"self_attn.{n}_proj.bias": (rows[n],) for n in "qkv"}
    if config["model_type"] == "qwen3":
        shapes |= {f"self_attn.{n}_norm.weight": (head_dim,) for n in "qk"}
    return shapes


def random_tensors(config: dict[str, Any], *, dtype: str, seed: int) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        values = rng.standard_normal(shape)
        if re.search(r"norm(s\.\d+)?\.weight$", name):
            values = 0.2 * values + (0.0 if is_around_one(config, name) else 1.0)
        elif name.endswith("bias"):
            values = 0.3 * values
        elif "embed_tokens" not in name or config["tie_word_embeddings"]:
            # a tied embedding of unit size would make every token predict itself
            values = values * 1.5 / np.sqrt(shape[-1])
        tensors[name] = np.ascontiguousarray(values.astype(np.float32).astype(DTYPES[dtype]))
    return tensors


def is_around_one(config: dict[str, Any], norm: str) -> bool:
    name = config["model_type"]
    return name.startswith(AROUND_ONE) and "linear_attn" not in norm and not name.startswith(("gemma3n", "gemma4"))


def write_tensors(path: Path, tensors: dict[str, NDArray[Any]], format: str) -> None:
    """Write `tensors` into the folder `path` in one of FORMATS; the sharded ones make two files and an index."""
    stem, suffix = ("model", "safetensors") if format in ("safetensors", "sharded") else ("pytorch_model", "bin")
    if format in ("safetensors", "bin"):
        _write_file(path / f"{stem}.{suffix}", tensors)
        return
    names = list(tensors)
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    weight_map: dict[str, str] = {}
    for number, half in enumerate(halves, start=1):
        file = f"{stem}-{number:05d}-of-00002.{suffix}"
        _write_file(path / file, {name: tensors[name] for name in half})
        weight_map |= dict.fromkeys(half, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(path / f"{stem}.{suffix}.index.json", index)


def _write_file(path: Path, tensors: dict[str, NDArray[Any]]) -> None:
    if path.suffix == ".safetensors":
        save_file(tensors, path, metadata={"format": "pt"})
        return
    import torch

    torch.save({name: _to_torch(tensor) for name, tensor in tensors.items()}, path)


def _to_torch(array: NDArray[Any]) -> Any:
    import torch

    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def write_tokenizer(path: Path, config: dict[str, Any]) -> None:
    if config["model_type"].startswith("qwen"):
        write_byte_level_tokenizer(path, config["vocab_size"])
        return
    num_reserved = 197 if config["model_type"] == "baichuan" else 3
    (path / "tokenizer.model").write_bytes(_sentencepiece(config["vocab_size"], num_reserved))
    name = "BaichuanTokenizer" if config["model_type"] == "baichuan" else "LlamaTokenizer"
    settings = {"tokenizer_class": name, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    write_json(path / "tokenizer_config.json", settings | {"add_bos_token": name != "BaichuanTokenizer"})


@cache
def _sentencepiece(vocab_size: int, num_reserved: int) -> bytes:
    return sentencepiece_model(vocab_size, num_reserved)
