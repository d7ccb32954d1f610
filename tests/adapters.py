"""LoRA adapters as PEFT makes and saves them, with random numbers in all of their matrices."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from tests.oracle import load_oracle

USUAL_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapted_model(checkpoint: Path, *, seed: int = 0, **options: Any) -> Any:
    """PEFT's model of a checkpoint in float32 with a new adapter; `options` are those of its LoraConfig."""
    return adapted(load_oracle(checkpoint), seed=seed, **options)


def adapted(model: Any, *, seed: int = 0, **options: Any) -> Any:
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about names of transformers that PEFT still uses, and tied weights
        model = get_peft_model(model, LoraConfig(**{"r": 4, "lora_alpha": 8, **options}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_magnitude" in name:
                parameter.mul_(1 + 0.2 * torch.rand_like(parameter))
            elif "lora_" in name:
                parameter.normal_(0.0, 0.2)
            elif parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def linear_modules(model: Any) -> set[str]:
    """Names of a network's linear layers, as `target_modules` takes them; without the head, and those in a list."""
    import torch

    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    return {name.rpartition(".")[2] for name in linear if not name.endswith(tuple("0123456789"))} - {"lm_head"}


def make_adapter(path: Path, checkpoint: Path, **options: Any) -> Path:
    """Write one into the folder `path`; see `adapted_model`."""
    save_adapter(adapted_model(checkpoint, **{"target_modules": USUAL_MODULES, **options}), path)
    return path


def save_adapter(model: Any, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(path)
