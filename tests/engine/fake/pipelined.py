"""A fake runner that can begin a step before the last one's tokens are known, as a device can."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from llmserve.engine.base import RunnerInfo, StepResult
from llmserve.engine.fake import FakeRunner
from llmserve.scheduler.plan import UNSEEN, Chunk, StepPlan


class FakePendingStep:
    def __init__(self, runner: PipelinedFakeRunner, found: StepResult) -> None:
        self._runner = runner
        self._found = found

    def result(self) -> StepResult:
        assert self._runner.pending.pop(0) is self, "steps end in the order in which they were begun, each once"
        return self._found


class PipelinedFakeRunner(FakeRunner):
    """`num_ahead` steps were begun while another one was pending."""

    def __init__(self, info: RunnerInfo, *, step_delay_s: float = 0.0, fail_at_step: int | None = None) -> None:
        super().__init__(info, step_delay_s=step_delay_s, fail_at_step=fail_at_step)
        self.pending: list[FakePendingStep] = []
        self.num_ahead = 0
        self._chosen: Mapping[int, int] = {}  # by the last step

    def step(self, plan: StepPlan) -> StepResult:
        return self.launch(plan).result()

    def launch(self, plan: StepPlan) -> FakePendingStep:
        assert len(self.pending) < 2, "one step is under way, and one behind it"
        self.num_ahead += len(self.pending)
        seen = StepPlan(tuple(self._seen(chunk) for chunk in plan.chunks))
        found = super().step(seen)
        sampled = [chunk.sequence_id for chunk in plan.chunks for _ in range(chunk.num_samples)]
        self._chosen = dict(zip(sampled, found.tokens, strict=True))  # of a chunk's samples the last one
        self.pending.append(FakePendingStep(self, found))
        return self.pending[-1]

    def _seen(self, chunk: Chunk) -> Chunk:
        *before, last = chunk.token_ids
        assert UNSEEN not in before
        if last != UNSEEN:
            return chunk
        assert self.pending, "the tokens of a step that has ended are known"
        return replace(chunk, token_ids=[*before, self._chosen[chunk.sequence_id]])
