"""Training for columns that need it, in the peers' environment, which has torch: a student learns a teacher's
distributions, with an additional penalty."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

BATCH = 16
LENGTH = 64  # of a piece of text
LEARNING_RATE = 2e-3


def teach(
    student: Any,
    teacher: Any,
    texts: Sequence[Sequence[int]],
    *,
    steps: int,
    penalty: Callable[[Any], torch.Tensor],
) -> None:
    """`penalty` is computed from the student's output and added to the divergence, in nats."""
    ids = pieces(texts)
    optimizer = torch.optim.AdamW(student.parameters(), LEARNING_RATE, weight_decay=0.0)
    for step in range(steps):
        batch = ids[torch.randint(len(ids), (BATCH,))]
        with torch.no_grad():
            wanted = teacher(batch).logits.log_softmax(-1)
        made = student(batch)
        divergence = (wanted.exp() * (wanted - made.logits.log_softmax(-1))).sum(-1).mean()
        added = penalty(made)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (steps - step) / (steps / 2))
        optimizer.zero_grad()
        (divergence + added).backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        if step % 25 == 0 or step == steps - 1:
            print(f"step {step}: KL {divergence.item():.3f}, penalty {added.item():.3f}", flush=True)


def pieces(texts: Sequence[Sequence[int]]) -> torch.Tensor:
    """[N, LENGTH], from the concatenated texts."""
    joined = torch.tensor([token for ids in texts for token in ids])
    return joined[: len(joined) // LENGTH * LENGTH].view(-1, LENGTH)
