"""Sequences and the slots of instances that they hold: bookkeeping without a clock or a loop.

A sequence is known by its correlation ID from its START to its END. It holds one slot of one instance all that time;
when none is free it waits in the backlog, first come first served, and its requests with it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from llmserve.serving.schedulers.tickets import Ticket
from llmserve.serving.types import Tensor


@dataclass(slots=True, eq=False)
class Slot:
    lane: int  # which instance
    number: int  # which of its slots
    sequence: Sequence | None = None

    @property
    def next_ticket(self) -> Ticket | None:
        """The request that may run now: the sequence's first, when none of it is running."""
        sequence = self.sequence
        if sequence is None or sequence.running is not None or not sequence.waiting:
            return None
        return sequence.waiting[0]


@dataclass(slots=True, eq=False)
class Sequence:
    sequence_id: int | str
    waiting: deque[Ticket] = field(default_factory=deque)
    running: Ticket | None = None
    is_open: bool = True  # more requests may come
    slot: Slot | None = None
    state: dict[str, Tensor] = field(default_factory=dict)
    idle_timer: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        return not self.waiting and self.running is None


class SequenceTable:
    def __init__(self, num_lanes: int, slots_per_lane: int) -> None:
        self.lanes = [[Slot(lane, number) for number in range(slots_per_lane)] for lane in range(num_lanes)]
        self._open: dict[int | str, Sequence] = {}
        self._backlog: dict[Sequence, None] = {}

    def __iter__(self) -> Iterator[Sequence]:
        """All that are open or have requests."""
        for slots in self.lanes:
            yield from (slot.sequence for slot in slots if slot.sequence is not None)
        yield from self._backlog

    def find(self, sequence_id: int | str) -> Sequence | None:
        """One that is open."""
        return self._open.get(sequence_id)

    def open(self, sequence_id: int | str) -> Sequence:
        """A new sequence, without a slot."""
        sequence = self._open[sequence_id] = Sequence(sequence_id)
        self._backlog[sequence] = None
        return sequence

    def close(self, sequence: Sequence) -> None:
        """No request will be added."""
        if sequence.is_open:
            sequence.is_open = False
            del self._open[sequence.sequence_id]

    def release(self, sequence: Sequence) -> None:
        """It is over: nothing waits and nothing will come."""
        self._backlog.pop(sequence, None)
        if sequence.slot is not None:
            sequence.slot.sequence = None
            sequence.slot = None

    def fill_slots(self, is_usable: Callable[[int], bool]) -> list[Slot]:
        """Give free slots of usable lanes to the sequences that have waited longest; the slots that were taken.

        Low numbers first, so that sequences spread over the lanes and batches have few holes.
        """
        if not self._backlog:
            return []
        free = [slot for slots in self.lanes for slot in slots if slot.sequence is None and is_usable(slot.lane)]
        free.sort(key=lambda slot: slot.number)
        taken = []
        for slot, sequence in zip(free, list(self._backlog), strict=False):
            del self._backlog[sequence]
            slot.sequence, sequence.slot = sequence, slot
            taken.append(slot)
        return taken
