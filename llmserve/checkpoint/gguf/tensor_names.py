"""GGUF's names of modules and block tensors, and their names in Hugging Face's checkpoints."""

from __future__ import annotations

import re

OUTSIDE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "token_embd_norm": "model.embedding_norm",  # of LFM2
    "output": "lm_head",
}
ATTENTION = {f"attn_{n}": f"self_attn.{n}_proj" for n in "qkv"} | {"attn_output": "self_attn.o_proj"}
HEAD_NORMS = {f"attn_{n}_norm": f"self_attn.{n}_norm" for n in "qk"}
MLP = {f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
SEED_NORMS = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
FOUR_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
AFMOE = {
    "attn_norm": "input_layernorm",
    "attn_gate": "self_attn.gate_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_mlp_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
AFMOE_ROUTER = {"ffn_gate_inp": "mlp.router.gate"}
POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
GLM_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
OWN_NORMS = {f"attn_{n}_norm": f"self_attn.{n}_layernorm.norms.*" for n in "qk"}  # one for each head
TURNED_NORMS = {f"attn_{n[0]}_norm": f"self_attn.{n}_layernorm" for n in ("query", "key")}
LATENT = {f"attn_{name}": f"self_attn.{name}_proj" for name in ("q", "q_a", "q_b")} | {
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_output": "self_attn.o_proj",
}
OF_LATENT = "self_attn.kv_b_proj"  # two tensors in files since April 2025, one in older files
OLD_OF_LATENT = "attn_kv_b"
PLAIN_MLP = {f"ffn_{name}": f"mlp.{name}_proj" for name in ("up", "down")}
C_MLP = {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
PHI = {
    "attn_norm": "input_layernorm",
    **{f"attn_{n}": f"self_attn.{n}_proj" for n in "qkv"},
    "attn_output": "self_attn.dense",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
PHI_OUTSIDE = OUTSIDE | {"output_norm": "model.final_layernorm"}
FUSED = {"attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj"}
FUSED_MLP = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}

LFM2 = {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "attn_output": "self_attn.out_proj",
    **{f"attn_{n}": f"self_attn.{n}_proj" for n in "qkv"},
    **{f"attn_{n}_norm": f"self_attn.{n}_layernorm" for n in "qk"},
    **{f"ffn_{name}": f"feed_forward.{w}" for name, w in (("gate", "w1"), ("up", "w3"), ("down", "w2"))},
    **{f"shortconv.{name}": f"conv.{name}" for name in ("conv", "in_proj", "out_proj")},
}

# One tensor contains those of all experts or heads; `*` stands for their numbers.
EXPERTS = {f"ffn_{name}_exps": f"mlp.experts.*.{name}_proj" for name in ("gate", "up", "down")} | {
    "ffn_gate_inp": "mlp.gate"
}
MIXTRAL_EXPERTS = {
    f"ffn_{name}_exps": f"block_sparse_moe.experts.*.{w}" for name, w in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
}
LFM2_EXPERTS = {name: hf.replace("block_sparse_moe", "feed_forward") for name, hf in MIXTRAL_EXPERTS.items()} | {
    "ffn_gate_inp": "feed_forward.gate"
}
MIXTRAL_EXPERTS |= {"ffn_gate_inp": "block_sparse_moe.gate"}
SHARED_GATE = "ffn_gate_inp_shexp"
SHARED_EXPERT = {f"ffn_{name}_shexp": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")} | {
    SHARED_GATE: "mlp.shared_expert_gate"
}

SHARED_EXPERTS = {f"ffn_{name}_shexp": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")}
SHARED_MLP = {f"ffn_{name}_shexp": f"mlp.shared_mlp.{name}_proj" for name in ("gate", "up", "down")}
LLAMA4 = {
    "ffn_gate_inp": "feed_forward.router",
    **{f"ffn_{name}": f"feed_forward.{name}_proj" for name in ("gate", "up", "down")},
    **{f"ffn_{name}_shexp": f"feed_forward.shared_expert.{name}_proj" for name in ("gate", "up", "down")},
}
CORRECTION, CORRECTED = "exp_probs_b.bias", "e_score_correction_bias"
DRAFTING = {f"nextn.{name}": name for name in ("eh_proj", "embed_tokens", "enorm", "hnorm")} | {
    f"nextn.shared_head_{name}": f"shared_head.{name}" for name in ("head", "norm")
}
MTP_LAYER = "mtp.layers.0"  # Qwen3.5's drafting block, but only the tensors outside of its layer
MTP = {
    "eh_proj": "mtp.fc",
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "shared_head.norm": "mtp.norm",
}

# Layers with a state: Mamba's, by their module; and delta nets
MAMBA_PARTS = {"ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_norm": "norm", "ssm_out": "out_proj"}
MAMBA = {name: f"mamba.{module}" for name, module in MAMBA_PARTS.items()}
MAMBA_TENSORS = {"ssm_a": "mamba.A_log", "ssm_d": "mamba.D", "ssm_dt.bias": "mamba.dt_bias"}
MIXER = {
    "attn_norm": "norm",
    **{name: f"mixer.{module}" for name, module in MAMBA_PARTS.items()},
    **{f"attn_{n}": f"mixer.{n}_proj" for n in "qkv"},
    "attn_output": "mixer.o_proj",
    **{f"ffn_{name}": f"mixer.{name}_proj" for name in ("up", "down")},
}
MIXER_TENSORS = {name: hf.replace("mamba.", "mixer.") for name, hf in MAMBA_TENSORS.items()}
NEMOTRON_OUTSIDE = OUTSIDE | {"token_embd": "model.embeddings", "output_norm": "model.norm_f"}
MIXER_EXPERTS = {
    "ffn_gate_inp": "mixer.gate",
    **{f"ffn_{name}_exps": f"mixer.experts.*.{name}_proj" for name in ("up", "down")},
    **{f"ffn_{name}_shexp": f"mixer.shared_experts.{name}_proj" for name in ("up", "down")},
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}
DELTA_NET = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
BOTH_GATES = "ssm_ba"  # Qwen3-Next: joins two of DELTA_NET's, key head by key head
NEXT_DELTA_NET = {name: hf for name, hf in DELTA_NET.items() if hf[-2:] not in ("_a", "_b")} | {
    BOTH_GATES: "linear_attn.in_proj_ba"
}
DELTA_TENSORS = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}

QWEN35 = SEED_NORMS | ATTENTION | HEAD_NORMS | DRAFTING
FALCON_H1 = {
    "attn_norm": "input_layernorm",
    **ATTENTION,
    **{f"ffn_{name}": f"feed_forward.{name}_proj" for name in ("gate", "up", "down")},
}
FALCON_H1_TENSORS = MAMBA_TENSORS | {"ffn_norm": "pre_ff_layernorm.weight"}
GEMMA4 = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "ffn_gate_inp": "router.proj",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    **{f"post_ffw_norm_{n}": f"post_feedforward_layernorm_{n}" for n in (1, 2)},
}
GEMMA4_TENSORS = {
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
}
GEMMA4_OUTSIDE = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}

GEMMA3N = {
    **{name: GEMMA4[name] for name in ("inp_gate", "proj", "post_norm")},
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_correct_coef": "altup.correction_coefs",
    **{f"laurel_{side[0]}": f"laurel.linear_{side}" for side in ("left", "right")},
    "laurel_post_norm": "laurel.post_laurel_norm",
}
GEMMA3N_TENSORS = {"altup_correct_scale.weight": "altup.correct_output_scale"}
GEMMA3N_OUTSIDE = GEMMA4_OUTSIDE | {  # of all streams except the first
    "altup_proj": "model.altup_projections.*",
    "altup_unembd_proj": "model.altup_unembed_projections.*",
}

BERT_LAYERS = "bert.encoder.layer"
BERT = {
    **{f"attn_{name[0]}": f"attention.self.{name}" for name in ("query", "key", "value")},
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
BERT_OUTSIDE = {
    "token_embd": "bert.embeddings.word_embeddings",
    "position_embd": "bert.embeddings.position_embeddings",
    "token_types": "bert.embeddings.token_type_embeddings",
    "token_embd_norm": "bert.embeddings.LayerNorm",
    "cls": "bert.pooler.dense",
    "cls.output": "classifier",
}

# These belong to the config: each divides a frequency of the rotary embedding.
ROPE_FREQS = "rope_freqs.weight"
FUSED_EXPERTS = "ffn_gate_up_exps.weight"

LAYERS = "model.layers"
BLOCK_NAME = re.compile(r"blk\.(\d+)\.([\w.]+)\.(weight|bias)")
BLOCK_TENSOR = re.compile(r"blk\.(\d+)\.([\w.]+)")
LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.([\w.*]+)\.(weight|bias)")
LAYER = re.compile(r"model\.layers\.(\d+)\.([\w.]+)")
# or a head, or a stream
EXPERT = re.compile(
    r"(?<=\.experts\.)\d+(?=\.)|(?<=_layernorm\.norms\.)\d+(?=\.)|(?<=bed_projections\.)\d+(?=\.)"
    r"|(?<=altup_projections\.)\d+(?=\.)"
)
GATE = re.compile(r"(?<=\.linear_attn\.in_proj_)[ba](?=\.weight)")
