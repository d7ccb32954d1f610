"""Makes questions: which summary belongs to this docstring? The others are from the same file."""

from __future__ import annotations

from collections.abc import Sequence

from tools.demo_checkpoint.corpus import Pair
from tools.eval_data.order import in_keyed_order

NUM_CHOICES = 4


def choice_rows(pairs: Sequence[Pair], seed: int) -> list[dict[str, object]]:
    """A row for each pair: its document, summaries, and which of them is correct."""
    return [_row(pair, pairs, seed) for pair in pairs]


def _row(pair: Pair, pairs: Sequence[Pair], seed: int) -> dict[str, object]:
    others = sorted({other.summary for other in pairs} - {pair.summary})
    wrong = in_keyed_order(others, f"{seed}:{pair.id}")[: NUM_CHOICES - 1]
    choices = in_keyed_order([pair.summary, *wrong], f"{seed}:{pair.id}:order")
    return {"id": pair.id, "document": pair.document, "choices": choices, "answer": choices.index(pair.summary)}
