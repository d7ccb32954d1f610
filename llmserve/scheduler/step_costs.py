"""The cost of an additional row in a step, which decides what drafts are worth; and whether drafting pays at all."""

from __future__ import annotations

STEP_FORGETTING = 0.98  # weight of a step, relative to the next one
PRIOR_ROW_COST = 0.03  # fraction of `base`, until steps of several sizes have been measured
LEAST_ROW_COST = 0.01
LEAST_BASE = 0.01  # fraction of the mean step
MAX_OUTLIER = 3.0  # times the expected time: a step that took longer was interrupted
CAUTION = 1.3  # factor on the measured cost, so that drafts must gain something on average
RELAXATION = 0.002  # fraction of the difference, per step
LOST = -0.5  # steps lost by drafting: below this, only one step in LOOKS_EVERY drafts
LEAST_BALANCE, MOST_BALANCE = -0.52, 2.0  # steps: one or two accepted tokens suffice to start again
LOOKS_EVERY = 8


class StepCosts:
    """The time of a step as a line over its rows, fitted to recent steps in which every sequence decoded.

    While all steps have the same number of rows, the slope slowly returns to `PRIOR_ROW_COST`, so that drafts are tried
    again after they were too expensive.
    """

    def __init__(self, rows_per_draft: float = 1.0) -> None:
        self._rows_per_draft = rows_per_draft
        self._base, self._slope = 0.0, 0.0  # seconds per step and per row; 0: unknown
        self._weight = self._rows = self._seconds = self._rows_squared = self._rows_seconds = 0.0

    def observe(self, num_rows: int, seconds: float) -> None:
        if self._base:
            seconds = min(seconds, MAX_OUTLIER * (self._base + self._slope * num_rows))
        self._weight = STEP_FORGETTING * self._weight + 1
        self._rows = STEP_FORGETTING * self._rows + num_rows
        self._seconds = STEP_FORGETTING * self._seconds + seconds
        self._rows_squared = STEP_FORGETTING * self._rows_squared + num_rows * num_rows
        self._rows_seconds = STEP_FORGETTING * self._rows_seconds + num_rows * seconds
        spread = self._weight * self._rows_squared - self._rows * self._rows
        if spread <= self._weight * self._weight / 2:  # as good as one size
            self._slope += RELAXATION * (PRIOR_ROW_COST * self._base - self._slope)
            return
        slope = max(0.0, (self._weight * self._rows_seconds - self._rows * self._seconds) / spread)
        mean = self._seconds / self._weight
        self._base = max(LEAST_BASE * mean, mean - slope * self._rows / self._weight)
        self._slope = max(slope, LEAST_ROW_COST * self._base)

    @property
    def base(self) -> float:
        """Seconds of a step without rows (extrapolated); 0: unknown."""
        return self._base

    def threshold(self, num_rows: int, drafting: float = 0.0) -> float:
        """The probability above which a drafted token gains more than it costs, in a step of `num_rows` sequences.
        `drafting`: the cost of drafting it, as a fraction of `base`."""
        row_cost = self._slope / self._base if self._base else PRIOR_ROW_COST
        cost = CAUTION * (row_cost * self._rows_per_draft + drafting) * num_rows
        return cost / (1 + cost)


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
        self._balance = min(max(LEAST_BALANCE, self._balance + saved), MOST_BALANCE)
