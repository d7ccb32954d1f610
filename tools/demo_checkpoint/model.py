"""Baichuan2-7B's architecture at small size, for training: whole sequences, no cache.

Shape suffixes: B batch, T tokens, D hidden, H heads, K head size, F intermediate, V vocabulary.
"""

# ruff: noqa: N803, N806 - names carry shapes

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

INIT_STD = 0.02
EMBEDDING_STD = 0.1  # most rows are rare, and their updates are small compared with those of the layers


@dataclass(frozen=True, slots=True)
class ModelConfig:
    vocab_size: int = 5120
    hidden_size: int = 256
    intermediate_size: int = 688
    num_layers: int = 6
    num_heads: int = 4
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_positions: int = 512
    dropout: float = 0.0  # `TrainOptions` sets it for training


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.weight * (x_BTD * torch.rsqrt(x_BTD.pow(2).mean(-1, keepdim=True) + self.eps))


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.W_pack = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor, mask_TT: Tensor) -> Tensor:
        b, t, d = x_BTD.shape
        q_BHTK, k_BHTK, v_BHTK = self.W_pack(x_BTD).view(b, t, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        q_BHTK, k_BHTK = _rotate(q_BHTK, cos_TK, sin_TK), _rotate(k_BHTK, cos_TK, sin_TK)
        # explicit, because the fused kernel's backward pass is the slowest part of a step on a CPU
        scores_BHTT = q_BHTK @ k_BHTK.transpose(-1, -2) / math.sqrt(q_BHTK.shape[-1]) + mask_TT
        out: Tensor = self.o_proj((scores_BHTT.softmax(-1) @ v_BHTK).transpose(1, 2).reshape(b, t, d))
        return out


def _rotate(x_BHTK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    low, high = x_BHTK.chunk(2, -1)
    return x_BHTK * cos_TK + torch.cat((-high, low), -1) * sin_TK


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))
        return out


class Layer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor, mask_TT: Tensor) -> Tensor:
        attended_BTD = self.self_attn(self.input_layernorm(x_BTD), cos_TK, sin_TK, mask_TT)
        x_BTD = x_BTD + self.dropout(attended_BTD)
        out: Tensor = x_BTD + self.dropout(self.mlp(self.post_attention_layernorm(x_BTD)))
        return out


class TinyBaichuan(nn.Module):
    """Parameter names are the checkpoint's without the leading `model.`, and `lm_head` for the head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.dropout = nn.Dropout(config.dropout)
        self._initialise()

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                is_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                depth = 2 * self.config.num_layers if is_residual else 1
                nn.init.normal_(parameter, std=INIT_STD / math.sqrt(depth))
        nn.init.normal_(self.embed_tokens.weight, std=EMBEDDING_STD)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Logits [B, T, V]."""
        return self.head(self.hidden(ids_BT))

    def head(self, x_ND: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., D]: Baichuan2's NormHead."""
        return functional.linear(x_ND, functional.normalize(self.lm_head.weight))

    def hidden(self, ids_BT: Tensor) -> Tensor:
        """Normalized hidden states [B, T, D]. Padding on the right needs no mask: attention is causal."""
        cos_TK, sin_TK, mask_TT = self._tables(ids_BT.shape[1], ids_BT.device)
        x_BTD = self.dropout(self.embed_tokens(ids_BT))
        for layer in self.layers:
            x_BTD = layer(x_BTD, cos_TK, sin_TK, mask_TT)
        out: Tensor = self.norm(x_BTD)
        return out

    def _tables(self, length: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """cos and sin [T, K], additive causal mask [T, T]."""
        size = self.config.hidden_size // self.config.num_heads
        frequencies = self.config.rope_theta ** (-torch.arange(0, size, 2, device=device) / size)
        angles = torch.outer(torch.arange(length, device=device), frequencies).repeat(1, 2)
        mask_TT = torch.full((length, length), float("-inf"), device=device).triu(1)
        return angles.cos(), angles.sin(), mask_TT
