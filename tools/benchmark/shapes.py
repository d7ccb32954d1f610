"""The measured networks: Llama-shaped, a mixture of experts, and a hybrid with states. Their speed does not depend on
the values of weights, except for the choice of experts; random routers choose all equally often."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int = 32000
    max_positions: int = 8192  # more than the longest cell

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def layer_products(self) -> int:
        """Multiply-adds of all layers' linear maps per token; without experts also their number of weights."""
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * self.kv_heads * self.head_dim
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_products(self) -> int:
        """Multiply-adds of the output head per row of logits; also its number of weights, and the embedding's."""
        return self.vocab * self.hidden

    @property
    def num_parameters(self) -> int:
        return self.layer_products + 2 * self.head_products + (2 * self.layers + 1) * self.hidden

    @property
    def kv_elements_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim

    def weights_read(self, tokens: int) -> float:
        """The weights that a step of `tokens` tokens reads, relative to a step of one."""
        return 1.0

    def config(self) -> dict[str, Any]:
        """config.json in Hugging Face's format."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.max_positions,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "torch_dtype": "float16",
        }

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(published name, shape) of every tensor, in the order of the network."""
        kv_width = self.kv_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        for i in range(self.layers):
            layer = f"model.layers.{i}"
            yield f"{layer}.input_layernorm.weight", (self.hidden,)
            yield f"{layer}.self_attn.q_proj.weight", (self.hidden, self.hidden)
            yield f"{layer}.self_attn.k_proj.weight", (kv_width, self.hidden)
            yield f"{layer}.self_attn.v_proj.weight", (kv_width, self.hidden)
            yield f"{layer}.self_attn.o_proj.weight", (self.hidden, self.hidden)
            yield f"{layer}.post_attention_layernorm.weight", (self.hidden,)
            yield f"{layer}.mlp.gate_proj.weight", (self.intermediate, self.hidden)
            yield f"{layer}.mlp.up_proj.weight", (self.intermediate, self.hidden)
            yield f"{layer}.mlp.down_proj.weight", (self.hidden, self.intermediate)
        yield "model.norm.weight", (self.hidden,)
        yield "lm_head.weight", (self.vocab, self.hidden)


class BaichuanShape(Shape):
    """Baichuan2's shape: one matrix for queries, keys and values; the head's rows are normalized."""

    def config(self) -> dict[str, Any]:
        own = {
            "architectures": ["BaichuanForCausalLM"],
            "model_type": "baichuan",
            "position_embedding": "rope",
            "norm_head": True,
        }
        return super().config() | own

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for name, dimensions in super().tensors():
            if name.endswith("q_proj.weight"):
                yield name.replace("q_proj", "W_pack"), (3 * self.hidden, self.hidden)
            elif not name.endswith(("k_proj.weight", "v_proj.weight")):
                yield name, dimensions


