"""The rules by which waiting requests become a batch."""

from __future__ import annotations

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.serving.instruments.model_statistics import RequestTiming
from llmserve.serving.schedulers.batching import BatchRule, batch_key
from llmserve.serving.schedulers.queued_request import QueuedRequest
from llmserve.serving.schedulers.request_queue import QueuePolicies, QueuePolicy, RequestQueue
from llmserve.serving.signature import ModelSignature
from llmserve.serving.types import Tensor
from tests.serving.models import floats, request, tensors

DELAY_NS = 100


def queued(size: int = 1, key: str = "", arrival_ns: int = 0, level: int = 1) -> QueuedRequest:
    return QueuedRequest(request("m", floats(1)), RequestTiming(), level, size, ((key, ()),), arrival_ns)


@pytest.mark.parametrize(
    ("preferred", "sizes", "now_ns", "chosen"),
    [
        ((4,), [1] * 3, 0, 0),  # waits for the fourth
        ((4,), [1] * 3, DELAY_NS, 3),  # no longer
        ((4,), [1] * 4, 0, 4),
        ((4,), [1] * 6, 0, 4),
        ((2, 4), [1] * 3, 0, 2),  # any preferred size that is reached goes at once
        ((2, 4), [1] * 5, 0, 4),  # the largest of them first
        ((4, 8), [1] * 4, 0, 4),
        ((4, 8), [2, 3], 0, 0),  # 4 is stepped over, 8 is not
        ((2, 4), [1] * 3, DELAY_NS, 3),  # late, and all of them go
        ((), [1] * 7, 0, 0),
        ((), [1] * 8, 0, 8),
        ((), [1] * 9, 0, 8),
        ((), [3, 3, 3], 0, 2),  # a third does not fit
        ((4,), [3, 3], 0, 1),  # the second steps over the largest, and 3 will not become 4
        ((4,), [3, 3], DELAY_NS, 2),
        ((4,), [5], 0, 1),
        ((), [], 0, 0),
    ],
)
def test_size_of_the_next_batch(preferred: tuple[int, ...], sizes: list[int], now_ns: int, chosen: int) -> None:
    rule = BatchRule(8, frozenset(preferred), DELAY_NS)
    batch, wait_until_ns = rule.choose([queued(size) for size in sizes], now_ns)
    assert len(batch) == chosen
    assert wait_until_ns == (DELAY_NS if sizes and not chosen else 0)


def test_without_delay_what_is_there_goes() -> None:
    assert len(BatchRule(8, frozenset({4})).choose([queued()] * 3, 0)[0]) == 3


def test_different_shapes_do_not_mix() -> None:
    waiting = [queued(key="a"), queued(key="a"), queued(key="b"), queued(key="a")]
    assert BatchRule(8, max_delay_ns=DELAY_NS).choose(waiting, 0)[0] == waiting[:2]


def test_direct_takes_one_request_of_any_size() -> None:
    waiting = [queued(5), queued(1)]
    assert BatchRule().choose(waiting, 0)[0] == waiting[:1]


def test_key_ignores_the_batch_dimension_and_ragged_shapes() -> None:
    declared = 'name: "m" max_batch_size: 8\n' + tensors(
        "input", A="FP32 [ -1 ]", R="FP32 [ -1 ] allow_ragged_batch: true", O="FP32 [ -1 ] optional: true"
    )
    signature = ModelSignature(text_format.Parse(declared, ModelConfig()))

    def key(**widths: int) -> object:
        given = [Tensor(name, "FP32", np.zeros((2, width), np.float32)) for name, width in widths.items()]
        return batch_key(signature, request("m", *given))

    assert key(A=1, R=1) == key(R=7, A=1)
    assert key(A=1, R=1) != key(A=2, R=1)
    assert key(A=1, R=1) != key(A=1, R=1, O=1)


def test_queue_runs_higher_levels_first_and_late_ones_last() -> None:
    queue = RequestQueue()
    low, first, second = queued(level=2), queued(level=1), queued(level=1)
    for waiting in (low, first, second):
        queue.put(waiting)
    queue.delay(first)
    assert list(queue) == [second, first, low]
    assert (queue.size(1), queue.size(2), len(queue)) == (2, 1, 3)
    queue.discard(first)
    queue.discard(first)
    assert list(queue) == [second, low]
    queue.discard(second)
    queue.discard(second)
    assert (list(queue), queue.size(1), queue.size(2), len(queue)) == ([low], 0, 1, 1)


@pytest.mark.parametrize(
    ("policy", "timeout_us", "expected"),
    [
        (QueuePolicy(timeout_us=100), 5, 100),
        (QueuePolicy(timeout_us=100, allows_override=True), 5, 5),
        (QueuePolicy(timeout_us=100, allows_override=True), 500, 100),
        (QueuePolicy(allows_override=True), 500, 0),  # there is nothing to shorten
        (QueuePolicy(allows_override=True), 0, 0),
    ],
)
def test_a_request_may_only_shorten_its_timeout(policy: QueuePolicy, timeout_us: int, expected: int) -> None:
    assert policy.timeout_of(request("m", floats(1), timeout_us=timeout_us)) == expected


@pytest.mark.parametrize(("priority", "level"), [(0, 2), (1, 1), (3, 3), (4, 2)])
def test_priority_levels(priority: int, level: int) -> None:
    assert QueuePolicies(3, 2).level_of(request("m", floats(1), priority=priority)) == level
