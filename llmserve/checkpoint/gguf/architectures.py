"""Which of llama.cpp's architectures are which of Hugging Face's, and what its converter did to names and numbers.

The one place of GGUF's tensor names. To add an architecture: name it here; what its config needs beyond the common keys
is in `families.py` and `mixtures.py`. Source: llama.cpp, `gguf-py/gguf/tensor_mapping.py`, and its converters in
`conversion/`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from llmserve.errors import Unsupported

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
POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
GLM_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
OWN_NORMS = {f"attn_{n}_norm": f"self_attn.{n}_layernorm.norms.*" for n in "qk"}  # one for each head
TURNED_NORMS = {f"attn_{n[0]}_norm": f"self_attn.{n}_layernorm" for n in ("query", "key")}
PLAIN_MLP = {f"ffn_{name}": f"mlp.{name}_proj" for name in ("up", "down")}
C_MLP = {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
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

# One tensor has those of all experts, or heads: `*` stands for their numbers.
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
CORRECTION, CORRECTED = "exp_probs_b.bias", "e_score_correction_bias"
DRAFTING = {f"nextn.{name}": name for name in ("eh_proj", "embed_tokens", "enorm", "hnorm")} | {
    f"nextn.shared_head_{name}": f"shared_head.{name}" for name in ("head", "norm")
}

BLOCK_NAME = re.compile(r"blk\.(\d+)\.([\w.]+)\.(weight|bias)")
LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.([\w.*]+)\.(weight|bias)")
LAYER = re.compile(r"model\.layers\.(\d+)\.([\w.]+)")
EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)|(?<=_layernorm\.norms\.)\d+(?=\.)")  # or a head

# Numbers that belong to the config. `rope_freqs` divides the frequencies of the rotary embedding one by one.
PARALLEL_KEYS = ("{}.use_parallel_residual",)
EXPERT_KEYS = ("{}.expert_count",)
ROUTER_KEYS = (*EXPERT_KEYS, "{}.expert_gating_func", "{}.expert_weights_scale", "{}.expert_group_count")
MULTIPLIERS = ("{}.attention.scale", "{}.embedding_scale", "{}.residual_scale", "{}.logit_scale")
ROPE_FREQS = "rope_freqs.weight"
ROPE_LONG, ROPE_SHORT = "rope_factors_long.weight", "rope_factors_short.weight"


@dataclass(frozen=True, slots=True)
class Joined:
    """Tensors of a block that are one in Hugging Face's checkpoints: the matrices, or biases, of all experts."""

    parts: tuple[str, ...]  # gate and up, or down
    tensor: str  # in a layer
    is_transposed: bool = False  # it has inputs as rows
    in_turns: bool = False  # it has the first gate, its up, the next gate and so on


def _joined(gate_up: str, down: str, *, bias: str = "", **form: bool) -> tuple[Joined, ...]:
    kinds = {"weight": "", "bias": bias} if bias else {"weight": ""}
    return tuple(
        joined
        for kind, ending in kinds.items()
        for joined in (
            Joined((f"ffn_gate_exps.{kind}", f"ffn_up_exps.{kind}"), gate_up + ending, **form),
            Joined((f"ffn_down_exps.{kind}",), down + ending, is_transposed=form.get("is_transposed", False)),
        )
    )


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    name: str  # general.architecture
    hf_name: str  # in `architectures` of config.json
    model_type: str
    block: Mapping[str, str]  # modules of a block: GGUF's name -> Hugging Face's
    tensors: Mapping[str, str] = field(default_factory=dict)  # of a block, whose last part changes, too
    joined: tuple[Joined, ...] = ()
    interleaved: bool = False  # rows of q and k are in pairs of the rotary embedding
    norm_shift: float = 0.0  # to be added to the weights of every norm
    layer_norm: str = ""  # where norms take the mean off: what config.json calls their epsilon
    factors: tuple[str, ...] = ()  # tensors that the config takes
    own_keys: tuple[str, ...] = ()  # of those that make another network of others
    by_layer: bool = False  # there is a number of KV heads for each layer, which the family reads

    def to_hf(self, name: str) -> str:
        """Hugging Face's name of a tensor; one that is not known here stays as it is, and has no place in the plan."""
        module, _, suffix = name.rpartition(".")
        if module in OUTSIDE:
            return f"{OUTSIDE[module]}.{suffix}"
        found = BLOCK_NAME.fullmatch(name)
        if found and (tensor := self._tensor(f"{found[2]}.{found[3]}")):
            return f"model.layers.{found[1]}.{tensor}"
        if found is None or found[2] not in self.block:
            return name
        return f"model.layers.{found[1]}.{self.block[found[2]]}.{found[3]}"

    def joined_of(self, name: str) -> tuple[Joined, list[str]] | None:
        """How a tensor of Hugging Face's is made of several, and their names."""
        found = LAYER.fullmatch(name)
        for joined in self.joined:
            if found is not None and found[2] == joined.tensor:
                return joined, [f"blk.{found[1]}.{part}" for part in joined.parts]
        return None

    def knows(self, name: str) -> bool:
        hf = self.to_hf(name)
        joined = self.joined_of(hf)
        return name in joined[1] if joined else self.to_gguf(hf) == name

    def _tensor(self, name: str) -> str | None:
        return next((joined.tensor for joined in self.joined if name in joined.parts), self.tensors.get(name))

    def to_gguf(self, name: str) -> str:
        """The inverse of `to_hf`; of tensors that are one, the first."""
        if joined := self.joined_of(name):
            return joined[1][0]
        module, _, suffix = name.rpartition(".")
        outside = {hf: gguf for gguf, hf in OUTSIDE.items()}
        if module in outside:
            return f"{outside[module]}.{suffix}"
        tensors = {hf: gguf for gguf, hf in self.tensors.items()}
        if (found := LAYER.fullmatch(name)) and found[2] in tensors:
            return f"blk.{found[1]}.{tensors[found[2]]}"
        found = LAYER_NAME.fullmatch(EXPERT.sub("*", name))
        modules = {hf: gguf for gguf, hf in self.block.items()}
        if found is None or found[2] not in modules:
            return name
        return f"blk.{found[1]}.{modules[found[2]]}.{found[3]}"

    def is_interleaved(self, hf_name: str) -> bool:
        return self.interleaved and (".q_proj." in hf_name or ".k_proj." in hf_name)


