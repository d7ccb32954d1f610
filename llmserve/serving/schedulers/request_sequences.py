"""Sequences and the slots of instances that they hold: bookkeeping without a clock or a loop.

A sequence is known by its tenant and its correlation ID from its START to its END. It holds one slot of one instance
all that time. If no slot is free, it waits in the backlog with its requests, in order of arrival.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from llmserve.serving.schedulers.queued_request import QueuedRequest
from llmserve.serving.types import Tensor

SequenceKey: TypeAlias = tuple[str, int | str]  # tenant, correlation ID


@dataclass(slots=True, eq=False)
class Slot:
    instance: int  # its number
    number: int  # which of its slots
    sequence: RequestSequence | None = None

    @property
    def next_request(self) -> QueuedRequest | None:
        """The request that may run now: the first of the sequence, if none of its requests is running."""
        sequence = self.sequence
        if sequence is None or sequence.running is not None or not sequence.waiting:
            return None
        return sequence.waiting[0]


@dataclass(slots=True, eq=False)
class RequestSequence:
    key: SequenceKey
    waiting: deque[QueuedRequest] = field(default_factory=deque)
    running: QueuedRequest | None = None
    is_open: bool = True  # more requests may come
    slot: Slot | None = None
    state: dict[str, Tensor] = field(default_factory=dict)
    idle_timer: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        return not self.waiting and self.running is None


class SequenceTable:
    def __init__(self, num_instances: int, slots_per_instance: int) -> None:
        self.instances = [
            [Slot(instance, number) for number in range(slots_per_instance)] for instance in range(num_instances)
        ]
        self._open: dict[SequenceKey, RequestSequence] = {}
        self._backlog: dict[RequestSequence, None] = {}

    def __iter__(self) -> Iterator[RequestSequence]:
        """All sequences that are open or have requests."""
        for slots in self.instances:
            yield from (slot.sequence for slot in slots if slot.sequence is not None)
        yield from self._backlog

    def find(self, key: SequenceKey) -> RequestSequence | None:
        """The open sequence with this key."""
        return self._open.get(key)

    def open(self, key: SequenceKey) -> RequestSequence:
        """A new sequence, without a slot."""
        sequence = self._open[key] = RequestSequence(key)
        self._backlog[sequence] = None
        return sequence

    def close(self, sequence: RequestSequence) -> None:
        """Close the sequence: no more requests are added."""
        if sequence.is_open:
            sequence.is_open = False
            del self._open[sequence.key]

    def release(self, sequence: RequestSequence) -> None:
        """Free the slot of a sequence that is over: nothing waits and nothing will come."""
        self._backlog.pop(sequence, None)
        if sequence.slot is not None:
            sequence.slot.sequence = None
            sequence.slot = None

    def fill_slots(self, is_usable: Callable[[int], bool]) -> list[Slot]:
        """Give free slots of usable instances to the sequences that have waited longest. Returns the slots taken.

        Low slot numbers come first, so that sequences spread over the instances and batches have few holes.
        """
        if not self._backlog:
            return []
        free = [
            slot for slots in self.instances for slot in slots if slot.sequence is None and is_usable(slot.instance)
        ]
        free.sort(key=lambda slot: slot.number)
        taken = []
        for slot, sequence in zip(free, list(self._backlog), strict=False):
            del self._backlog[sequence]
            slot.sequence, sequence.slot = sequence, slot
            taken.append(slot)
        return taken
