"""Checks that draws depend on the seed: the same seed draws the same tokens in any batch, another seed draws others.

Two draws of an answer are equal by chance with the probability of that answer. If all answers for another seed equal
the first ones, and chance does not explain it, the seed is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from llmserve.evaluation.served.comparison import Difference, ServedResult, compared
from llmserve.evaluation.served.replies import Question, ServedAnswer

NAME = "seeded"
CHANCE = 1e-6  # probability that all are equal; above it, chance explains them
SEED, OTHER_SEED = 20_240_229, 7


def seeded(questions: Sequence[Question], seed: int) -> list[Question]:
    return [replace(question, seed=seed) for question in questions]


def judge_seeds(
    questions: Sequence[Question],
    alone: Sequence[ServedAnswer],
    among_others: Sequence[ServedAnswer],
    other_seed: Sequence[ServedAnswer],
    *,
    is_judged: bool,
) -> ServedResult:
    """The same seed one at a time and all at once, and another seed."""
    result = compared(NAME, questions, alone, among_others, is_judged=is_judged)
    if result.differences:
        return result
    failed = [
        Difference(question.id, f"error {reply.record.error}", -1, "", reply.record.message)
        for question, reply in zip(questions, other_seed, strict=True)
        if reply.record.error
    ]
    if failed:
        return replace(result, differences=tuple(failed))
    if any(_words(one) != _words(other) for one, other in zip(alone, other_seed, strict=True)):
        return result
    chance = _chance(alone)
    if chance is None or chance > CHANCE:
        return replace(
            result, notes=("another seed gave the same answers, which is expected if the model is this certain",)
        )
    same = Difference(questions[0].id, "another seed", -1, "", f"it produced the same {len(questions)} answers")
    return replace(result, differences=(same,))


def _words(reply: ServedAnswer) -> object:
    return reply.text if reply.token_ids is None else reply.token_ids


def _chance(replies: Sequence[ServedAnswer]) -> float | None:
    """The probability that a second draw of all answers equals the first; None if log-probs are not returned."""
    if any(reply.log_probs is None for reply in replies):
        return None
    return math.exp(sum(sum(reply.log_probs or ()) for reply in replies))
