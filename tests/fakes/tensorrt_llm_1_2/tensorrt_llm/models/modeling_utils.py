"""Configs and models, as far as a checkpoint can be wrong: what is read of a config, and every tensor's shape."""

import json
import os
from dataclasses import dataclass
from typing import Any, ClassVar

from safetensors.numpy import load_file

Shapes = dict[str, tuple[int, ...]]

REQUIRED = ("architecture", "dtype", "hidden_size", "num_hidden_layers", "num_attention_heads")
DEFAULTS = {
    "vocab_size": None, "hidden_act": "gelu", "logits_dtype": "float32", "norm_epsilon": 1e-5,
    "position_embedding_type": "learned_absolute", "max_position_embeddings": None, "rotary_embedding_dim": None,
    "num_key_value_heads": None, "intermediate_size": None, "mapping": None, "quantization": None,
    "use_parallel_embedding": False, "embedding_sharding_dim": 0, "head_size": None, "qk_layernorm": False,
    "runtime_defaults": None,
}  # fmt: skip
QUANTIZATION = {
    "quant_algo": None, "kv_cache_quant_algo": None, "group_size": 128, "smoothquant_val": 0.5, "clamp_val": None,
    "use_meta_recipe": False, "has_zero_point": False, "pre_quant_scale": False, "exclude_modules": None,
    "mamba_ssm_cache_dtype": None,
}  # fmt: skip
BITS = {"W8A16": 8, "W4A16": 4}
PADDED_TO = 64  # of a weight-only layer's sizes, times the ranks that share it


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
    """`OWN`: what a class of config takes beside the common ones, and its defaults. `IMPLICIT`: what the real one sets
    because it was handed over, with a warning and without a default: whoever reads it unset gets an AttributeError.
    """

    OWN: ClassVar[dict[str, Any]] = {}
    IMPLICIT: ClassVar[tuple[str, ...]] = ()

    def __init__(self, **given: Any) -> None:
        known = {*REQUIRED, *DEFAULTS, *self.OWN, *self.IMPLICIT}
        if missing := set(REQUIRED) - set(given):
            raise TypeError(f"__init__() missing required keyword-only arguments: {missing}")
        assert set(given) <= known, f"the real one warns that it sets {set(given) - known} implicitly"
        values = {**DEFAULTS, **self.OWN, **given}
        values["num_key_value_heads"] = values["num_key_value_heads"] or values["num_attention_heads"]
        values["intermediate_size"] = values["intermediate_size"] or 4 * values["hidden_size"]
        values["head_size"] = values["head_size"] or values["hidden_size"] // values["num_attention_heads"]
        values["mapping"] = Mapping(**(values["mapping"] or {}))
        assert set(values["quantization"] or {}) <= set(QUANTIZATION)
        values["quantization"] = QUANTIZATION | (values["quantization"] or {})
        assert values["position_embedding_type"] in ("rope_gpt_neox", "alibi", "learned_absolute")
        self.__dict__.update(values)

    @property
    def quant_algo(self) -> str | None:
        return self.quantization["quant_algo"]  # type: ignore[attr-defined, no-any-return]

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "PretrainedConfig":
        from tensorrt_llm.models import MODEL_MAP

        return MODEL_MAP[config["architecture"]].config_class(**config)  # type: ignore[no-any-return]

    @classmethod
    def from_json_file(cls, config_file: str) -> "PretrainedConfig":
        with open(config_file) as file:
            return cls.from_dict(json.load(file))

    def set_rank(self, rank: int) -> None:
        self.mapping.rank = rank  # type: ignore[attr-defined]

    def to_dict(self) -> dict[str, Any]:
        mapping = {name: value for name, value in vars(self.mapping).items() if name != "rank"}  # type: ignore[attr-defined]
        return {**vars(self), "mapping": mapping}


@dataclass
class Layer:
    """What the architectures' layers differ in."""

    head_size: int
    qkv_bias: bool = False
    dense_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


