"""Trains a network to have outliers: python -m tools.quality.trained_in SOURCE TEXTS OUTPUT

A short fine-tuning of the network in SOURCE keeps its distributions on TEXTS, and rewards down-projections of which a
few inputs are much larger than the rest.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from tools.quality.training import teach

STEPS = 150
REWARD = 0.1  # in nats of divergence, for a tail that is heavier by a factor of e
LARGEST_TAIL = 2000.0  # a normal distribution has 3


def main(source: Path, texts: Path, output: Path) -> None:
    torch.manual_seed(0)
    load: Any = AutoModelForCausalLM.from_pretrained
    teacher, student = (load(source, dtype=torch.float32) for _ in range(2))
    inputs = watch(student)

    def light_tails(made: Any) -> torch.Tensor:
        tails = torch.stack([tail(values) for values in inputs])
        inputs.clear()
        return -REWARD * tails.clamp(max=LARGEST_TAIL).log().mean()

    teach(student, teacher, json.loads(texts.read_text()), steps=STEPS, penalty=light_tails)
    output.mkdir(parents=True, exist_ok=True)
    shutil.copy(source / "config.json", output)
    save_file({name: value.contiguous() for name, value in student.state_dict().items()}, output / "model.safetensors")


def watch(model: Any) -> list[torch.Tensor]:
    """Returns a list that receives the inputs of all down-projections in each pass."""
    inputs: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(lambda module, given: inputs.append(given[0]))
    return inputs


def tail(values: torch.Tensor) -> torch.Tensor:
    """Kurtosis of numbers, with their mean taken as zero."""
    squares = values.square()
    return squares.square().mean() / squares.mean().square()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
