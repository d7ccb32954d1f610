"""What a row more costs a step: it decides how likely a drafted token has to be. And whether looking for one pays."""

from __future__ import annotations

STEP_FORGETTING = 0.98  # what an older step weighs beside the next one
PRIOR_ROW_COST = 0.03  # of a step of no rows, until steps of several sizes have been measured
LEAST_ROW_COST = 0.01
LEAST_BASE = 0.01  # of the mean step: what a step of no rows takes at least
MAX_OUTLIER = 3.0  # times what the line says: a step that took longer was interrupted
CAUTION = 1.3  # times the measured cost: what is worth nothing on average is not tried
RELAXATION = 0.002  # of the way back, in each step
LOST = -0.5  # steps, lost by looking: then drafts are looked for in one step of LOOKS_EVERY only
LEAST_BALANCE, MOST_BALANCE = -0.52, 2.0  # steps: a token or two are enough to begin again
LOOKS_EVERY = 8


class StepCosts:
    """A step's time as a line over its rows, fitted to the steps of late in which every sequence decoded.

    While all of them have as many rows the line stays, and its slope goes back to `PRIOR_ROW_COST` little by little, so
    that a row that was too expensive once is tried again.
    """

    def __init__(self, rows_per_draft: float = 1.0) -> None:
        self._rows_per_draft = rows_per_draft
        self._base, self._slope = 0.0, 0.0  # seconds of a step, and of each row; 0: not known yet
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
        """Seconds of a step of no rows; 0: not known yet."""
        return self._base

    def threshold(self, num_rows: int, drafting: float = 0.0) -> float:
        """The probability above which a row more in a step of `num_rows` sequences brings more than it costs.
        `drafting`: what it costs to draft its token, as a part of a step of no rows."""
        row_cost = self._slope / self._base if self._base else PRIOR_ROW_COST
        cost = CAUTION * (row_cost * self._rows_per_draft + drafting) * num_rows
        return cost / (1 + cost)


class LookBalance:
    """What looking for drafts has been worth of late, in steps: those that accepted tokens saved, less the time that
    looking took. Beside many answers that repeat nothing, that is a hundredth of each step. What rows take is not
    counted: whoever drafts has weighed it, and one wrong draft would say more than many looks."""

    def __init__(self) -> None:
        self._balance = 0.0
        self._num_left_out = 0

    def begin_again(self) -> None:
        """For an answer with a guide or a prediction of its own: what others were worth says nothing of it."""
        self._balance = max(0.0, self._balance)

    def is_due(self) -> bool:
        """Whether to look in this step."""
        self._num_left_out += 1
        if self._balance < LOST and self._num_left_out < LOOKS_EVERY:
            return False
        self._num_left_out = 0
        return True

    def add(self, saved: float) -> None:
        """Of a step in which drafts were looked for."""
        self._balance = min(max(LEAST_BALANCE, self._balance + saved), MOST_BALANCE)
