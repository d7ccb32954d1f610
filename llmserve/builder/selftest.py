"""Computes the self-test that travels with an engine: the reference path over the engine's own weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from llmserve.builder.options import BuildOptions
from llmserve.builder.pieces import Each, Weight, one_by_one
from llmserve.builder.quantization import quantized_params
from llmserve.builder.reference import ReferenceModel, Run
from llmserve.engine.selftest import SelfTest
from llmserve.models.graph import Program
from llmserve.models.spec import Param

ROWS_PER_PROMPT = 4
SHORT_PROMPT_LENGTHS = (1, 7)
LONG_PROMPT_LENGTH = 40
MAX_PROMPT_LENGTH = 300  # the reference is slow: a build of a large model should not wait for it
# Largest accepted error relative to the largest logit. The reference has the engine's rounded weights and float32
# everything else, so what remains is the engine's own: summation order, and the KV cache in `dtype`.
TOLERANCES = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 4e-2}
# An engine with quantized weights also rounds activations, one with an int8 cache keys and values. The reference too,
# but the last bit of a float tips some of them over, and that grows from layer to layer: sound computations differ by
# about as much as the rounding itself changes.
ROUNDING_CHANGES_ACCEPTED = 2.0

Prompt: TypeAlias = tuple[int, ...]
Logits: TypeAlias = NDArray[np.float32]
Load: TypeAlias = Callable[[str], Weight]


def make_selftest(
    program: Program,
    params: Sequence[Param],
    options: BuildOptions,
    load: Load,
    *,
    cache_dtype: str,
    advance: Callable[[str, int], None],
    each: Each = one_by_one,
) -> SelfTest:
    """`load` gives a parameter in the engine's dtype; it is called once for each op that uses one.

    `advance` is told the bytes that were done, as they are in the engine's dtype.
    """
    quantized = quantized_params(program, params, options)
    prompts = make_prompts(program.vocab_size, options)
    int8_cache = cache_dtype == "int8"

    def count(name: str, num_elements: int) -> None:
        advance(name, options.itemsize * num_elements)

    reference = ReferenceModel(program, load, quantized=quantized, int8_cache=int8_cache, each=each, advance=count)
    runs = [Run(prompt) for prompt in prompts]
    tolerance = TOLERANCES[options.dtype]
    if options.rounds_what_it_computes:
        runs += [Run(prompt, rounds=False) for prompt in prompts]
    with threadpool_limits(1, "blas"):  # the pieces have the cores; and no sum depends on how many there are
        logits = reference.logits_of(runs)
    if exact := logits[len(prompts) :]:
        logits = logits[: len(prompts)]
        tolerance += ROUNDING_CHANGES_ACCEPTED * change_by_rounding(logits, exact)
    top_two = np.concatenate([np.partition(rows, -2, axis=1)[:, -2:] for rows in logits])
    return SelfTest(
        token_ids=np.concatenate([np.array(prompt, np.int32) for prompt in prompts]),
        prompt_lengths=np.array([len(prompt) for prompt in prompts], np.int32),
        argmax=np.concatenate([rows.argmax(axis=1).astype(np.int32) for rows in logits]),
        margins=np.abs(top_two[:, 1] - top_two[:, 0]).astype(np.float32),
        logits=np.concatenate([rows[-ROWS_PER_PROMPT:] for rows in logits]).astype(np.float32),
        rows_per_prompt=np.array([min(ROWS_PER_PROMPT, len(prompt)) for prompt in prompts], np.int32),
        tolerance=np.array(tolerance, np.float32),
    )


def change_by_rounding(logits: Sequence[Logits], exact: Sequence[Logits]) -> float:
    """How far `logits` are from those with the same rounded weights, but exact activations, keys and values, relative
    to the largest."""
    changes = [np.abs(rows - wanted).max() for rows, wanted in zip(logits, exact, strict=True)]
    return float(max(changes) / max(np.abs(rows).max() for rows in logits))


def make_prompts(vocab_size: int, options: BuildOptions) -> list[Prompt]:
    """Token ids spread over the vocabulary by a multiplicative hash. The longest prompt crosses a KV block border."""
    longest = min(max(LONG_PROMPT_LENGTH, options.tokens_per_block + 5), MAX_PROMPT_LENGTH)
    lengths = sorted({min(length, options.max_seq_len) for length in (*SHORT_PROMPT_LENGTHS, longest)})
    return [
        tuple((2654435761 * (position + 100 * n + 1)) % 2**32 % vocab_size for position in range(length))
        for n, length in enumerate(lengths)
    ]
