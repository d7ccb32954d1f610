"""A step that an in-flight engine has begun, and what becomes of it."""

from __future__ import annotations

from typing import NamedTuple

from llmserve.engine.base import PendingStep, StepResult
from llmserve.scheduler.plan import StepPlan


class BegunStep(NamedTuple):
    plan: StepPlan
    pending: PendingStep


class DoneStep(NamedTuple):
    """A step of a runner that begins none before the last one has ended."""

    found: StepResult

    def result(self) -> StepResult:
        return self.found
