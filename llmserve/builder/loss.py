"""What rounding costs a network on a passage that every build reads: a first look, and no evaluation."""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from llmserve.builder.calibration.encoder import Encoder, Ids
from llmserve.engine.manifest import Loss
from llmserve.errors import LlmserveError

Logits: TypeAlias = NDArray[np.float32]

MULTIPLICATIONS = 5e11  # that the passage may take, so that a large network has a shorter one
FEWEST_TOKENS, MOST_TOKENS = 64, 256
LOOKED_AT = 16  # positions at a time, to keep temporaries small
KEPT_DIGITS = 3  # of a divergence: more of them differ between machines
PASSAGE = """\
The harbour of a small town is a good place to see how work is divided. Before sunrise the boats come in, and each crew
knows what has to be done first: the ice is checked, the boxes are counted, and somebody writes the weight of every
catch into a book. At six o'clock the buyers arrive. They walk along the quay, look at the fish, and talk about the
weather as if the price did not matter to them. By seven most of it has been sold.

What looks like a habit is a set of rules. A box that has been promised is marked with chalk, and nobody touches it
again. When two buyers want the same one, the older offer counts. If the book and the boxes differ, all sales stop until
the mistake has been found, because an error of 3 kilograms in the morning becomes an argument in the evening. For
example, in March 2014 a crate was counted twice; it took four people until noon to find out why.

def total_weight(boxes):
    # in kilograms, of the boxes that have not been sold
    return sum(box.weight for box in boxes if not box.sold)

Later the town becomes quiet. The nets are mended, engines are cleaned, and children who come from school ask how much
was caught today. Their question has a simple answer, since it has been written down.
"""


def passage_ids(encoder: Encoder, num_parameters: int) -> Ids:
    """The passage, as far as it is read; nothing where the checkpoint has no tokenizer that could encode it."""
    length = max(FEWEST_TOKENS, min(MOST_TOKENS, int(MULTIPLICATIONS / num_parameters)))
    try:
        return encoder.text(PASSAGE)[:length]
    except LlmserveError:
        return ()


def measure_loss(*, wanted: Logits, found: Logits) -> Loss:
    """Of logits [T, V] at the same positions, with and without rounding."""
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
