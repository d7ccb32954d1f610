"""Muon for the layers' matrices (its update is the orthogonalised momentum), AdamW for everything else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .model import TinyBaichuan

MATRIX_LR = 0.015
EMBEDDING_LR = 2.5e-3
HEAD_LR = 2.5e-3
NORM_LR = 2.5e-3
MOMENTUM = 0.95
MATRIX_DECAY = 0.1  # of a weight per unit of learning rate: old updates fade, and late ones still turn the matrix
DECAY = 0.01  # of all other parameters
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # the quintic that Muon's authors published
NEWTON_SCHULZ_STEPS = 5


Matrix = tuple[nn.Parameter, slice]  # some rows of a parameter


class Muon:
    """Momentum with Nesterov's look-ahead, orthogonalised; matrices of one shape are processed as one stack."""

    def __init__(self, matrices: Sequence[Matrix], lr: float) -> None:
        self._lr = lr
        self._groups: dict[torch.Size, list[Matrix]] = defaultdict(list)
        for parameter, rows in matrices:
            self._groups[parameter[rows].shape].append((parameter, rows))
        self._momenta: dict[torch.Size, Tensor] = {}

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One update with `scale` times the learning rate; gradients are read, not cleared."""
        for shape, group in self._groups.items():
            gradient = torch.stack([_gradient(parameter)[rows] for parameter, rows in group])
            momentum = self._momenta.setdefault(shape, torch.zeros_like(gradient)).lerp_(gradient, 1 - MOMENTUM)
            update = _orthogonalise(gradient.lerp(momentum, MOMENTUM))
            rate = self._lr * scale * max(1.0, shape[0] / shape[1]) ** 0.5
            for (parameter, rows), change in zip(group, update, strict=True):
                parameter[rows].mul_(1 - self._lr * scale * MATRIX_DECAY).sub_(change, alpha=rate)

    def state(self) -> dict[torch.Size, Tensor]:
        return self._momenta

    def restore(self, state: dict[torch.Size, Tensor]) -> None:
        self._momenta = dict(state)

    def zero_grad(self) -> None:
        for group in self._groups.values():
            for parameter, _ in group:
                parameter.grad = None


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "step() comes after backward()"
    return parameter.grad


def _orthogonalise(stack: Tensor) -> Tensor:
    """Approximately the nearest semi-orthogonal matrices of a stack [N, rows, columns]."""
    a, b, c = NEWTON_SCHULZ
    x: Tensor = stack.mT if stack.shape[1] > stack.shape[2] else stack
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if stack.shape[1] > stack.shape[2] else x


class Optimizer:
    """Combines both optimizers in one `step`."""

    def __init__(self, model: TinyBaichuan) -> None:
        matrices: list[Matrix] = []
        norms = []
        for name, parameter in model.named_parameters():
            if "layers." in name and parameter.dim() == 2:
                parts = 3 if name.endswith("W_pack.weight") else 1  # q, k and v are three matrices in one tensor
                size = parameter.shape[0] // parts
                matrices += [(parameter, slice(i * size, (i + 1) * size)) for i in range(parts)]
            elif parameter.dim() == 1:
                norms.append(parameter)
        self._muon = Muon(matrices, MATRIX_LR)
        groups = [
            {"params": [model.embed_tokens.weight], "lr": EMBEDDING_LR},
            {"params": [model.lm_head.weight], "lr": HEAD_LR},
            {"params": norms, "lr": NORM_LR},
        ]
        self._adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=DECAY)
        self._rates = [float(group["lr"]) for group in self._adam.param_groups]

    def state(self) -> dict[str, Any]:
        """Returns the state that `restore` needs to continue as if without interruption."""
        return {"muon": self._muon.state(), "adam": self._adam.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        self._muon.restore(state["muon"])
        self._adam.load_state_dict(state["adam"])

    def step(self, scale: float) -> None:
        """Update every parameter with `scale` (0 to 1) times its learning rate and clear the gradients."""
        for group, rate in zip(self._adam.param_groups, self._rates, strict=True):
            group["lr"] = rate * scale
        self._muon.step(scale)
        self._adam.step()
        self._adam.zero_grad()
        self._muon.zero_grad()
