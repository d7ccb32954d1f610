"""Computes the self-test of an engine: the reference's results with the engine's own weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from llmserve.builder.loss import Logits, measure_loss
from llmserve.builder.options import BuildOptions
from llmserve.builder.reference import ReferenceModel, Run
from llmserve.builder.targets.base import CompileJob
from llmserve.engine.directory.manifest import Loss
from llmserve.engine.directory.selftest import SelfTest, hidden_rows
from llmserve.models.graph import OpKind
from llmserve.models.number_formats import NumberFormat

SHORT_PROMPT_LENGTHS = (1, 7)
LONG_PROMPT_LENGTH = 40
MAX_PROMPT_LENGTH = 300  # the reference is slow, and the build of a large model should not wait for it
# The reference has the engine's rounded weights and float32 for everything else. What differs is the engine's summation
# order, and its KV cache in `dtype`, whose `tolerance` is accepted. If weights are quantized, the engine also rounds
# activations, and with an int8 cache keys and values. The reference does, too, but the last bit of a float can change a
# rounding, which grows from layer to layer: correct engines differ by about as much as rounding changes the logits.
ROUNDING_CHANGES_ACCEPTED = 2.0

Prompt: TypeAlias = tuple[int, ...]


def make_selftest(job: CompileJob, *, cache: NumberFormat, passage: Prompt = ()) -> tuple[SelfTest, Loss | None]:
    """Makes the self-test, and measures the loss on the tokens of `passage` if weights are rounded.

    Each parameter is loaded once for each op that uses it; `job.advance` receives the number of bytes done.
    """
    options = job.options
    prompts = make_prompts(job.program.vocab_size, options)

    def count(name: str, num_elements: int) -> None:
        job.advance(name, options.floats.num_bytes(num_elements))

    reference = ReferenceModel(
        job.program, job.weight, quantized=job.quantized, cache=cache, each=job.each, advance=count
    )
    hidden = [hidden_rows(len(prompt), job.program.hidden_width) for prompt in prompts]
    runs = [Run(prompt, hidden=rows) for prompt, rows in zip(prompts, hidden, strict=True)]
    tolerance = options.floats.tolerance
    chooses = any(op.kind is OpKind.ROUTE for op in job.program.ops)  # a last bit can change the choice
    if cache.is_rounded or options.weights.activations.is_rounded or chooses:
        runs += [replace(run, rounds=False) for run in runs]
    if passage:
        runs += [Run(passage), Run(passage, rounds=False, exact_weights=True)]
    logits = reference.logits_of(runs)
    loss = measure_loss(wanted=logits.pop(), found=logits.pop()) if passage else None
    if exact := logits[len(prompts) :]:
        logits = logits[: len(prompts)]
        tolerance += ROUNDING_CHANGES_ACCEPTED * change_by_rounding(logits, exact)
    return SelfTest.of(prompts, logits, tolerance), loss


def change_by_rounding(logits: Sequence[Logits], exact: Sequence[Logits]) -> float:
    """The distance of `logits` from those with the same rounded weights but exact activations, keys and values,
    relative to the largest."""
    changes = [np.abs(rows - wanted).max() for rows, wanted in zip(logits, exact, strict=True)]
    return float(max(changes) / max(np.abs(rows).max() for rows in logits))


def make_prompts(vocab_size: int, options: BuildOptions) -> list[Prompt]:
    """Token ids spread over the vocabulary by a multiplicative hash. The longest prompt crosses a KV block boundary."""
    longest = min(max(LONG_PROMPT_LENGTH, options.tokens_per_block + 5), MAX_PROMPT_LENGTH)
    lengths = sorted({min(length, options.max_seq_len) for length in (*SHORT_PROMPT_LENGTHS, longest)})
    return [
        tuple((2654435761 * (position + 100 * n + 1)) % 2**32 % vocab_size for position in range(length))
        for n, length in enumerate(lengths)
    ]
