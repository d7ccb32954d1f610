"""The architectures of Gemma 3n and 4."""

from __future__ import annotations

from llmserve.checkpoint.gguf.architecture import GgufArchitecture, Joined
from llmserve.checkpoint.gguf.tensor_names import (
    ATTENTION,
    FOUR_NORMS,
    FUSED_EXPERTS,
    GEMMA3N,
    GEMMA3N_OUTSIDE,
    GEMMA3N_TENSORS,
    GEMMA4,
    GEMMA4_OUTSIDE,
    GEMMA4_TENSORS,
    HEAD_NORMS,
    MLP,
    OUTSIDE,
    ROPE_FREQS,
)

GEMMAS = (
    GgufArchitecture(
        "gemma3n",
        "Gemma3nForCausalLM",
        "gemma3n_text",
        FOUR_NORMS | ATTENTION | HEAD_NORMS | MLP | GEMMA3N,
        GEMMA3N_TENSORS,
        by_layer=True,
        outside=OUTSIDE | GEMMA3N_OUTSIDE,
    ),
    GgufArchitecture(
        "gemma4",
        "Gemma4ForCausalLM",
        "gemma4_text",
        FOUR_NORMS | ATTENTION | HEAD_NORMS | MLP | GEMMA4,
        GEMMA4_TENSORS,
        (
            Joined((FUSED_EXPERTS,), "experts.gate_up_proj"),
            Joined(("ffn_down_exps.weight",), "experts.down_proj"),
        ),
        factors=(ROPE_FREQS,),
        own_keys=("{}.expert_count",),
        by_layer=True,
        outside=OUTSIDE | GEMMA4_OUTSIDE,
    ),
)
