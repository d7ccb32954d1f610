"""The response cache: what is a hit, what goes first when it is full, how it is counted, who may not use it."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmserve.errors import InternalError, InvalidArgument
from llmserve.serving.schedulers.response_cache import ENTRY_BYTES, ResponseCache, parse_cache_config, response_key
from llmserve.serving.types import InferResponse, Tensor
from tests.serving.models import collect, floats, identity_config, request, serving, single, values, write_model

COUNTING = """
class TritonPythonModel:
    calls = 0
    def execute(self, requests):
        self.calls += 1
        x = requests[0].inputs()[0].as_numpy()
        if x[0] < 0:
            return [pb_utils.InferenceResponse(error=pb_utils.TritonError("negative"))]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", x * 0 + self.calls)])]
"""
CACHED = identity_config("response_cache { enable: true }").replace("identity", "python")


def answer(size: int) -> InferResponse:
    return InferResponse("m", "1", outputs=(Tensor("Y", "INT8", np.zeros(size, np.int8)),), final=True)


async def test_same_inputs_are_computed_once(tmp_path: Path) -> None:
    write_model(tmp_path, "m", CACHED, COUNTING)
    async with serving(tmp_path, cache_bytes=1 << 16) as core:
        first = await single(core, request("m", floats(1), request_id="a"))
        again = await single(core, request("m", floats(1), request_id="b", parameters={"other": 1}))
        assert (values(first), values(again)) == ([1], [1])
        assert (first.request_id, again.request_id, again.final) == ("a", "b", True)
        assert values(await single(core, request("m", floats(2)))) == [2]
        (statistics,) = core.statistics("m")
    counted = statistics.inference_stats
    assert (counted.cache_hit.count, counted.cache_miss.count, counted.success.count) == (1, 2, 3)
    assert counted.cache_hit.ns > 0
    assert (statistics.inference_count, counted.compute_infer.count) == (2, 2)


async def test_errors_are_not_kept(tmp_path: Path) -> None:
    write_model(tmp_path, "m", CACHED, COUNTING)
    async with serving(tmp_path, cache_bytes=1 << 16) as core:
        for _ in range(2):
            with pytest.raises(InternalError, match="negative"):
                await single(core, request("m", floats(-1)))
        counted = core.statistics("m")[0].inference_stats
    assert (counted.fail.count, counted.cache_hit.count) == (2, 0)


async def test_cached_answers_cannot_be_changed_from_outside(tmp_path: Path) -> None:
    write_model(tmp_path, "m", identity_config("response_cache { enable: true }"))
    data = np.array([1], np.float32)
    async with serving(tmp_path, cache_bytes=1 << 16) as core:
        await single(core, request("m", Tensor("X", "FP32", data)))  # the answer is the request's own array
        data[0] = 5
        assert values(await single(core, request("m", floats(1)))) == [1]


async def test_ensembles_and_batches_can_be_cached(tmp_path: Path) -> None:
    write_model(tmp_path, "m", identity_config("max_batch_size: 4"))
    step = 'step { model_name: "m" input_map { key: "X" value: "X" } output_map { key: "Y" value: "Y" } }'
    config = identity_config(f"max_batch_size: 4 ensemble_scheduling {{ {step} }} response_cache {{ enable: true }}")
    write_model(tmp_path, "ens", config.replace('backend: "identity"', 'platform: "ensemble"'))
    rows = Tensor("X", "FP32", np.array([[1], [2]], np.float32))
    async with serving(tmp_path, cache_bytes=1 << 16) as core:
        for _ in range(2):
            assert values(await single(core, request("ens", rows))) == [[1], [2]]
        assert core.statistics("ens")[0].inference_count == 2
        assert core.statistics("m")[0].inference_count == 2


async def test_without_a_cache_it_is_said_and_everything_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_model(tmp_path, "m", CACHED, COUNTING)
    with caplog.at_level(logging.WARNING):
        async with serving(tmp_path) as core:
            await collect(core, request("m", floats(1)))
            assert values(await single(core, request("m", floats(1)))) == [2]
    assert [line for line in caplog.messages if "response_cache has no effect: start the server with" in line]


async def test_decoupled_models_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path, "m", CACHED + "model_transaction_policy { decoupled: true }", COUNTING)
    async with serving(tmp_path, cache_bytes=1 << 16) as core:
        (row,) = core.repository_index()
    assert "response_cache: a decoupled model's responses cannot be cached" in row.reason


def test_least_recently_used_answers_go_first() -> None:
    cache = ResponseCache(2 * (ENTRY_BYTES + 10))
    cache.insert(b"a", answer(10))
    cache.insert(b"b", answer(10))
    assert cache.utilization == 1
    assert cache.lookup(b"a") is not None
    cache.insert(b"c", answer(10))
    assert [cache.lookup(key) is not None for key in (b"a", b"b", b"c")] == [True, False, True]
    counters = cache.counters
    assert (counters.num_lookups, counters.num_hits, counters.num_misses, counters.num_evictions) == (4, 3, 1, 1)


def test_answer_that_is_larger_than_the_cache_pushes_nothing_out() -> None:
    cache = ResponseCache(1000)
    cache.insert(b"a", answer(10))
    cache.insert(b"b", answer(1000))
    assert (len(cache), cache.counters.num_evictions) == (1, 0)


def test_models_are_forgotten() -> None:
    cache = ResponseCache(10000)
    for key in (b"1a", b"1b", b"2a"):
        cache.insert(key, answer(1))
    cache.drop_model(b"1")
    assert (len(cache), cache.num_bytes) == (1, ENTRY_BYTES + 1)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2000)), max_size=40))
def test_bytes_are_never_more_than_allowed_and_always_those_of_the_entries(steps: list[tuple[int, int]]) -> None:
    cache = ResponseCache(3000)
    for key, size in steps:
        cache.insert(bytes([key]), answer(size))
        kept = [found.outputs[0].data.nbytes for i in range(6) if (found := cache.lookup(bytes([i]))) is not None]
        assert cache.num_bytes == sum(kept) + ENTRY_BYTES * len(kept) <= 3000


def test_what_makes_a_request_another_one() -> None:
    def texts(*given: bytes) -> Tensor:
        return Tensor("T", "BYTES", np.array(given, np.object_))

    requests = [
        request("m", floats(1)),
        request("m", floats(1, name="Z")),
        request("m", floats(1, 2)),
        request("m", Tensor("X", "FP32", np.array([[1, 2]], np.float32))),
        request("m", Tensor("X", "INT32", np.array([1], np.float32).view(np.int32))),
        request("m", floats(1), requested_outputs=("Y",)),
        request("m", floats(1), needed_outputs=("Y",)),
        request("m", texts(b"ab", b"c")),
        request("m", texts(b"a", b"bc")),
        request("m", Tensor("X", "FP32", np.zeros((0, 3), np.float32))),
    ]
    assert len({response_key(b"p", one) for one in requests}) == len(requests)
    assert response_key(b"p", requests[0]) != response_key(b"q", requests[0])
    ordered = [request("m", floats(1), floats(2, name="Z")), request("m", floats(2, name="Z"), floats(1))]
    assert response_key(b"p", ordered[0]) == response_key(b"p", ordered[1])


def test_cache_flag() -> None:
    assert parse_cache_config("local,size=1048576") == 1048576
    for wrong, problem in (("redis,host=x", "unknown cache 'redis'"), ("local", "expected local,size=BYTES"),
                           ("local,size=-1", "expected"), ("local,size=0", "expected")):  # fmt: skip
        with pytest.raises(InvalidArgument, match=problem):
            parse_cache_config(wrong)
