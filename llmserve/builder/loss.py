"""The cost of rounding, measured on a passage that every build reads: a first impression, not an evaluation."""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from llmserve.builder.calibration.encoder import Encoder, Ids
from llmserve.engine.directory.manifest import Loss
from llmserve.errors import LlmserveError

Logits: TypeAlias = NDArray[np.float32]

MOST_TOKENS = 96  # tokens of the passage: as many as the self-test's prompts, so the self-test takes twice as long
LOOKED_AT = 16  # positions at a time, to keep temporaries small
KEPT_DIGITS = 3  # decimals of a divergence: further ones differ between machines
PASSAGE = """\
The harbour of a small town is a good place to see how work is divided. Before sunrise the boats come in, and each crew
knows what has to be done first: the ice is checked, the boxes are counted, and somebody writes the weight of every
catch into a book. At six o'clock the buyers arrive. They walk along the quay, look at the fish, and talk about the
weather as if the price did not matter to them. By seven most of it has been sold.
"""


def passage_ids(encoder: Encoder, max_seq_len: int) -> Ids:
    """Ids of the part of the passage that is read; empty if the checkpoint has no tokenizer that can encode it."""
    try:
        return encoder.text(PASSAGE)[: min(MOST_TOKENS, max_seq_len)]
    except LlmserveError:
        return ()


def measure_loss(*, wanted: Logits, found: Logits) -> Loss:
    """Compare logits [T, V] at the same positions, with and without rounding."""
    divergence = 0.0
    for begin in range(0, len(wanted), LOOKED_AT):
        exact, rounded = (_log_probabilities(logits[begin : begin + LOOKED_AT]) for logits in (wanted, found))
        divergence += float((np.exp(exact) * (exact - rounded)).sum()) / len(wanted)
    same = wanted.argmax(axis=1) == found.argmax(axis=1)
    return Loss(_rounded(divergence), _rounded(float(same.mean())), len(wanted))


def _log_probabilities(logits: Logits) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    found: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return found


def _rounded(number: float) -> float:
    return 0.0 if number <= 0 else round(number, KEPT_DIGITS - 1 - math.floor(math.log10(number)))
