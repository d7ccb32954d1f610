"""Chooses the requests of the next batch by the rules of `dynamic_batching`: arithmetic without a clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.serving.schedulers.queued_request import BatchKey, QueuedRequest
from llmserve.serving.signature import ModelSignature
from llmserve.serving.types import InferRequest


@dataclass(frozen=True, slots=True)
class BatchRule:
    """The batching rules of a model. `max_batch_size` 0: one request at a time, whatever its size."""

    max_batch_size: int = 0
    preferred_sizes: frozenset[int] = frozenset()
    max_delay_ns: int = 0

    @staticmethod
    def from_config(config: ModelConfig) -> BatchRule:
        """The rule in `dynamic_batching`, or in `sequence_batching` with the strategy `oldest`."""
        batching = config.dynamic_batching
        if config.HasField("sequence_batching"):
            batching = config.sequence_batching.oldest
        elif not config.HasField("dynamic_batching"):
            return BatchRule()
        return BatchRule(
            config.max_batch_size,
            frozenset(batching.preferred_batch_size),
            batching.max_queue_delay_microseconds * 1000,
        )

    def choose(self, waiting: Iterable[QueuedRequest], now_ns: int) -> tuple[list[QueuedRequest], int]:
        """The batch to run now, or an empty one and the time until which it is worth waiting.

        The candidates are the longest run of requests, from the front, that may share a batch. If they reach preferred
        sizes, a batch of the largest of these runs at once. If they exceed the largest preferred size without reaching
        any, the requests before that run. Otherwise all run when they cannot grow, or when the delay of the oldest is
        over.
        """
        if not self.max_batch_size:
            return list(islice(waiting, 1)), 0
        largest = max(self.preferred_sizes, default=self.max_batch_size)
        candidates: list[QueuedRequest] = []
        total = num_preferred = 0
        can_grow = True
        for queued in waiting:
            if candidates:
                if total + queued.batch_size > largest and not num_preferred:
                    num_preferred = len(candidates)
                if total + queued.batch_size > self.max_batch_size or queued.key != candidates[0].key:
                    can_grow = False
                    break
            candidates.append(queued)
            total += queued.batch_size
            if total in self.preferred_sizes:
                num_preferred = len(candidates)
            if total >= self.max_batch_size:
                break
        if not candidates:
            return [], 0
        late_ns = min(queued.arrival_ns for queued in candidates) + self.max_delay_ns
        is_late = self.max_delay_ns > 0 and now_ns >= late_ns
        if num_preferred and not is_late:
            return candidates[:num_preferred], 0
        if can_grow and total < largest and now_ns < late_ns:
            return [], late_ns
        return candidates, 0


def batch_key(signature: ModelSignature, request: InferRequest) -> BatchKey:
    """The names of the inputs, and their shapes without the batch dimension (for ragged inputs, no shape)."""
    shapes = [
        (name, () if signature.inputs[name].ragged else tensor.shape[1:]) for name, tensor in request.inputs.items()
    ]
    return tuple(sorted(shapes))