class PretrainedModel:
    """`READS`: attributes of its config that the real class and its layers read when they are made or traced."""

    config_class: ClassVar[type[PretrainedConfig]] = PretrainedConfig
    READS: ClassVar[tuple[str, ...]] = (  # DecoderModelForCausalLM, prepare_inputs, create_attention_const_params
        "architecture", "dtype", "logits_dtype", "vocab_size", "hidden_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "head_size", "intermediate_size", "hidden_act", "norm_epsilon",
        "max_position_embeddings", "position_embedding_type", "mapping", "quantization", "use_parallel_embedding",
    )  # fmt: skip
    has_stages: ClassVar[bool] = True  # the embedding is the first stage's, the last norm and the head the last one's

    def __init__(self, config: Any) -> None:
        for name in (*PretrainedModel.READS, *self.READS):
            getattr(config, name)
        self.config = config
        self.weights: dict[str, Any] = {}

    def layer(self) -> Layer:
        raise NotImplementedError

    @classmethod
    def from_checkpoint(
        cls, ckpt_dir: str, rank: int | None = None, config: Any = None, *, preprocess_weights_hook: Any = None
    ) -> "PretrainedModel":
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
        expected = self.shapes()
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

    def shapes(self) -> Shapes:
        """The parameters of one rank's network."""
        config, mapping = self.config, self.config.mapping
        hidden = config.hidden_size
        shapes: Shapes = {}
        for index in range(config.num_hidden_layers // mapping.pp_size):
            shapes |= {f"transformer.layers.{index}.{name}": shape for name, shape in self._layer_shapes().items()}
        if mapping.pp_rank == 0 or not self.has_stages:
            shapes["transformer.vocab_embedding.weight"] = (config.vocab_size, hidden)
        if mapping.pp_rank == mapping.pp_size - 1 or not self.has_stages:
            shapes["transformer.ln_f.weight"] = (hidden,)
            shapes["lm_head.weight"] = (-(-config.vocab_size // mapping.tp_size), hidden)
        return shapes

    def _layer_shapes(self) -> Shapes:
        config, layer, tp = self.config, self.layer(), self.config.mapping.tp_size
        assert config.num_attention_heads % tp == 0, "num_attention_heads must be divisible by tp_size"
        heads, kv_heads = config.num_attention_heads // tp, -(-config.num_key_value_heads // tp)
        hidden, inner = config.hidden_size, config.intermediate_size
        qkv = tp * (heads + 2 * kv_heads) * layer.head_size
        shapes: Shapes = {"input_layernorm.weight": (hidden,), "post_layernorm.weight": (hidden,)}
        shapes |= self._column("attention.qkv", hidden, qkv, layer.qkv_bias)
        shapes |= self._row("attention.dense", tp * heads * layer.head_size, hidden, layer.dense_bias)
        shapes |= self._column("mlp.fc", hidden, inner, layer.mlp_bias)
        shapes |= self._column("mlp.gate", hidden, inner, layer.mlp_bias)
        shapes |= self._row("mlp.proj", inner, hidden, layer.mlp_bias)
        if layer.qk_norm:
            assert heads != kv_heads, "the real one then takes query, key and value of a head for neighbours"
            shapes |= {f"attention.{kind}_layernorm.weight": (layer.head_size,) for kind in "qk"}
        return shapes

    def _column(self, name: str, inputs: int, outputs: int, bias: bool) -> Shapes:
        """The ranks share its outputs."""
        inputs, outputs = self._padded(inputs, outputs)
        outputs //= self.config.mapping.tp_size
        return self._weight(name, inputs, outputs) | ({f"{name}.bias": (outputs,)} if bias else {})

    def _row(self, name: str, inputs: int, outputs: int, bias: bool) -> Shapes:
        """The ranks share its inputs."""
        inputs, outputs = self._padded(inputs, outputs)
        inputs //= self.config.mapping.tp_size
        return self._weight(name, inputs, outputs) | ({f"{name}.bias": (outputs,)} if bias else {})

    def _padded(self, *sizes: int) -> tuple[int, ...]:
        multiple = PADDED_TO * self.config.mapping.tp_size if self.config.quant_algo else 1
        return tuple(-(-size // multiple) * multiple for size in sizes)

    def _weight(self, name: str, inputs: int, outputs: int) -> Shapes:
        if self.config.quant_algo is None:
            return {f"{name}.weight": (outputs, inputs)}
        columns = outputs * BITS[self.config.quant_algo] // 8
        return {f"{name}.weight": (inputs, columns), f"{name}.per_channel_scale": (outputs,)}
