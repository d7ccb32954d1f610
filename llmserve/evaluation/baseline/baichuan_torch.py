"""Baichuan 1 and 2 in torch, for transformers: the oracle of the parity tests and the baseline of `llmserve eval`.

The published modelling code needs `trust_remote_code` and no longer runs with current transformers. This one is written
from the description of the network and keeps the published tensor names, so `from_pretrained` loads the same folders.
`register()` adds it to AutoConfig and AutoModelForCausalLM.

Shapes in names: B batch, T new tokens, K keys (cached + new), N heads, D head size, H hidden, V vocabulary.
"""

# ruff: noqa: N803, N806 - names carry shapes

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

from llmserve.models.alibi import alibi_slopes
from llmserve.models.baichuan import ROPE_THETA, baichuan_form


class BaichuanConfig(PreTrainedConfig):
    """The published config keys. After construction `position_embedding` and `norm_head` are resolved, and saved."""

    model_type = "baichuan"

    vocab_size: int = 125696
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    hidden_act: str = "silu"
    max_position_embeddings: int | None = None
    model_max_length: int = 4096
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    position_embedding: str | None = None
    norm_head: bool | None = None
    use_cache: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        form = baichuan_form(vars(self))
        self.position_embedding = "rope" if form.rope else "alibi"
        self.norm_head = form.norm_head
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


class BaichuanRMSNorm(nn.Module):
    """x / rms(x) * weight; the mean of squares is taken in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * x32.to(self.weight.dtype)


class BaichuanAttention(nn.Module):
    def __init__(self, config: BaichuanConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads = config.num_attention_heads
        self.W_pack = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(
        self, x_BTH: Tensor, bias_BNTK: Tensor, rotary: tuple[Tensor, Tensor] | None, cache: Cache | None
    ) -> Tensor:
        batch, length, hidden = x_BTH.shape
        qkv = self.W_pack(x_BTH).view(batch, length, 3, self.num_heads, hidden // self.num_heads)
        q_BNTD, k_BNTD, v_BNTD = qkv.permute(2, 0, 3, 1, 4)
        if rotary is not None:
            q_BNTD, k_BNTD = rotate(q_BNTD, *rotary), rotate(k_BNTD, *rotary)
        if cache is not None:
            k_BNTD, v_BNTD = cache.update(k_BNTD, v_BNTD, self.layer)
        y_BNTD = functional.scaled_dot_product_attention(q_BNTD, k_BNTD, v_BNTD, attn_mask=bias_BNTK.to(q_BNTD.dtype))
        return cast(Tensor, self.o_proj(y_BNTD.transpose(1, 2).reshape(batch, length, hidden)))


class BaichuanMLP(nn.Module):
    def __init__(self, config: BaichuanConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x)))


class BaichuanDecoderLayer(nn.Module):
    def __init__(self, config: BaichuanConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = BaichuanAttention(config, layer)
        self.mlp = BaichuanMLP(config)
        self.input_layernorm = BaichuanRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = BaichuanRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x: Tensor, bias_BNTK: Tensor, rotary: tuple[Tensor, Tensor] | None, cache: Cache | None
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), bias_BNTK, rotary, cache)
        return cast(Tensor, x + self.mlp(self.post_attention_layernorm(x)))


class BaichuanNormHead(nn.Linear):
    """logits = x @ normalize(weight).T. The normalized rows are kept between calls while the weight does not change."""

    def __init__(self, hidden_size: int, vocab_size: int) -> None:
        super().__init__(hidden_size, vocab_size, bias=False)
        self._normalized: tuple[tuple[int, int], Tensor] | None = None

    def forward(self, input: Tensor) -> Tensor:
        return functional.linear(input, self._rows())

    def _rows(self) -> Tensor:
        if torch.is_grad_enabled() and self.weight.requires_grad:
            return functional.normalize(self.weight)
        state = (self.weight.data_ptr(), self.weight._version)
        if self._normalized is None or self._normalized[0] != state:
            self._normalized = (state, functional.normalize(self.weight))
        return self._normalized[1]


class BaichuanPreTrainedModel(PreTrainedModel):
    config_class = BaichuanConfig
    base_model_prefix = "model"
    _supports_sdpa = True


class BaichuanModel(BaichuanPreTrainedModel):
    def __init__(self, config: BaichuanConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(BaichuanDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = BaichuanRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> Tensor:
        """Hidden states after the last norm, [B, T, H]. `attention_mask` [B, K] is 0 on padding."""
        num_cached = past_key_values.get_seq_length() if past_key_values is not None else 0
        batch, length = input_ids.shape
        if attention_mask is None:
            attention_mask = input_ids.new_ones(batch, num_cached + length)
        if position_ids is None:
            position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
        rope = self.config.position_embedding == "rope"
        slopes = () if rope else alibi_slopes(self.config.num_attention_heads)
        bias_BNTK = attention_bias(attention_mask, length, slopes)
        rotary = cos_sin(position_ids, self.config.head_dim) if rope else None
        x_BTH = self.embed_tokens(input_ids)
        for layer in self.layers:
            x_BTH = layer(x_BTH, bias_BNTK, rotary, past_key_values)
        return cast(Tensor, self.norm(x_BTH))


class BaichuanForCausalLM(BaichuanPreTrainedModel, GenerationMixin):
    def __init__(self, config: BaichuanConfig) -> None:
        super().__init__(config)
        self.model = BaichuanModel(config)
        if config.norm_head:
            self.lm_head: nn.Linear = BaichuanNormHead(config.hidden_size, config.vocab_size)
        else:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        """Logits [B, T, V], or those of the last `logits_to_keep` tokens if that is not 0."""
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        x_BTH = self.model(input_ids, attention_mask, position_ids=position_ids, past_key_values=past_key_values)
        logits = self.lm_head(x_BTH[:, -logits_to_keep:] if logits_to_keep else x_BTH)
        return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)


def cos_sin(position_ids_BT: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles in float32, each [B, 1, T, D]."""
    exponents = torch.arange(0, head_dim, 2, device=position_ids_BT.device).float() / head_dim
    angles = position_ids_BT[:, None, :, None].float() * (1.0 / ROPE_THETA**exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x_BNTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D/2) in float32."""
    first, second = x_BNTD.float().chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return (x_BNTD.float() * cos + rotated * sin).to(x_BNTD.dtype)


def attention_bias(attention_mask_BK: Tensor, length: int, slopes: tuple[float, ...]) -> Tensor:
    """The bias for the scores of the last `length` tokens, float32 [B, 1 or N, T, K].

    It contains ALiBi if there are slopes, and a large negative number at masked positions.
    """
    num_keys = attention_mask_BK.shape[-1]
    keys = torch.arange(num_keys, device=attention_mask_BK.device)
    queries = keys[-length:, None]
    slopes_N = torch.tensor(slopes or (0.0,), device=keys.device)
    bias = slopes_N[:, None, None] * (keys - queries)
    visible = (keys <= queries) & attention_mask_BK.bool()[:, None, None, :]
    # finite, since a row without visible positions (left padding) must not become NaN; half precision's minimum
    return bias.masked_fill(~visible, torch.finfo(torch.float16).min)


def register() -> None:
    """Register the model type "baichuan" with the Auto classes. A second call has no effect."""
    AutoConfig.register("baichuan", BaichuanConfig, exist_ok=True)
    AutoModelForCausalLM.register(BaichuanConfig, BaichuanForCausalLM, exist_ok=True)
