"""The requests that wait for an instance, in the order in which they will run.

Lower priority numbers run first; within a level, requests run in order of arrival. A request that timed out under the
DELAY action runs after the others of its level.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tritonclient.grpc.model_config_pb2 import ModelDynamicBatching, ModelQueuePolicy

from llmserve.serving.schedulers.queued_request import QueuedRequest
from llmserve.serving.types import InferRequest


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    max_size: int = 0  # 0: unlimited
    timeout_us: int = 0  # 0: none
    delays: bool = False  # on timeout, run it late instead of refusing it
    allows_override: bool = False  # a request may shorten its timeout

    @staticmethod
    def from_config(policy: ModelQueuePolicy) -> QueuePolicy:
        return QueuePolicy(
            max_size=policy.max_queue_size,
            timeout_us=policy.default_timeout_microseconds,
            delays=policy.timeout_action == ModelQueuePolicy.DELAY,
            allows_override=policy.allow_timeout_override,
        )

    def timeout_of(self, request: InferRequest) -> int:
        """Microseconds that the request may wait; 0: no limit."""
        if not self.allows_override or not request.timeout_us:
            return self.timeout_us
        return min(self.timeout_us, request.timeout_us)


@dataclass(frozen=True, slots=True)
class QueuePolicies:
    """The policy of each priority level."""

    num_levels: int = 1
    default_level: int = 1
    default: QueuePolicy = QueuePolicy()
    by_level: Mapping[int, QueuePolicy] = field(default_factory=dict)

    @staticmethod
    def from_config(batching: ModelDynamicBatching) -> QueuePolicies:
        return QueuePolicies(
            num_levels=max(1, batching.priority_levels),
            default_level=max(1, batching.default_priority_level),
            default=QueuePolicy.from_config(batching.default_queue_policy),
            by_level={
                level: QueuePolicy.from_config(policy) for level, policy in batching.priority_queue_policy.items()
            },
        )

    def level_of(self, request: InferRequest) -> int:
        return request.priority if 1 <= request.priority <= self.num_levels else self.default_level

    def policy(self, level: int) -> QueuePolicy:
        return self.by_level.get(level, self.default)


@dataclass(frozen=True, slots=True)
class _Level:
    waiting: dict[QueuedRequest, None] = field(default_factory=dict)
    delayed: dict[QueuedRequest, None] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.waiting) + len(self.delayed)


class RequestQueue:
    """The waiting requests by level. Only levels in use take memory: a config may have 2 ** 64 of them."""

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}
        self._order: list[int] = []  # the keys of _levels
        self.num_waiting = 0  # of all levels

    def __len__(self) -> int:
        return self.num_waiting

    def __iter__(self) -> Iterator[QueuedRequest]:
        for number in self._order:
            level = self._levels[number]
            yield from level.waiting
            yield from level.delayed

    def size(self, level: int) -> int:
        return len(self._levels.get(level, ()))

    def put(self, queued: QueuedRequest) -> None:
        if queued.level not in self._levels:
            self._levels[queued.level] = _Level()
            insort(self._order, queued.level)
        self._levels[queued.level].waiting[queued] = None
        self.num_waiting += 1

    def delay(self, queued: QueuedRequest) -> None:
        """Put a waiting request behind the others of its level."""
        level = self._levels[queued.level]
        del level.waiting[queued]
        level.delayed[queued] = None

    def discard(self, queued: QueuedRequest) -> None:
        if (level := self._levels.get(queued.level)) is None:
            return
        for requests in (level.waiting, level.delayed):
            if queued in requests:
                del requests[queued]
                self.num_waiting -= 1
        if not level:
            del self._levels[queued.level]
            self._order.remove(queued.level)
