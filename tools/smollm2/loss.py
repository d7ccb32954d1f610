"""Measures an engine's loss by rounding: compares its next-token distributions with another engine's on equal texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.stages.tokenizer import load_tokenizer
from tools.quality.divergence import Logits
from tools.smollm2 import ROOT
from tools.smollm2.logits import engine_logits, mean_divergence

TEXTS = ROOT / "eval" / "data" / "docstrings.jsonl"
NUM_TEXTS = 40
MOST_TOKENS = 256  # of a text


@dataclass(frozen=True, slots=True)
class Loss:
    divergence: float  # mean Kullback-Leibler divergence from the other engine, in nats
    agreement: float  # share of positions where both have the same best token
    num_positions: int


def next_token_logits(engine: Path) -> list[Logits]:
    """Logits of every position of the texts; engines of one checkpoint get the same ids."""
    tokenizer = load_tokenizer(engine)
    with TEXTS.open() as lines:
        texts = [json.loads(line)["document"] for line in islice(lines, NUM_TEXTS)]
    logits, longest = engine_logits(engine), EngineDirectory.open(engine).info().max_seq_len
    return [logits(tokenizer.encode_marked(text)[: min(longest, MOST_TOKENS)]) for text in texts]


def loss(wanted: Sequence[Logits], found: Sequence[Logits]) -> Loss:
    one, other = np.concatenate(wanted), np.concatenate(found)
    agreement = float((one.argmax(axis=1) == other.argmax(axis=1)).mean())
    return Loss(mean_divergence(one, other), agreement, len(one))
