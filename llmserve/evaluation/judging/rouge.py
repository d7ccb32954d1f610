"""ROUGE of texts against references, one score per sample, computed by the rouge-score package.

The package's own tokenizer only supports a to z and digits: it finds no words in Chinese text, so every score is 0.
This tokenizer returns the same words for ASCII text, and also words of other alphabets and each character of a script
that is written without spaces.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llmserve.errors import Unsupported

METRICS = ("rouge1", "rouge2", "rougeL", "rougeLsum")
UNSPACED = (  # character ranges of scripts without spaces between words
    "\u0e00-\u0eff"  # Thai, Lao
    "\u1000-\u109f\u1780-\u17ff"  # Burmese, Khmer
    "\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\uff66-\uff9f"  # Japanese
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Han
)


class _AsciiTokenizer(Protocol):
    def tokenize(self, text: str) -> list[str]: ...


class Tokenizer:
    """Words for ROUGE, in lower case. `ascii_tokenizer` splits and stems the words that are plain ASCII."""

    def __init__(self, ascii_tokenizer: _AsciiTokenizer) -> None:
        self._ascii = cache(ascii_tokenizer.tokenize)  # stems, which take most of the time

    def tokenize(self, text: str) -> list[str]:
        # composed, so that an accent is part of its letter however the text was typed
        words = _word_pattern().findall(unicodedata.normalize("NFC", text.lower()))
        return [token for word in words for token in (self._ascii(word) if word.isascii() else [word])]


@cache
def _word_pattern() -> re.Pattern[str]:
    r"""A character of an unspaced script with its marks, or a run of other letters, digits and marks (not in \w)."""
    marks = "".join(c for c in map(chr, range(0x300, 0x20000)) if unicodedata.category(c).startswith("M"))
    return re.compile(f"(?![{marks}])[{UNSPACED}][{marks}]*|(?:(?![{UNSPACED}])(?:[^\\W_]|[{marks}]))+")


def rouge_scores(texts: Sequence[str], references: Sequence[str], *, stemming: bool) -> dict[str, NDArray[np.float64]]:
    """F measure x 100 of every text, by metric; each array has one entry per text.

    With `stemming`, English words are reduced to their stems first (Porter), as most papers do.
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer
        from rouge_score.tokenizers import DefaultTokenizer
    except ImportError as error:
        raise Unsupported("ROUGE needs the rouge-score package: pip install 'llmserve[eval]'") from error
    scorer = RougeScorer(list(METRICS), tokenizer=Tokenizer(DefaultTokenizer(stemming)))
    scores = [scorer.score(reference, text) for text, reference in zip(texts, references, strict=True)]
    return {name: np.array([100 * score[name].fmeasure for score in scores]) for name in METRICS}
