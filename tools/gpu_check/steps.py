"""A step of the check, its result, and the order of steps. A failed step does not stop the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

Details: TypeAlias = Mapping[str, Any]  # for the report


class State(Enum):
    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class Result:
    state: State
    seconds: float
    reason: str = ""  # why it did not pass
    details: Details = field(default_factory=dict)


class StepFailed(Exception):
    def __init__(self, reason: str, details: Details | None = None) -> None:
        super().__init__(reason)
        self.details = details or {}


class NotRun(Exception):
    """A requirement of the step is missing."""


NOT_REACHED = "not begun yet"


def run_steps(
    steps: Mapping[str, Callable[[], Details]],
    say: Callable[[str], None],
    *,
    earlier: Mapping[str, Result] | None = None,
    chosen: Collection[str] | None = None,
    record: Callable[[Mapping[str, Result]], None] = lambda results: None,
    is_time: Callable[[], bool] = lambda: True,
) -> Mapping[str, Result]:
    """`earlier`: results of an earlier run, of which those that passed are kept; `chosen`: only these, None: all.

    `is_time`: to begin another. `record` gets the results of all steps before the first one and after each.
    """
    before = earlier or {}
    results = {name: before.get(name, Result(State.NOT_RUN, 0.0, NOT_REACHED)) for name in steps}
    record(results)
    for name, step in steps.items():
        if results[name].state is State.PASSED or (chosen is not None and name not in chosen):
            continue
        if not is_time():
            break
        say(f"== {name}")
        result = results[name] = _run(step)
        record(results)
        say(f"   {result.state.value} ({result.seconds:.1f} s){_indented(result.reason)}")
    return results


def _run(step: Callable[[], Details]) -> Result:
    started = time.monotonic()

    def result(state: State, reason: str = "", details: Details | None = None) -> Result:
        return Result(state, time.monotonic() - started, reason, details or {})

    try:
        return result(State.PASSED, details=step())
    except StepFailed as failure:
        return result(State.FAILED, str(failure), failure.details)
    except NotRun as missing:
        return result(State.NOT_RUN, str(missing))
    except Exception as error:  # border: the report is written, whatever error an unknown machine causes
        return result(State.FAILED, f"{type(error).__name__}: {error}")


def _indented(reason: str) -> str:
    return "".join(f"\n   {line}" for line in reason.splitlines())
