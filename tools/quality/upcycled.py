"""Trains a mixture of experts: python -m tools.quality.upcycled SOURCE TEXTS OUTPUT

Sparse upcycling (arXiv 2212.05055): a network of Qwen3-MoE's form, whose experts start as parts of the MLPs of the
Llama in SOURCE and learn its distributions on TEXTS.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tools.quality.training import teach

STEPS = 80
BALANCE = 0.02  # weight of the loss for balanced experts
NUM_EXPERTS, NUM_CHOSEN, WIDTH = 8, 2, 256


def main(source: Path, texts: Path, output: Path) -> None:
    torch.manual_seed(0)
    load: Any = AutoModelForCausalLM.from_pretrained
    teacher = load(source, dtype=torch.float32)
    config = with_experts(json.loads((source / "config.json").read_text()))
    student = upcycled(teacher, config)
    ids = json.loads(texts.read_text())
    teach(student, teacher, ids, steps=STEPS, penalty=lambda made: BALANCE * made.aux_loss)
    student.save_pretrained(output)
    (output / "config.json").write_text(json.dumps(config))


def with_experts(llama: Mapping[str, Any]) -> dict[str, Any]:
    """A config in the published format."""
    return {
        **llama, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
        "head_dim": llama["hidden_size"] // llama["num_attention_heads"], "moe_intermediate_size": WIDTH,
        "num_experts": NUM_EXPERTS, "num_experts_per_tok": NUM_CHOSEN, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip


def upcycled(teacher: Any, config: Mapping[str, Any]) -> Any:
    student = Qwen3MoeForCausalLM(Qwen3MoeConfig(**config, output_router_logits=True))
    student.load_state_dict(teacher.state_dict(), strict=False)  # all except norms of heads, routers and experts
    for own, other in zip(student.model.layers, teacher.model.layers, strict=True):
        gate, up, down = (getattr(other.mlp, f"{name}_proj").weight for name in ("gate", "up", "down"))
        with torch.no_grad():
            for expert in range(NUM_EXPERTS):
                some = torch.randperm(len(gate))[:WIDTH]
                own.mlp.experts.gate_up_proj[expert] = torch.cat([gate[some], up[some]])
                own.mlp.experts.down_proj[expert] = down[:, some] * (len(gate) / WIDTH)
    return student


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
