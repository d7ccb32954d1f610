"""Which waiting requests make the next batch: the rules of `dynamic_batching`, as arithmetic without a clock."""

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
    """`max_batch_size` 0: one request at a time, whatever its size."""

    max_batch_size: int = 0
    preferred_sizes: frozenset[int] = frozenset()
    max_delay_ns: int = 0

    @staticmethod
    def from_config(config: ModelConfig) -> BatchRule:
        """Of `dynamic_batching`, or of `sequence_batching` with the strategy `oldest`."""
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

        The candidates are the longest run of requests, from the front, that may share a batch. They go when they cannot
        grow, when they reach the largest preferred size, or when the first has waited for the delay; then at the
        largest preferred size that they reach; all of them when there is none or the delay is over.
        """
        if not self.max_batch_size:
            return list(islice(waiting, 1)), 0
        candidates: list[QueuedRequest] = []
        total = num_preferred = preferred_total = 0
        can_grow = True
        for queued in waiting:
            if candidates and (total + queued.batch_size > self.max_batch_size or queued.key != candidates[0].key):
                can_grow = False
                break
            candidates.append(queued)
            total += queued.batch_size
            if total in self.preferred_sizes:
                num_preferred, preferred_total = len(candidates), total
            if total >= self.max_batch_size:
                can_grow = False
                break
        if not candidates:
            return [], 0
        oldest_ns = min(queued.arrival_ns for queued in candidates)
        complete = bool(preferred_total) and preferred_total == max(self.preferred_sizes)
        if can_grow and not complete and now_ns < oldest_ns + self.max_delay_ns:
            return [], oldest_ns + self.max_delay_ns
        is_late = self.max_delay_ns > 0 and now_ns >= oldest_ns + self.max_delay_ns
        return candidates if is_late else candidates[: num_preferred or len(candidates)], 0


def batch_key(signature: ModelSignature, request: InferRequest) -> BatchKey:
    """Which inputs are there, and their shapes without the batch dimension (any shape for ragged ones)."""
    shapes = [
        (name, () if signature.inputs[name].ragged else tensor.shape[1:]) for name, tensor in request.inputs.items()
    ]
    return tuple(sorted(shapes))
