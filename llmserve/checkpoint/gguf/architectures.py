"""The supported architectures of llama.cpp.

All GGUF tensor names are in `tensor_names.py`. To add an architecture, add it here; its config keys beyond the common
ones go to `families.py`, `mixtures.py` or `hybrids.py`. Source: llama.cpp, `gguf-py/gguf/tensor_mapping.py`, and its
converters in `conversion/`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from llmserve.checkpoint.gguf.architecture import GgufArchitecture, Joined, joined
from llmserve.checkpoint.gguf.tensor_names import (
    AFMOE,
    AFMOE_ROUTER,
    ATTENTION,
    BERT,
    BERT_LAYERS,
    BERT_OUTSIDE,
    C_MLP,
    CORRECTED,
    CORRECTION,
    DELTA_NET,
    DELTA_TENSORS,
    DRAFTING,
    EXPERTS,
    FALCON_H1,
    FALCON_H1_TENSORS,
    FOUR_NORMS,
    FUSED,
    FUSED_EXPERTS,
    FUSED_MLP,
    GEMMA3N,
    GEMMA3N_OUTSIDE,
    GEMMA3N_TENSORS,
    GEMMA4,
    GEMMA4_OUTSIDE,
    GEMMA4_TENSORS,
    GLM_NORMS,
    HEAD_NORMS,
    LATENT,
    LFM2,
    LFM2_EXPERTS,
    LLAMA4,
    MAMBA,
    MAMBA_TENSORS,
    MIXER,
    MIXER_EXPERTS,
    MIXER_TENSORS,
    MIXTRAL_EXPERTS,
    MLP,
    NEMOTRON_OUTSIDE,
    NEXT_DELTA_NET,
    NORMS,
    OF_LATENT,
    OLD_OF_LATENT,
    OUTSIDE,
    OWN_NORMS,
    PHI,
    PHI_OUTSIDE,
    PLAIN_MLP,
    POST_NORMS,
    QWEN35,
    ROPE_FREQS,
    SEED_NORMS,
    SHARED_EXPERT,
    SHARED_EXPERTS,
    SHARED_MLP,
    TURNED_NORMS,
)
from llmserve.errors import Unsupported

# Numbers that belong to the config.
PARALLEL_KEYS = ("{}.use_parallel_residual",)
EXPERT_KEYS = ("{}.expert_count",)
ROUTER_KEYS = (*EXPERT_KEYS, "{}.expert_gating_func", "{}.expert_weights_scale", "{}.expert_group_count")
MULTIPLIERS = ("{}.attention.scale", "{}.embedding_scale", "{}.residual_scale", "{}.logit_scale")
ROPE_LONG, ROPE_SHORT = "rope_factors_long.weight", "rope_factors_short.weight"

# Tensors that contain those of all experts
EXPERTS_IN_TWO = joined("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
ALL = (
    GgufArchitecture("llama", "LlamaForCausalLM", "llama", NORMS | ATTENTION | MLP, interleaved=True,
                     factors=(ROPE_FREQS,)),
    GgufArchitecture("qwen2", "Qwen2ForCausalLM", "qwen2", NORMS | ATTENTION | MLP, factors=(ROPE_FREQS,)),
    GgufArchitecture("qwen3", "Qwen3ForCausalLM", "qwen3", NORMS | ATTENTION | HEAD_NORMS | MLP,
                     factors=(ROPE_FREQS,), outside=OUTSIDE | {"cls.output": "score"}),
    GgufArchitecture("qwen2moe", "Qwen2MoeForCausalLM", "qwen2_moe", NORMS | ATTENTION | EXPERTS | SHARED_EXPERT,
                     own_keys=EXPERT_KEYS),
    GgufArchitecture("qwen3moe", "Qwen3MoeForCausalLM", "qwen3_moe", NORMS | ATTENTION | HEAD_NORMS | EXPERTS,
                     own_keys=EXPERT_KEYS),
    GgufArchitecture("olmoe", "OlmoeForCausalLM", "olmoe", NORMS | ATTENTION | HEAD_NORMS | EXPERTS,
                     own_keys=EXPERT_KEYS),
    GgufArchitecture("olmo", "OlmoForCausalLM", "olmo", ATTENTION | MLP, interleaved=True, layer_norm="layer_norm_eps"),
    GgufArchitecture("olmo2", "Olmo2ForCausalLM", "olmo2", POST_NORMS | ATTENTION | HEAD_NORMS | MLP),
    GgufArchitecture("exaone4", "Exaone4ForCausalLM", "exaone4", POST_NORMS | ATTENTION | HEAD_NORMS | MLP,
                     factors=(ROPE_FREQS,)),
    GgufArchitecture("granite", "GraniteForCausalLM", "granite", NORMS | ATTENTION | MLP, interleaved=True,
                     own_keys=MULTIPLIERS),
    GgufArchitecture("smollm3", "SmolLM3ForCausalLM", "smollm3", NORMS | ATTENTION | MLP, interleaved=True,
                     factors=(ROPE_FREQS,)),
    GgufArchitecture("arcee", "ArceeForCausalLM", "arcee", NORMS | ATTENTION | PLAIN_MLP, interleaved=True,
                     factors=(ROPE_FREQS,)),
    GgufArchitecture("seed_oss", "SeedOssForCausalLM", "seed_oss", SEED_NORMS | ATTENTION | MLP),
    GgufArchitecture("glm4", "Glm4ForCausalLM", "glm4", GLM_NORMS | ATTENTION | FUSED_MLP),
    GgufArchitecture("ernie4_5", "Ernie4_5ForCausalLM", "ernie4_5", NORMS | ATTENTION | MLP),
    GgufArchitecture("command-r", "CohereForCausalLM", "cohere",
                     {"attn_norm": "input_layernorm"} | ATTENTION | HEAD_NORMS | MLP, layer_norm="layer_norm_eps",
                     own_keys=("{}.logit_scale",)),
    GgufArchitecture("cohere2", "Cohere2ForCausalLM", "cohere2", {"attn_norm": "input_layernorm"} | ATTENTION | MLP,
                     layer_norm="layer_norm_eps", own_keys=("{}.logit_scale",)),
    GgufArchitecture("starcoder2", "Starcoder2ForCausalLM", "starcoder2", NORMS | ATTENTION | C_MLP,
                     layer_norm="norm_epsilon"),
    GgufArchitecture("stablelm", "StableLmForCausalLM", "stablelm", NORMS | ATTENTION | OWN_NORMS | MLP,
                     layer_norm="layer_norm_eps", own_keys=PARALLEL_KEYS),
    GgufArchitecture("jais2", "Jais2ForCausalLM", "jais2", NORMS | ATTENTION | PLAIN_MLP, layer_norm="layer_norm_eps"),
    GgufArchitecture("phi2", "PhiForCausalLM", "phi", PHI, layer_norm="layer_norm_eps", outside=PHI_OUTSIDE),
    GgufArchitecture("nemotron", "NemotronForCausalLM", "nemotron", NORMS | ATTENTION | PLAIN_MLP,
                     layer_norm="norm_eps", norm_shift=-1.0),
    GgufArchitecture("mistral3", "Ministral3ForCausalLM", "ministral3", NORMS | ATTENTION | MLP, interleaved=True,
                     own_keys=("{}.rope.scaling.yarn_log_multiplier",)),
    # InternLM 2: its queries, keys and values are separate, so it is a Llama
    GgufArchitecture("internlm2", "LlamaForCausalLM", "llama", NORMS | ATTENTION | MLP, interleaved=True),
    GgufArchitecture("hunyuan-dense", "HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense",
                     NORMS | ATTENTION | TURNED_NORMS | MLP),
    GgufArchitecture("gemma", "GemmaForCausalLM", "gemma", NORMS | ATTENTION | MLP, norm_shift=-1.0),
    GgufArchitecture("glm4moe", "Glm4MoeForCausalLM", "glm4_moe",
                     SEED_NORMS | ATTENTION | HEAD_NORMS | MLP | EXPERTS | SHARED_EXPERTS | DRAFTING,
                     {CORRECTION: f"mlp.gate.{CORRECTED}"}, own_keys=ROUTER_KEYS),
    GgufArchitecture("afmoe", "AfmoeForCausalLM", "afmoe",
                     AFMOE | ATTENTION | HEAD_NORMS | MLP | EXPERTS | SHARED_EXPERTS | AFMOE_ROUTER,
                     {CORRECTION: "mlp.expert_bias"}, own_keys=ROUTER_KEYS),
    GgufArchitecture("exaone-moe", "ExaoneMoeForCausalLM", "exaone_moe",
                     NORMS | ATTENTION | HEAD_NORMS | MLP | EXPERTS | SHARED_EXPERTS | DRAFTING,
                     {CORRECTION: f"mlp.{CORRECTED}"}, factors=(ROPE_FREQS,), own_keys=ROUTER_KEYS,
                     drops_drafting=True),
    GgufArchitecture("dots1", "Dots1ForCausalLM", "dots1",
                     NORMS | ATTENTION | HEAD_NORMS | MLP | EXPERTS | SHARED_EXPERTS,
                     {CORRECTION: f"mlp.gate.{CORRECTED}"}, own_keys=ROUTER_KEYS),
    # V2, or V3, Kimi K2 and GLM-4.7-Flash by the router
    GgufArchitecture("deepseek2", "DeepseekV2ForCausalLM", "deepseek_v2",
                     NORMS | LATENT | MLP | EXPERTS | SHARED_EXPERTS | DRAFTING,
                     {CORRECTION: f"mlp.gate.{CORRECTED}"},
                     (Joined(("attn_k_b.weight", "attn_v_b.weight"), f"{OF_LATENT}.weight", of_heads=True),),
                     own_keys=(*ROUTER_KEYS, "{}.rope.scaling.yarn_log_multiplier"), latent=True),
    GgufArchitecture("minimax-m2", "MiniMaxM2ForCausalLM", "minimax_m2",
                     NORMS | ATTENTION | HEAD_NORMS | MIXTRAL_EXPERTS, {CORRECTION: f"block_sparse_moe.{CORRECTED}"},
                     own_keys=(*EXPERT_KEYS, "{}.expert_gating_func")),
    GgufArchitecture("ernie4_5-moe", "Ernie4_5_MoeForCausalLM", "ernie4_5_moe",
                     NORMS | ATTENTION | MLP | EXPERTS | SHARED_EXPERTS,
                     {CORRECTION: f"mlp.moe_statics.{CORRECTED}"}, own_keys=EXPERT_KEYS),
    GgufArchitecture("granitemoe", "GraniteMoeForCausalLM", "granitemoe",
                     NORMS | ATTENTION | {"ffn_gate_inp": "block_sparse_moe.router.layer"},
                     joined=joined("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
                     interleaved=True, own_keys=(*MULTIPLIERS, *EXPERT_KEYS)),
    GgufArchitecture("gpt-oss", "GptOssForCausalLM", "gpt_oss",
                     SEED_NORMS | ATTENTION | {"ffn_gate_inp": "mlp.router"},
                     {"attn_sinks.weight": "self_attn.sinks"},
                     joined("mlp.experts.gate_up_proj", "mlp.experts.down_proj", bias="_bias", is_transposed=True,
                            in_turns=True),
                     own_keys=EXPERT_KEYS),
    GgufArchitecture("llama4", "Llama4ForCausalLM", "llama4_text", NORMS | ATTENTION | LLAMA4,
                     joined=joined("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj",
                                   is_transposed=True),
                     factors=(ROPE_FREQS,), own_keys=EXPERT_KEYS),
    GgufArchitecture("phimoe", "PhimoeForCausalLM", "phimoe", NORMS | ATTENTION | MIXTRAL_EXPERTS,
                     factors=(ROPE_LONG, ROPE_SHORT), own_keys=EXPERT_KEYS),
    GgufArchitecture("hunyuan-moe", "HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe",
                     NORMS | ATTENTION | TURNED_NORMS | EXPERTS | {"ffn_gate_inp": "mlp.gate.wg"} | SHARED_MLP,
                     own_keys=EXPERT_KEYS),
    # Qwen3-Next is the network of Qwen3.5 with experts; its checkpoints have these tensors, too
    GgufArchitecture("qwen3next", "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text",
                     QWEN35 | NEXT_DELTA_NET | SHARED_EXPERT | {"ffn_gate_inp": "mlp.gate"}, DELTA_TENSORS,
                     EXPERTS_IN_TWO, norm_shift=-1.0, own_keys=EXPERT_KEYS),
    GgufArchitecture("qwen35", "Qwen3_5ForCausalLM", "qwen3_5_text", QWEN35 | DELTA_NET | MLP, DELTA_TENSORS,
                     norm_shift=-1.0, tiled_heads=True, drops_drafting=True, has_mtp=True),
    GgufArchitecture("qwen35moe", "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text",
                     QWEN35 | DELTA_NET | SHARED_EXPERT | {"ffn_gate_inp": "mlp.gate"}, DELTA_TENSORS,
                     EXPERTS_IN_TWO, norm_shift=-1.0, own_keys=EXPERT_KEYS, tiled_heads=True, drops_drafting=True,
                     has_mtp=True),
    GgufArchitecture("granitehybrid", "GraniteMoeHybridForCausalLM", "granitemoehybrid",
                     NORMS | ATTENTION | MAMBA | {"ffn_down": "shared_mlp.output_linear"}, MAMBA_TENSORS,
                     (Joined(("ffn_gate.weight", "ffn_up.weight"), "shared_mlp.input_linear.weight", is_matrix=True),),
                     interleaved=True, own_keys=MULTIPLIERS, by_layer=True),
    GgufArchitecture("falcon-h1", "FalconH1ForCausalLM", "falcon_h1", FALCON_H1 | MAMBA, FALCON_H1_TENSORS,
                     outside=OUTSIDE | {"output_norm": "model.final_layernorm"}),
    GgufArchitecture("nemotron_h", "NemotronHForCausalLM", "nemotron_h", MIXER, MIXER_TENSORS, interleaved=True,
                     by_layer=True, outside=NEMOTRON_OUTSIDE),
    GgufArchitecture("nemotron_h_moe", "NemotronHForCausalLM", "nemotron_h", MIXER | MIXER_EXPERTS | DRAFTING,
                     MIXER_TENSORS | {CORRECTION: f"mixer.gate.{CORRECTED}"}, interleaved=True, own_keys=ROUTER_KEYS,
                     by_layer=True, outside=NEMOTRON_OUTSIDE, drops_drafting=True),
    GgufArchitecture("gemma3n", "Gemma3nForCausalLM", "gemma3n_text",
                     FOUR_NORMS | ATTENTION | HEAD_NORMS | MLP | GEMMA3N, GEMMA3N_TENSORS, by_layer=True,
                     outside=OUTSIDE | GEMMA3N_OUTSIDE),
    GgufArchitecture("gemma4", "Gemma4ForCausalLM", "gemma4_text",
                     FOUR_NORMS | ATTENTION | HEAD_NORMS | MLP | GEMMA4, GEMMA4_TENSORS,
                     (Joined((FUSED_EXPERTS,), "experts.gate_up_proj"),
                      Joined(("ffn_down_exps.weight",), "experts.down_proj")),
                     factors=(ROPE_FREQS,), own_keys=EXPERT_KEYS, by_layer=True,
                     outside=OUTSIDE | GEMMA4_OUTSIDE),
    GgufArchitecture("lfm2", "Lfm2ForCausalLM", "lfm2", LFM2, by_layer=True),
    GgufArchitecture("lfm2moe", "Lfm2MoeForCausalLM", "lfm2_moe", LFM2 | LFM2_EXPERTS,
                     {CORRECTION: "feed_forward.expert_bias"}, own_keys=ROUTER_KEYS, by_layer=True),
    GgufArchitecture("bert", "BertModel", "bert", BERT, layer_norm="layer_norm_eps",
                     own_keys=("{}.attention.causal",), outside=BERT_OUTSIDE, layers=BERT_LAYERS),
    GgufArchitecture("gemma2", "Gemma2ForCausalLM", "gemma2", FOUR_NORMS | ATTENTION | MLP, norm_shift=-1.0),
    GgufArchitecture("gemma3", "Gemma3ForCausalLM", "gemma3_text", FOUR_NORMS | ATTENTION | HEAD_NORMS | MLP,
                     norm_shift=-1.0),
    GgufArchitecture("phi3", "Phi3ForCausalLM", "phi3", NORMS | FUSED | FUSED_MLP, factors=(ROPE_LONG, ROPE_SHORT)),
)  # fmt: skip
MIXTRAL = GgufArchitecture(  # which is a llama with experts
    "llama",
    "MixtralForCausalLM",
    "mixtral",
    NORMS | ATTENTION | MIXTRAL_EXPERTS,
    interleaved=True,
    factors=(ROPE_FREQS,),
    own_keys=EXPERT_KEYS,
)  # fmt: skip
GRANITE_H_MOE = GgufArchitecture(
    "granitehybrid",
    "GraniteMoeHybridForCausalLM",
    "granitemoehybrid",
    NORMS
    | ATTENTION
    | MAMBA
    | {"ffn_gate_inp": "block_sparse_moe.router.layer", "ffn_down_shexp": "shared_mlp.output_linear"},
    MAMBA_TENSORS,
    (
        *joined("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
        Joined(("ffn_gate_shexp.weight", "ffn_up_shexp.weight"), "shared_mlp.input_linear.weight", is_matrix=True),
    ),
    interleaved=True,
    own_keys=(*MULTIPLIERS, *EXPERT_KEYS),
    by_layer=True,
)  # fmt: skip
ARCHITECTURES: Mapping[str, GgufArchitecture] = {each.name: each for each in ALL}
WITH_EXPERTS: Mapping[str, GgufArchitecture] = {each.name: each for each in (MIXTRAL, GRANITE_H_MOE)}


def gguf_architecture(name: object, num_experts: object, tensors: Collection[str]) -> GgufArchitecture:
    """`tensors` by the file's names."""
    has_experts = isinstance(num_experts, int) and num_experts > 0
    found = (WITH_EXPERTS if has_experts and name in WITH_EXPERTS else ARCHITECTURES).get(str(name))
    if found is None:
        raise Unsupported(
            f"architecture {name!r} (general.architecture) is not supported as GGUF; supported: "
            f"{', '.join(sorted(ARCHITECTURES))}"
        )
    if found.joined == EXPERTS_IN_TWO and any(tensor.endswith(FUSED_EXPERTS) for tensor in tensors):
        gate_up, down = found.joined  # a converter may keep gate and up joined
        return replace(found, joined=(replace(gate_up, parts=(FUSED_EXPERTS,)), down))
    if found.latent and any(f".{OLD_OF_LATENT}." in tensor for tensor in tensors):
        return replace(found, block={**found.block, OLD_OF_LATENT: OF_LATENT}, joined=())
    return found
