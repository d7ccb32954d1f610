"""The cost of additional rows in a step, which decides what drafts are worth; and whether drafting pays at all."""

from __future__ import annotations

from bisect import bisect_left
from typing import TypeAlias

RowTimes: TypeAlias = tuple[tuple[int, float], ...]  # numbers of rows, ascending, and times in any unit

STEP_FORGETTING = 0.98  # weight of a step, relative to the next one
LONGER = 0.1  # weight of a step that took longer than expected
PRIOR_TIMES: RowTimes = ((0, 1.0), (1, 1.03))  # if the engine has no times of its layers
PRIOR_SPREAD = 4.0  # rows, squared: the prior's weight, as the sum over steps of their difference from the mean
LEAST_BASE = 0.01  # of a step without rows, as a fraction of the mean step
LEAST_SLOPE = 0.01  # fraction of `base`
LEAST_MORE = 4  # rows that drafts may add together
LEAST_ROW_COST = 0.01  # fraction of a step
MAX_ERROR = 0.25  # of the expected time: steps further from it were interrupted, or those before them were
CAUTION = 1.3  # factor on the measured cost, so that drafts must gain something on average
RELAXATION = 0.002  # fraction of the difference, per step
LOST = -0.5  # steps lost by drafting: below this, only one step in LOOKS_EVERY drafts
LEAST_BALANCE, MOST_BALANCE = -0.52, 2.0  # steps: one or two accepted tokens suffice to start again
LOOKS_EVERY = 8
MOST_LOST = -0.25  # steps, by one of them: a draft model reads the prompt only once


class StepCosts:
    """The time of a step: a multiple of the times that the engine has measured for its layers, plus a constant, fitted
    to recent steps in which every sequence decoded. The constant is negative if rows cost more than these times say.

    These times are no line: instructions that compute many rows at once make some row counts cheap, and beyond a few
    rows each one costs as much as a sequence more. While all steps have the same number of rows, the constant slowly
    disappears, so that what was learned from interrupted steps does not last.

    On a busy machine, a step can take several times as long. That says nothing about rows, and a few such steps could
    make every draft seem too expensive. So steps that take longer than expected count little.
    """

    def __init__(self, rows_per_draft: float = 1.0, times: RowTimes = ()) -> None:
        """`times`: of all layers; empty: unknown."""
        self._rows_per_draft = rows_per_draft
        self._times = times or PRIOR_TIMES
        self._unit = _at(self._times, 1)
        self._base, self._slope = 0.0, 0.0  # seconds; 0: no step was observed
        self._mean, self._mean_units, self._weight, self._spread = 0.0, 0.0, 0.0, 0.0  # of steps; mean: seconds

    def observe(self, num_rows: int, seconds: float) -> None:
        units = self._units_of(num_rows)
        of_row = (self._units_of(num_rows + LEAST_MORE) - units) / LEAST_MORE
        if not self._slope:
            self._mean, self._mean_units = seconds, units
            self._slope, self._spread = seconds / units, PRIOR_SPREAD * of_row * of_row
        expected, more = self.seconds(num_rows), units - self._mean_units
        most = MAX_ERROR * expected
        error = min(seconds - expected, most)
        weight = LONGER if error > 0 else 1.0
        self._weight = STEP_FORGETTING * self._weight + weight
        self._mean += weight / self._weight * (expected + error - self._mean)
        self._mean_units += weight / self._weight * more
        if abs(more) > of_row / 2:
            self._spread = STEP_FORGETTING * self._spread + weight * more * more
            self._slope = max(0.0, self._slope + weight * more * max(error, -most) / self._spread)
        else:
            self._slope += RELAXATION * (self._mean / self._mean_units - self._slope)
        least = LEAST_BASE * self._mean - self._slope * self._units_of(0)
        self._base = max(least, self._mean - self._slope * self._mean_units)
        self._slope = max(self._slope, LEAST_SLOPE * self._base)

    def seconds(self, num_rows: int) -> float:
        """Of a step; 0: no step was observed."""
        return self._base + self._slope * self._units_of(num_rows)

    def threshold(self, num_rows: int, drafting: float = 0.0) -> float:
        """The probability above which a drafted token gains more than it costs, in a step of `num_rows` sequences;
        1: none does. `drafting`: the cost of drafting it, as a fraction of a step with one row."""
        num_more = max(LEAST_MORE, num_rows)
        slope = self._slope or 1.0
        now, then = (self._base + slope * self._units_of(count) for count in (num_rows, num_rows + num_more))
        of_row = max(LEAST_ROW_COST, (then - now) / num_more / now)
        if (least := CAUTION * self._rows_per_draft * of_row * num_rows) >= 1:
            return 1.0
        cost = least / (1 - least) + CAUTION * drafting * num_rows
        return cost / (1 + cost)

    def _units_of(self, num_rows: int) -> float:
        """The layers' time, relative to one row."""
        return _at(self._times, num_rows) / self._unit


def _at(times: RowTimes, num_rows: int) -> float:
    """The time of a number of rows: on a line between the nearest two that are known."""
    index = min(max(1, bisect_left(times, (num_rows,))), len(times) - 1)
    (first, begin), (last, end) = times[index - 1 : index + 1]
    return begin + (end - begin) * (num_rows - first) / (last - first)


class LookBalance:
    """The recent gain of drafting, in steps: steps saved by accepted tokens, minus the time spent on drafting. With
    many answers that repeat nothing, drafting takes a hundredth of each step. The cost of rows is not counted: drafters
    have weighed it, and one wrong draft would outweigh many steps."""

    def __init__(self) -> None:
        self._balance = 0.0
        self._num_left_out = 0

    def begin_again(self) -> None:
        """Start again for an answer with a guide or a predicted output, about which past answers say nothing."""
        self._balance = max(0.0, self._balance)

    def is_due(self) -> bool:
        """Whether to draft in this step."""
        self._num_left_out += 1
        if self._balance < LOST and self._num_left_out < LOOKS_EVERY:
            return False
        self._num_left_out = 0
        return True

    def add(self, saved: float) -> None:
        """Add the gain of a step that drafted."""
        self._balance = min(max(LEAST_BALANCE, self._balance + max(MOST_LOST, saved)), MOST_BALANCE)
