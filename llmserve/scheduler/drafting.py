"""What a sequence may go on with, and whether it is worth its rows."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from enum import Enum

GRAM = 3  # tokens that have to be the same before what followed them is drafted
INDEXED_AT_ONCE = 1024  # tokens, in a step
MAX_DRAFTED = 15  # of a sequence in a step
FORGETTING = 0.9  # what an older draft weighs beside the next one
RECOVERY = 0.97  # what rejected drafts weigh after each token that was not worth a draft: it is tried again
STEP_FORGETTING = 0.98  # as FORGETTING, of steps
PRIOR_ROW_COST = 0.03  # of a step of no rows, until steps of several sizes have been measured
LEAST_ROW_COST = 0.01
LEAST_BASE = 0.01  # of the mean step: what a step of no rows takes at least
MAX_OUTLIER = 3.0  # times what the line says: a step that took longer was interrupted
CAUTION = 1.3  # times the measured cost: what is worth nothing on average is not tried
RELAXATION = 0.002  # of the way back, in each step


class Speculation(Enum):
    OFF = "off"
    LOOKUP = "lookup"  # drafts come from the sequence's own tokens


class LookupDrafter:
    """Of one sequence: what followed the last time that its newest `GRAM` tokens stood in it. Constant time a token; a
    long prompt is read over several steps, for others wait for each of them."""

    def __init__(self) -> None:
        self._follows: dict[bytes, int] = {}  # tokens -> place of the one after their last occurrence
        self._num_indexed = GRAM
        self._num_accepted = 1.0
        self._num_rejected = 1.0

    def match(self, token_ids: array[int]) -> int | None:
        """Where the tokens stand that followed the newest ones the last time."""
        follows, end = self._follows, min(len(token_ids), self._num_indexed + INDEXED_AT_ONCE)
        for place in range(self._num_indexed, end):  # the newest ones themselves are not among them
            follows[token_ids[place - GRAM : place].tobytes()] = place
        self._num_indexed = max(self._num_indexed, end)
        return follows.get(token_ids[-GRAM:].tobytes())

    def draft(self, token_ids: array[int], place: int, limit: int, threshold: float) -> Sequence[int]:
        """At most `limit` tokens from `place` on, each likelier than `threshold` to be drawn, as far as is known."""
        if not (num_worthwhile := self._num_worthwhile(threshold)):
            self._num_rejected *= RECOVERY
        count = min(limit, MAX_DRAFTED, num_worthwhile)
        if count <= 0:
            return ()
        drafted = token_ids[place : place + count].tolist()
        period = len(drafted)  # it repeats itself
        while len(drafted) < count:
            drafted.append(drafted[-period])
        return drafted

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        self._num_accepted = FORGETTING * self._num_accepted + num_accepted
        self._num_rejected = FORGETTING * self._num_rejected + (num_accepted < num_drafted)

    def _num_worthwhile(self, threshold: float) -> int:
        """Token n of a draft is drawn with the n-th power of a token's probability."""
        probability = (self._num_accepted + 0.1) / (self._num_accepted + self._num_rejected + 0.1)
        return int(math.log(threshold) / math.log(probability)) if 0 < threshold < 1 and probability < 1 else 0


class StepCosts:
    """A step's time as a line over its rows, fitted to the steps of late in which every sequence decoded.

    While all of them have as many rows the line stays, and its slope goes back to `PRIOR_ROW_COST` little by little, so
    that a row that was too expensive once is tried again.
    """

    def __init__(self) -> None:
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

    def threshold(self, num_rows: int) -> float:
        """The probability above which a row more in a step of `num_rows` sequences brings more than it costs."""
        cost = CAUTION * (self._slope / self._base if self._base else PRIOR_ROW_COST) * num_rows
        return cost / (1 + cost)
