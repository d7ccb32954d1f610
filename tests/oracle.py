"""The second opinion of the parity tests: transformers, or our own torch implementation where it has none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def load_oracle(path: Path) -> Any:
    """The checkpoint as a transformers model in float32, after checking that every tensor found its place."""
    import torch
    from transformers import AutoModelForCausalLM

    from llmserve.evaluation.baseline import baichuan_torch

    baichuan_torch.register()
    found: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    model, report = found
    assert not any(report.values()), report
    return model.eval()


def oracle_logits(model: Any, token_ids: Sequence[int]) -> NDArray[np.float32]:
    """Logits after every token, float32 [tokens, vocab]."""
    import torch

    with torch.no_grad():
        logits: NDArray[np.float32] = model(torch.tensor([list(token_ids)])).logits[0].numpy()
    return logits


def relative_error(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> float:
    """Largest difference over the oracle's largest value."""
    assert found.shape == wanted.shape
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def reference_logits(path: Path) -> Callable[[Sequence[int]], NDArray[np.float32]]:
    """Our own way from a folder to logits: reader, architecture, plan, numpy reference."""
    from llmserve.builder.reference import ReferenceModel
    from llmserve.checkpoint.plan import plan_weights
    from llmserve.checkpoint.reader import Checkpoint
    from llmserve.models.registry import architecture_for

    checkpoint = Checkpoint.open(path)
    architecture = architecture_for(checkpoint.config)
    spec = architecture.from_hf(checkpoint.config)
    plan = plan_weights(checkpoint, architecture.params(spec), architecture.ignored)
    return ReferenceModel(architecture.program(spec), lambda name: plan.load(name, "float32")).logits
