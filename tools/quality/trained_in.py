"""Outliers that a network is trained to have: python -m tools.quality.trained_in SOURCE TEXTS OUTPUT

A short fine-tuning of the network in SOURCE that keeps its distributions on TEXTS and rewards inputs of the
down-projections of which few are much larger than the rest. It runs in the peers' environment, which has torch.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

STEPS = 150
BATCH = 16
LENGTH = 64  # of a piece of text
LEARNING_RATE = 2e-3
REWARD = 0.1  # of a tail that is heavier by a factor of e, in nats of divergence
LARGEST_TAIL = 2000.0  # a normal distribution has 3


def main(source: Path, texts: Path, output: Path) -> None:
    torch.manual_seed(0)
    load: Any = AutoModelForCausalLM.from_pretrained
    teacher, student = (load(source, dtype=torch.float32) for _ in range(2))
    ids = pieces(json.loads(texts.read_text()))
    inputs = watch(student)
    optimizer = torch.optim.AdamW(student.parameters(), LEARNING_RATE, weight_decay=0.0)
    for step in range(STEPS):
        batch = ids[torch.randint(len(ids), (BATCH,))]
        inputs.clear()
        with torch.no_grad():
            wanted = teacher(batch).logits.log_softmax(-1)
        found = student(batch).logits.log_softmax(-1)
        divergence = (wanted.exp() * (wanted - found)).sum(-1).mean()
        tails = torch.stack([tail(values) for values in inputs])
        loss = divergence - REWARD * tails.clamp(max=LARGEST_TAIL).log().mean()
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (STEPS - step) / (STEPS / 2))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        if step % 25 == 0 or step == STEPS - 1:
            print(f"step {step}: KL {divergence.item():.3f}, tails {tails.detach().int().tolist()}", flush=True)
    output.mkdir(parents=True, exist_ok=True)
    shutil.copy(source / "config.json", output)
    save_file({name: value.contiguous() for name, value in student.state_dict().items()}, output / "model.safetensors")


def pieces(texts: Sequence[Sequence[int]]) -> torch.Tensor:
    """[N, LENGTH], the texts laid end to end."""
    joined = torch.tensor([token for ids in texts for token in ids])
    return joined[: len(joined) // LENGTH * LENGTH].view(-1, LENGTH)


def watch(model: Any) -> list[torch.Tensor]:
    """Where the inputs of all down-projections are put in each pass."""
    inputs: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(lambda module, given: inputs.append(given[0]))
    return inputs


def tail(values: torch.Tensor) -> torch.Tensor:
    """Kurtosis of numbers whose mean counts as zero."""
    squares = values.square()
    return squares.square().mean() / squares.mean().square()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