class OlmoeShape(Shape):
    """OLMoE's shape: 64 experts, 8 per token; norms over all heads of queries, and of keys."""

    num_experts, num_chosen = 64, 8

    @property
    def layer_products(self) -> int:
        """Multiply-adds per token: its chosen experts, and the router."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        return self.layers * (attention + self.num_chosen * self._expert + self.num_experts * self.hidden)

    @property
    def num_parameters(self) -> int:
        idle = self.layers * (self.num_experts - self.num_chosen) * self._expert
        return super().num_parameters + idle + self.layers * sum(self.head_norms)

    @property
    def head_norms(self) -> tuple[int, int]:
        """Sizes of the norms of queries and keys."""
        return self.hidden, self.kv_heads * self.head_dim

    @property
    def _expert(self) -> int:
        return 3 * self.hidden * self.intermediate

    def weights_read(self, tokens: int) -> float:
        """Assumes that tokens choose experts independently."""
        share = self.num_chosen / self.num_experts
        chosen = self.layers * self.num_chosen * self._expert
        others = self.layer_products + self.head_products - chosen
        return (others + chosen * (1 - (1 - share) ** tokens) / share) / (others + chosen)

    def config(self) -> dict[str, Any]:
        own = {
            "architectures": ["OlmoeForCausalLM"],
            "model_type": "olmoe",
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.num_chosen,
            "norm_topk_prob": False,
        }
        return super().config() | own

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for name, dimensions in super().tensors():
            if ".mlp." not in name:
                yield name, dimensions
            elif name.endswith("gate_proj.weight"):
                layer = name.removesuffix(".mlp.gate_proj.weight")
                yield f"{layer}.self_attn.q_norm.weight", self.head_norms[:1]
                yield f"{layer}.self_attn.k_norm.weight", self.head_norms[1:]
                yield f"{layer}.mlp.gate.weight", (self.num_experts, self.hidden)
                for expert in range(self.num_experts):
                    for part in ("gate", "up"):
                        yield f"{layer}.mlp.experts.{expert}.{part}_proj.weight", (self.intermediate, self.hidden)
                    yield f"{layer}.mlp.experts.{expert}.down_proj.weight", (self.hidden, self.intermediate)


class Qwen3MoeShape(OlmoeShape):
    """The shape of Qwen3's mixtures: 128 experts, 8 per token; wide heads, each with a norm."""

    num_experts, num_chosen = 128, 8

    @property
    def head_dim(self) -> int:
        return 2 * self.hidden // self.heads

    @property
    def head_norms(self) -> tuple[int, int]:
        return self.head_dim, self.head_dim

    def config(self) -> dict[str, Any]:
        own = {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "moe_intermediate_size": self.intermediate,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
        return super().config() | own

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for name, (rows, *columns) in super().tensors():
            if name.endswith("q_proj.weight"):
                yield name, (self.heads * self.head_dim, *columns)
            elif name.endswith("o_proj.weight"):
                yield name, (rows, self.heads * self.head_dim)
            else:
                yield name, (rows, *columns)


class GptOssShape(OlmoeShape):
    """gpt-oss's shape: 32 experts in MXFP4, 4 per token; biases, attention sinks, a window in every second layer."""

    num_experts, num_chosen = 32, 4

    @property
    def head_dim(self) -> int:
        return 64

    @property
    def num_parameters(self) -> int:
        """Elements of its tensors; two codes of an expert, in one byte, count as one."""
        return sum(math.prod(dimensions) for _, dimensions in self.tensors())

    def config(self) -> dict[str, Any]:
        own = {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "num_local_experts": self.num_experts,
            "num_experts_per_tok": self.num_chosen,
            "sliding_window": 128,
            "layer_types": [("full" if i % 2 else "sliding") + "_attention" for i in range(self.layers)],
            "swiglu_limit": 7.0,
            "attention_bias": True,
            "rope_theta": 150000.0,
            "rope_scaling": None,
            "quantization_config": {"quant_method": "mxfp4"},
        }
        config = super(OlmoeShape, self).config() | own
        del config["mlp_bias"]
        return config

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        wide, groups = self.heads * self.head_dim, self.hidden // 32
        for name, (rows, *columns) in super(OlmoeShape, self).tensors():
            layer, _, projection = name.rpartition(".self_attn.")
            if projection == "o_proj.weight":
                yield name, (self.hidden, wide)
                yield f"{layer}.self_attn.o_proj.bias", (self.hidden,)
                yield f"{layer}.self_attn.sinks", (self.heads,)
            elif layer:
                rows = wide if projection == "q_proj.weight" else self.kv_heads * self.head_dim
                yield name, (rows, self.hidden)
                yield name.replace("weight", "bias"), (rows,)
            elif name.endswith("gate_proj.weight"):
                mlp = name.removesuffix(".gate_proj.weight")
                yield f"{mlp}.router.weight", (self.num_experts, self.hidden)
                yield f"{mlp}.router.bias", (self.num_experts,)
                for part, outputs in (("gate_up_proj", 2 * self.intermediate), ("down_proj", self.hidden)):
                    yield f"{mlp}.experts.{part}_blocks", (self.num_experts, outputs, groups, 16)
                    yield f"{mlp}.experts.{part}_scales", (self.num_experts, outputs, groups)
                    yield f"{mlp}.experts.{part}_bias", (self.num_experts, outputs)
            elif ".mlp." not in name:
                yield name, (rows, *columns)


class Lfm2Shape(Shape):
    """LFM2's shape: short convolutions, and attention with normed heads in some layers; tied embeddings."""

    attention: tuple[int, ...] = (2, 5, 8, 10, 12, 14)  # layers
    taps = 3  # of a convolution

    @property
    def layer_products(self) -> int:
        convolution = self.hidden * (4 * self.hidden + self.taps)
        attention = 2 * self.hidden * (self.hidden + self.kv_heads * self.head_dim)
        mlps = self.layers * 3 * self.hidden * self.intermediate
        return mlps + len(self.attention) * attention + (self.layers - len(self.attention)) * convolution

    @property
    def num_parameters(self) -> int:
        norms = (2 * self.layers + 1) * self.hidden + 2 * len(self.attention) * self.head_dim
        return self.layer_products + self.head_products + norms

    @property
    def kv_elements_per_token(self) -> int:
        return 2 * len(self.attention) * self.kv_heads * self.head_dim

    def config(self) -> dict[str, Any]:
        own = {
            "architectures": ["Lfm2ForCausalLM"],
            "model_type": "lfm2",
            "layer_types": ["full_attention" if i in self.attention else "conv" for i in range(self.layers)],
            "conv_L_cache": self.taps,
            "conv_bias": False,
            "norm_eps": 1e-5,
            "block_auto_adjust_ff_dim": False,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": True,
        }
        return super().config() | own

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden, kv_width = self.hidden, self.kv_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocab, hidden)
        for i in range(self.layers):
            layer = f"model.layers.{i}"
            yield f"{layer}.operator_norm.weight", (hidden,)
            if i in self.attention:
                for name, width in (("q", hidden), ("k", kv_width), ("v", kv_width)):
                    yield f"{layer}.self_attn.{name}_proj.weight", (width, hidden)
                yield f"{layer}.self_attn.out_proj.weight", (hidden, hidden)
                yield f"{layer}.self_attn.q_layernorm.weight", (self.head_dim,)
                yield f"{layer}.self_attn.k_layernorm.weight", (self.head_dim,)
            else:
                yield f"{layer}.conv.conv.weight", (hidden, 1, self.taps)
                yield f"{layer}.conv.in_proj.weight", (3 * hidden, hidden)
                yield f"{layer}.conv.out_proj.weight", (hidden, hidden)
            yield f"{layer}.ffn_norm.weight", (hidden,)
            yield f"{layer}.feed_forward.w1.weight", (self.intermediate, hidden)
            yield f"{layer}.feed_forward.w3.weight", (self.intermediate, hidden)
            yield f"{layer}.feed_forward.w2.weight", (hidden, self.intermediate)
        yield "model.embedding_norm.weight", (hidden,)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("0.4b", hidden=896, intermediate=4864, layers=24, heads=14, kv_heads=2),
        Shape("1.1b", hidden=2048, intermediate=5632, layers=22, heads=32, kv_heads=4),  # TinyLlama's
        BaichuanShape("7b", 4096, 11008, layers=32, heads=32, kv_heads=32, vocab=125696, max_positions=4096),
        BaichuanShape("7b-layers", 4096, 11008, layers=2, heads=32, kv_heads=32, max_positions=4096),  # 2 layers
        Shape("llama-7b-layers", 4096, 11008, layers=2, heads=32, kv_heads=32),  # the same size for peers
        OlmoeShape("olmoe-layers", 2048, 1024, layers=4, heads=16, kv_heads=16),  # a quarter of OLMoE-1B-7B
        Qwen3MoeShape("qwen3-30b-layers", 2048, 768, layers=3, heads=32, kv_heads=4),  # of 48
        GptOssShape("gpt-oss-layers", 2880, 2880, layers=3, heads=64, kv_heads=8),  # of 24
        Lfm2Shape("lfm2-1.2b", 2048, 8192, layers=16, heads=32, kv_heads=8, vocab=65536),
        Shape("tiny", hidden=64, intermediate=176, layers=2, heads=4, kv_heads=2, vocab=320),  # for tests
    )
}
