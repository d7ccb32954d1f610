"""A fake layer for drafts: it reads fake hidden rows, and fails where they are not those of the tokens before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from llmserve.engine.base import RunnerInfo, StepResult
from llmserve.engine.fake import FakeRunner, fold
from llmserve.scheduler.plan import HiddenRows, StepPlan
from llmserve.scheduler.sequence import Sequence

HIDDEN_WIDTH = 2  # a token's position, and the fold of all tokens up to it


def fake_hidden(plan: StepPlan, running: Mapping[int, Sequence]) -> HiddenRows:
    """That an engine hands out with a step."""
    rows = [
        (place, fold((*running[chunk.sequence_id].token_ids[: chunk.start], *chunk.token_ids)[: place + 1]))
        for chunk in plan.chunks
        for place in range(chunk.start, chunk.end)
    ]
    return np.array(rows, np.float32)


def check_known(plan: StepPlan, running: Mapping[int, Sequence]) -> None:
    """Rows of known tokens are those of their sequence."""
    assert plan.hidden is not None
    rows = iter(plan.hidden)
    for chunk in plan.chunks:
        token_ids = running[chunk.sequence_id].token_ids
        for token in chunk.token_ids:
            place, h = map(int, next(rows))
            if place < len(token_ids):
                assert h == fold(token_ids[: place + 1]), "a row of another sequence"
            assert place + 1 >= len(token_ids) or token == token_ids[place + 1], "a token that does not follow its row"


class LayerRunner(FakeRunner):
    """Draws what a greedy engine draws, but every `wrong_every`th time something else."""

    def __init__(self, info: RunnerInfo, wrong_every: int) -> None:
        super().__init__(info)
        self._read_rows: dict[int, tuple[int, int, int]] = {}  # by place in the cache, each with the token beside it
        self._wrong_every = wrong_every
        self.plans: list[StepPlan] = []

    def step(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        assert plan.hidden is not None
        assert plan.hidden.shape == (plan.num_tokens, HIDDEN_WIDTH)
        rows, made, tokens = iter(plan.hidden), [], []
        num_drafted = 0
        result = super().step(plan)
        for chunk in plan.chunks:
            size = self.info.block_size
            places = [chunk.block_table[place // size] * size + place % size for place in range(chunk.end)]
            for place, token in zip(places[chunk.start :], chunk.token_ids, strict=True):
                position, h = map(int, next(rows))
                self._read_rows[place] = position, h, token
                made.append((position + 1, fold([token], h)))
            _check_chain(self._read_rows[place] for place in places)
            if chunk.sample is not None:
                num_drafted += 1
                is_wrong = (self.num_steps + num_drafted) % self._wrong_every == 0
                tokens.append((made[-1][1] + is_wrong) % self.info.vocab_size)
        assert len(tokens) == len(result.tokens)
        return StepResult(tokens, result.log_probs, hidden=np.array(made, np.float32))


def _check_chain(rows: Iterable[tuple[int, int, int]]) -> None:
    before: tuple[int, int, int] | None = None
    for row in rows:
        if before is not None:
            position, h, token = before
            assert row[:2] == (position + 1, fold([token], h)), "the row before is of another sequence, or is missing"
        before = row
