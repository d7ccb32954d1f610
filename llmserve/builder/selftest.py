"""Computes the self-test that travels with an engine: the reference path over the engine's own weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmserve.builder.options import BuildOptions
from llmserve.builder.reference import ReferenceModel
from llmserve.engine.selftest import SelfTest
from llmserve.models.graph import Program
from llmserve.models.spec import Param

ROWS_PER_PROMPT = 4
SHORT_PROMPT_LENGTHS = (1, 7)
LONG_PROMPT_LENGTH = 40
MAX_PROMPT_LENGTH = 300  # the reference is slow: a build of a large model should not wait for it
ROUNDED_ROWS = 256  # at a time, to keep temporaries small
# Largest accepted error relative to the largest logit. The reference has the engine's rounded weights and float32
# everything else, so what remains is the engine's own: summation order, the KV cache in `dtype`, and for int8 the
# rounding of activations, which is what the scheme gives up.
TOLERANCES = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 4e-2}
INT8_TOLERANCE = 1e-1


def make_selftest(
    program: Program,
    params: Sequence[Param],
    options: BuildOptions,
    load: Callable[[str], NDArray[Any]],
    *,
    advance: Callable[[str, int], None],
) -> SelfTest:
    """`load` gives a parameter in the engine's dtype; each is read once per prompt, one at a time."""
    quantized = {param.name for param in params if param.quantizable} if options.quantization == "int8" else set()

    def load_effective(name: str) -> NDArray[Any]:
        weight = load(name)
        advance(name, weight.nbytes)
        return round_to_int8(weight) if name in quantized else weight

    reference = ReferenceModel(program, load_effective)
    prompts = make_prompts(program.vocab_size, options)
    logits = [reference.logits(prompt) for prompt in prompts]
    top_two = np.concatenate([np.partition(rows, -2, axis=1)[:, -2:] for rows in logits])
    return SelfTest(
        token_ids=np.concatenate([np.array(prompt, np.int32) for prompt in prompts]),
        prompt_lengths=np.array([len(prompt) for prompt in prompts], np.int32),
        argmax=np.concatenate([rows.argmax(axis=1).astype(np.int32) for rows in logits]),
        margins=np.abs(top_two[:, 1] - top_two[:, 0]).astype(np.float32),
        logits=np.concatenate([rows[-ROWS_PER_PROMPT:] for rows in logits]).astype(np.float32),
        rows_per_prompt=np.array([min(ROWS_PER_PROMPT, len(prompt)) for prompt in prompts], np.int32),
        tolerance=np.array(INT8_TOLERANCE if quantized else TOLERANCES[options.dtype], np.float32),
    )


def make_prompts(vocab_size: int, options: BuildOptions) -> list[list[int]]:
    """Token ids spread over the vocabulary by a multiplicative hash. The longest prompt crosses a KV block border."""
    longest = min(max(LONG_PROMPT_LENGTH, options.tokens_per_block + 5), MAX_PROMPT_LENGTH)
    lengths = sorted({min(length, options.max_seq_len) for length in (*SHORT_PROMPT_LENGTHS, longest)})
    return [
        [(2654435761 * (p + 100 * n + 1)) % 2**32 % vocab_size for p in range(length)]
        for n, length in enumerate(lengths)
    ]


def num_prompts(options: BuildOptions) -> int:
    return len(make_prompts(1, options))


def round_to_int8(matrix: NDArray[Any]) -> NDArray[np.float32]:
    """The values that symmetric int8 with one scale per output channel (row) can hold. One copy, and a few rows."""
    result: NDArray[np.float32] = matrix.astype(np.float32)
    for start in range(0, len(result), ROUNDED_ROWS):
        rows = result[start : start + ROUNDED_ROWS]
        scales = np.abs(rows).max(axis=1, keepdims=True) / np.float32(127)
        scales[scales == 0] = 1
        np.divide(rows, scales, out=rows)
        np.rint(rows, out=rows)
        np.multiply(rows, scales, out=rows)
    return result
