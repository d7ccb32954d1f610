"""Compares our logits for SmolLM2 with transformers' on the same expanded values: python -m tools.smollm2.logits

transformers loads the values as a float32 Hugging Face folder. The numpy reference and the engines in float32 and
float16 are compared on a few texts, teacher-forced. Needs the extra `test` (torch), a few minutes and 2 GB of disk.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.builder.reference import ReferenceModel
from llmserve.checkpoint.expanded import write_expanded
from llmserve.checkpoint.plan import plan_weights
from llmserve.checkpoint.reader import Checkpoint
from llmserve.engine.cpu.runner import CpuRunner
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.directory.selftest import prompt_logits
from llmserve.models.registry import architecture_for
from llmserve.stages.tokenizer import load_tokenizer
from tools.quality.divergence import Logits, divergences
from tools.smollm2 import CHECKPOINT

TEXTS = (
    "The capital of France is Paris. It lies on the Seine, and two million people live there.",
    'def mean(values):\n    """The arithmetic mean."""\n    return sum(values) / len(values)\n',
    "<|im_start|>user\nHow do I boil an egg?<|im_end|>\n<|im_start|>assistant\nPut it into boiling water",
    "Ein Satz auf Deutsch, и немного по-русски, 123 + 456 = 579.",
)
LARGEST = {"numpy reference, float32": 1e-6, "engine, float32": 1e-6, "engine, float16": 1e-3}  # mean KL, in nats


def engine_logits(engine: Path) -> Callable[[Sequence[int]], Logits]:
    runner = CpuRunner.open(EngineDirectory.open(engine).engine_file, num_blocks=16)
    return lambda ids: prompt_logits(runner, list(ids), sequence_id=0)


def transformers_logits(folder: Path) -> Callable[[Sequence[int]], Logits]:
    import torch
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    model, report = loaded
    assert not any(report.values()), report

    def logits(ids: Sequence[int]) -> Logits:
        with torch.no_grad():
            found: Logits = model(torch.tensor([list(ids)])).logits[0].numpy()
        return found

    return logits


def reference_logits(checkpoint: Checkpoint) -> Callable[[Sequence[int]], Logits]:
    architecture = architecture_for(checkpoint.config)
    spec = architecture.from_hf(checkpoint.config)
    plan = plan_weights(checkpoint, architecture.params(spec), architecture.ignored)
    return ReferenceModel(architecture.program(spec), lambda name: plan.load(name, "float32")).logits


def mean_divergence(wanted: Logits, found: Logits) -> float:
    """KL divergence of the next token's distribution, averaged over positions."""
    return float(divergences(wanted, found).mean())


def main() -> None:
    file = CHECKPOINT
    with tempfile.TemporaryDirectory(prefix="smollm2-") as scratch, Checkpoint.open(file) as checkpoint:
        folder = Path(scratch)
        write_expanded(checkpoint, folder / "expanded")
        tokenizer = load_tokenizer(folder / "expanded")
        prompts = [tokenizer.encode_marked(text) for text in TEXTS]
        oracle = transformers_logits(folder / "expanded")
        wanted = [oracle(ids) for ids in prompts]
        sides = {"numpy reference, float32": reference_logits(checkpoint)}
        for dtype in ("float32", "float16"):
            build_engine(file, folder / dtype, BuildOptions(dtype=dtype, max_seq_len=512))
            sides[f"engine, {dtype}"] = engine_logits(folder / dtype)
        far = [name for name, logits in sides.items() if not _compare(name, [logits(ids) for ids in prompts], wanted)]
    sys.exit(f"too far from transformers: {', '.join(far)}" if far else 0)


def _compare(name: str, found: Sequence[Logits], wanted: Sequence[Logits]) -> bool:
    one, other = np.concatenate(wanted), np.concatenate(found)
    divergence = mean_divergence(one, other)
    agreement = (one.argmax(axis=1) == other.argmax(axis=1)).mean()
    error = np.abs(one - other).max() / np.abs(one).max()
    print(
        f"{name}: mean KL {divergence:.2e}, top-1 agreement {agreement:.1%}, largest relative error {error:.2e}, "
        f"{len(one)} positions",
        flush=True,
    )
    return divergence <= LARGEST[name]


if __name__ == "__main__":
    main()