ALL = (
    GgufArchitecture(
        "llama",
        "LlamaForCausalLM",
        "llama",
        NORMS | ATTENTION | MLP,
        interleaved=True,
        factors=(ROPE_FREQS,),
    ),
    GgufArchitecture("qwen2", "Qwen2ForCausalLM", "qwen2", NORMS | ATTENTION | MLP, factors=(ROPE_FREQS,)),
    GgufArchitecture("qwen3", "Qwen3ForCausalLM", "qwen3", NORMS | ATTENTION | HEAD_NORMS | MLP, factors=(ROPE_FREQS,)),
    GgufArchitecture(
        "qwen2moe",
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        NORMS | ATTENTION | EXPERTS | SHARED_EXPERT,
        own_keys=EXPERT_KEYS,
    ),
    GgufArchitecture(
        "qwen3moe", "Qwen3MoeForCausalLM", "qwen3_moe", NORMS | ATTENTION | HEAD_NORMS | EXPERTS, own_keys=EXPERT_KEYS
    ),
    GgufArchitecture(
        "olmoe", "OlmoeForCausalLM", "olmoe", NORMS | ATTENTION | HEAD_NORMS | EXPERTS, own_keys=EXPERT_KEYS
    ),
    GgufArchitecture("olmo2", "Olmo2ForCausalLM", "olmo2", POST_NORMS | ATTENTION | HEAD_NORMS | MLP),
    GgufArchitecture(
        "exaone4",
        "Exaone4ForCausalLM",
        "exaone4",
        POST_NORMS | ATTENTION | HEAD_NORMS | MLP,
        factors=(ROPE_FREQS,),
    ),
    GgufArchitecture(
        "granite",
        "GraniteForCausalLM",
        "granite",
        NORMS | ATTENTION | MLP,
        interleaved=True,
        own_keys=MULTIPLIERS,
    ),
    GgufArchitecture(
        "smollm3", "SmolLM3ForCausalLM", "smollm3", NORMS | ATTENTION | MLP, interleaved=True, factors=(ROPE_FREQS,)
    ),
    GgufArchitecture("seed_oss", "SeedOssForCausalLM", "seed_oss", SEED_NORMS | ATTENTION | MLP),
    GgufArchitecture("glm4", "Glm4ForCausalLM", "glm4", GLM_NORMS | ATTENTION | FUSED_MLP),
    GgufArchitecture("ernie4_5", "Ernie4_5ForCausalLM", "ernie4_5", NORMS | ATTENTION | MLP),
    GgufArchitecture(
        "cohere2",
        "Cohere2ForCausalLM",
        "cohere2",
        {"attn_norm": "input_layernorm"} | ATTENTION | MLP,
        layer_norm="layer_norm_eps",
        own_keys=("{}.logit_scale",),
    ),
    GgufArchitecture(
        "starcoder2", "Starcoder2ForCausalLM", "starcoder2", NORMS | ATTENTION | C_MLP, layer_norm="norm_epsilon"
    ),
    GgufArchitecture(
        "stablelm",
        "StableLmForCausalLM",
        "stablelm",
        NORMS | ATTENTION | OWN_NORMS | MLP,
        layer_norm="layer_norm_eps",
        own_keys=PARALLEL_KEYS,
    ),
    GgufArchitecture(
        "nemotron",
        "NemotronForCausalLM",
        "nemotron",
        NORMS | ATTENTION | PLAIN_MLP,
        layer_norm="norm_eps",
        norm_shift=-1.0,
    ),
    GgufArchitecture(
        "mistral3",
        "Ministral3ForCausalLM",
        "ministral3",
        NORMS | ATTENTION | MLP,
        interleaved=True,
        own_keys=("{}.rope.scaling.yarn_log_multiplier",),
    ),
    # InternLM 2: its queries, keys and values are apart, so that it is a Llama
    GgufArchitecture("internlm2", "LlamaForCausalLM", "llama", NORMS | ATTENTION | MLP, interleaved=True),
    GgufArchitecture(
        "hunyuan-dense", "HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", NORMS | ATTENTION | TURNED_NORMS | MLP
    ),
    GgufArchitecture("gemma", "GemmaForCausalLM", "gemma", NORMS | ATTENTION | MLP, norm_shift=-1.0),
    GgufArchitecture(
        "glm4moe",
        "Glm4MoeForCausalLM",
        "glm4_moe",
        SEED_NORMS | ATTENTION | HEAD_NORMS | MLP | EXPERTS | SHARED_EXPERTS | DRAFTING,
        {CORRECTION: f"mlp.gate.{CORRECTED}"},
        own_keys=ROUTER_KEYS,
    ),
    GgufArchitecture(
        "dots1",
        "Dots1ForCausalLM",
        "dots1",
        NORMS | ATTENTION | HEAD_NORMS | MLP | EXPERTS | SHARED_EXPERTS,
        {CORRECTION: f"mlp.gate.{CORRECTED}"},
        own_keys=ROUTER_KEYS,
    ),
    GgufArchitecture(
        "minimax-m2",
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        NORMS | ATTENTION | HEAD_NORMS | MIXTRAL_EXPERTS,
        {CORRECTION: f"block_sparse_moe.{CORRECTED}"},
        own_keys=(*EXPERT_KEYS, "{}.expert_gating_func"),
    ),
    GgufArchitecture(
        "ernie4_5-moe",
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5_moe",
        NORMS | ATTENTION | MLP | EXPERTS | SHARED_EXPERTS,
        {CORRECTION: f"mlp.moe_statics.{CORRECTED}"},
        own_keys=EXPERT_KEYS,
    ),
    GgufArchitecture(
        "granitemoe",
        "GraniteMoeForCausalLM",
        "granitemoe",
        NORMS | ATTENTION | {"ffn_gate_inp": "block_sparse_moe.router.layer"},
        joined=_joined("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
        interleaved=True,
        own_keys=(*MULTIPLIERS, *EXPERT_KEYS),
    ),
    GgufArchitecture(
        "gpt-oss",
        "GptOssForCausalLM",
        "gpt_oss",
        SEED_NORMS | ATTENTION | {"ffn_gate_inp": "mlp.router"},
        {"attn_sinks.weight": "self_attn.sinks"},
        _joined("mlp.experts.gate_up_proj", "mlp.experts.down_proj", bias="_bias", is_transposed=True, in_turns=True),
        own_keys=EXPERT_KEYS,
    ),
    GgufArchitecture(
        "hunyuan-moe",
        "HunYuanMoEV1ForCausalLM",
        "hunyuan_v1_moe",
        NORMS | ATTENTION | TURNED_NORMS | EXPERTS | {"ffn_gate_inp": "mlp.gate.wg"} | SHARED_MLP,
        own_keys=EXPERT_KEYS,
    ),
    GgufArchitecture("lfm2", "Lfm2ForCausalLM", "lfm2", LFM2, by_layer=True),
    GgufArchitecture(
        "lfm2moe",
        "Lfm2MoeForCausalLM",
        "lfm2_moe",
        LFM2 | LFM2_EXPERTS,
        {CORRECTION: "feed_forward.expert_bias"},
        own_keys=ROUTER_KEYS,
        by_layer=True,
    ),
    GgufArchitecture("gemma2", "Gemma2ForCausalLM", "gemma2", FOUR_NORMS | ATTENTION | MLP, norm_shift=-1.0),
    GgufArchitecture(
        "gemma3", "Gemma3ForCausalLM", "gemma3_text", FOUR_NORMS | ATTENTION | HEAD_NORMS | MLP, norm_shift=-1.0
    ),
    GgufArchitecture("phi3", "Phi3ForCausalLM", "phi3", NORMS | FUSED | FUSED_MLP, factors=(ROPE_LONG, ROPE_SHORT)),
)
MIXTRAL = GgufArchitecture(  # which is a llama with experts
    "llama",
    "MixtralForCausalLM",
    "mixtral",
    NORMS | ATTENTION | MIXTRAL_EXPERTS,
    interleaved=True,
    factors=(ROPE_FREQS,),
    own_keys=EXPERT_KEYS,
)
ARCHITECTURES: Mapping[str, GgufArchitecture] = {each.name: each for each in ALL}


def gguf_architecture(name: object, num_experts: object) -> GgufArchitecture:
    found = (
        MIXTRAL
        if name == MIXTRAL.name and isinstance(num_experts, int) and num_experts > 0
        else ARCHITECTURES.get(str(name))
    )
    if found is None:
        raise Unsupported(
            f"architecture {name!r} (general.architecture) is not supported as GGUF; supported: "
            f"{', '.join(sorted(ARCHITECTURES))}"
        )
    return found
