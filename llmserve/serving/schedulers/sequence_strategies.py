"""Strategies that choose the next batch from the sequences on one instance: `direct` and `oldest`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.serving.schedulers.batching import BatchRule
from llmserve.serving.schedulers.queued_request import QueuedRequest
from llmserve.serving.schedulers.request_sequences import Slot


class Strategy(Protocol):
    @property
    def num_slots(self) -> int:
        """Number of sequences that an instance takes at the same time."""
        ...

    @property
    def keeps_places(self) -> bool:
        """Whether a request's place in the batch is its slot; slots without a request are then filled."""
        ...

    def choose(self, slots: Sequence[Slot], now_ns: int) -> tuple[list[QueuedRequest], int]:
        """The requests to run now, or none and the time until which it is worth waiting (0: for an event)."""
        ...


@dataclass(frozen=True, slots=True)
class Direct:
    """Every sequence has a fixed place in the batch. Requests whose shapes differ from the oldest one's wait."""

    num_slots: int
    max_delay_ns: int = 0
    min_utilization: float = 0.0

    @property
    def keeps_places(self) -> bool:
        return self.num_slots > 1

    def choose(self, slots: Sequence[Slot], now_ns: int) -> tuple[list[QueuedRequest], int]:
        ready = [queued for slot in slots if (queued := slot.next_request) is not None]
        if not ready:
            return [], 0
        oldest = min(ready, key=lambda queued: queued.arrival_ns)
        wait_until_ns = oldest.arrival_ns + self.max_delay_ns
        if len(ready) < self.min_utilization * len(slots) and now_ns < wait_until_ns:
            return [], wait_until_ns
        return [queued for queued in ready if queued.key == oldest.key], 0


@dataclass(frozen=True, slots=True)
class Oldest:
    """Dynamic batches of at most one request of each candidate sequence."""

    num_slots: int
    rule: BatchRule
    keeps_places: bool = False

    def choose(self, slots: Sequence[Slot], now_ns: int) -> tuple[list[QueuedRequest], int]:
        ready = [queued for slot in slots if (queued := slot.next_request) is not None]
        ready.sort(key=lambda queued: queued.arrival_ns)
        return self.rule.choose(ready, now_ns)


def make_strategy(config: ModelConfig) -> Strategy:
    batching = config.sequence_batching
    batch_size = max(1, config.max_batch_size)
    if batching.HasField("oldest"):
        return Oldest(batching.oldest.max_candidate_sequences or batch_size, BatchRule.from_config(config))
    direct = batching.direct
    return Direct(batch_size, direct.max_queue_delay_microseconds * 1000, direct.minimum_slot_utilization)
