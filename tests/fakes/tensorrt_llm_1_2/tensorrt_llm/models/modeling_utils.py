import json
import os
from dataclasses import dataclass
from typing import Any

from safetensors.numpy import load_file

KNOWN_KEYS = {
    "architecture", "dtype", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "hidden_act",
    "logits_dtype", "norm_epsilon", "position_embedding_type", "max_position_embeddings", "rotary_embedding_dim",
    "num_key_value_heads", "intermediate_size", "mapping", "quantization", "use_parallel_embedding",
    "embedding_sharding_dim", "head_size", "qk_layernorm", "runtime_defaults",
}  # fmt: skip
LLAMA_KEYS = {
    "mlp_bias", "attn_bias", "rotary_base", "rotary_scaling", "residual_mlp", "disable_weight_only_quant_plugin",
    "moe", "remove_duplicated_kv_heads", "tie_word_embeddings",
}  # fmt: skip
QWEN_KEYS = {
    "mlp_bias", "attn_bias", "rotary_base", "rotary_scaling", "disable_weight_only_quant_plugin", "use_logn_attn",
    "moe", "num_labels", "qwen_type", "moe_intermediate_size", "moe_shared_expert_intermediate_size",
    "tie_word_embeddings", "seq_length",
}  # fmt: skip
OWN_KEYS = {"BaichuanForCausalLM": {"model_version"}, "Qwen2ForCausalLM": QWEN_KEYS, "Qwen3ForCausalLM": QWEN_KEYS}


@dataclass
class Mapping:
    world_size: int = 1
    rank: int = 0
    gpus_per_node: int = 8
    tp_size: int = 1
    pp_size: int = 1

    def __post_init__(self) -> None:
        if self.world_size != self.tp_size * self.pp_size:
            raise ValueError(
                f"world_size must equal to tp_size * pp_size * cp_size, but got {self.world_size} != "
                f"{self.tp_size} * {self.pp_size} * 1."
            )

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp_size

    @property
    def pp_rank(self) -> int:
        return self.rank // self.tp_size


class PretrainedConfig:
    def __init__(self, *, architecture: str, dtype: str, hidden_size: int, num_hidden_layers: int,
                 num_attention_heads: int, **others: Any) -> None:  # fmt: skip
        known = KNOWN_KEYS | OWN_KEYS.get(architecture, LLAMA_KEYS)
        assert set(others) <= known, f"the real one warns that it sets {set(others) - known} implicitly"
        self.architecture = architecture
        self.values = {
            "architecture": architecture, "dtype": dtype, "hidden_size": hidden_size,
            "num_hidden_layers": num_hidden_layers, "num_attention_heads": num_attention_heads, **others,
        }  # fmt: skip
        self.mapping = Mapping(**others["mapping"])
        assert self.values["position_embedding_type"] in ("rope_gpt_neox", "alibi", "learned_absolute")

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "PretrainedConfig":
        from tensorrt_llm.models import MODEL_MAP

        MODEL_MAP[config["architecture"]]
        return cls(**config)

    @classmethod
    def from_json_file(cls, config_file: str) -> "PretrainedConfig":
        with open(config_file) as file:
            return cls.from_dict(json.load(file))

    def set_rank(self, rank: int) -> None:
        self.mapping.rank = rank

    def to_dict(self) -> dict[str, Any]:
        return dict(self.values)


class PretrainedModel:
    def __init__(self, config: PretrainedConfig) -> None:
        self.config = config
        self.weights: dict[str, Any] = {}

    @classmethod
    def from_checkpoint(
        cls, ckpt_dir: str, rank: int | None = None, config: PretrainedConfig | None = None, *,
        preprocess_weights_hook: Any = None,
    ) -> "PretrainedModel":  # fmt: skip
        if config is None:
            config = PretrainedConfig.from_json_file(os.path.join(ckpt_dir, "config.json"))
        if rank is not None:
            config.set_rank(rank)
        weights_path = os.path.join(ckpt_dir, f"rank{config.mapping.rank}.safetensors")
        assert os.path.isfile(weights_path)
        model = cls(config)
        model.load(load_file(weights_path))
        return model

    def load(self, weights: dict[str, Any]) -> None:
        expected = expected_shapes(self.config)
        if missing := set(expected) - set(weights):
            raise RuntimeError(f"Required but not provided tensors:{missing}")
        assert not set(weights) - set(expected), f"Provided but not required tensors: {set(weights) - set(expected)}"
        for name, shape in expected.items():
            if weights[name].shape != shape:
                raise RuntimeError(
                    f"Encounter error 'The value updated is not the same shape as the original. Updated: "
                    f"{weights[name].shape}, original: {shape}' for parameter '{name}'"
                )
        self.weights = weights


def expected_shapes(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """The parameters of one rank's network, as the real layers declare them."""
    values, mapping = config.values, config.mapping
    hidden, head, tp = values["hidden_size"], values["head_size"], mapping.tp_size
    kv_heads = (values["num_key_value_heads"] + tp - 1) // tp
    qkv = (values["num_attention_heads"] // tp + 2 * kv_heads) * head
    inner = values["intermediate_size"] // tp
    linear = {
        "attention.qkv": (qkv, hidden),
        "attention.dense": (hidden, values["num_attention_heads"] // tp * head),
        "mlp.fc": (inner, hidden),
        "mlp.gate": (inner, hidden),
        "mlp.proj": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(values["num_hidden_layers"] // mapping.pp_size):
        prefix = f"transformer.layers.{layer}."
        shapes |= {prefix + "input_layernorm.weight": (hidden,), prefix + "post_layernorm.weight": (hidden,)}
        for name, shape in linear.items():
            shapes |= _linear(prefix + name, shape, values["quantization"]["quant_algo"])
        if values.get("attn_bias"):
            shapes[prefix + "attention.qkv.bias"] = (qkv,)
            if values["architecture"] == "LlamaForCausalLM":
                shapes[prefix + "attention.dense.bias"] = (hidden,)
        if values["qk_layernorm"]:
            shapes |= {f"{prefix}attention.{kind}_layernorm.weight": (head,) for kind in "qk"}
    if mapping.pp_rank == 0:
        shapes["transformer.vocab_embedding.weight"] = (values["vocab_size"], hidden)
    if mapping.pp_rank == mapping.pp_size - 1:
        shapes["transformer.ln_f.weight"] = (hidden,)
        shapes["lm_head.weight"] = (-(-values["vocab_size"] // tp), hidden)
    return shapes


def _linear(name: str, shape: tuple[int, int], quant_algo: str | None) -> dict[str, tuple[int, ...]]:
    outputs, inputs = shape
    if quant_algo is None:
        return {f"{name}.weight": shape}
    columns = {"W8A16": outputs, "W4A16": outputs // 2}[quant_algo]
    return {f"{name}.weight": (inputs, columns), f"{name}.per_channel_scale": (outputs,)}
