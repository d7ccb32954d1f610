"""A step that an in-flight engine has started, and its result."""

from __future__ import annotations

from typing import NamedTuple

from llmserve.engine.base import PendingStep, StepResult
from llmserve.scheduler.plan import StepPlan


class BegunStep(NamedTuple):
    plan: StepPlan
    pending: PendingStep


class DoneStep(NamedTuple):
    """The finished step of a runner that runs only one step at a time."""

    found: StepResult

    def result(self) -> StepResult:
        return self.found
