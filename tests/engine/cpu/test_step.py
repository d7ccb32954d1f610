"""A plan as arrays: what the C++ side reads at the addresses of the record."""

from __future__ import annotations

import ctypes
import itertools
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from llmserve.core import GenerateRequest, SamplingParams
from llmserve.engine.native import step as step_module
from llmserve.engine.native.records import CHUNK
from llmserve.engine.native.step import NO_MASK, FlatStep, StepMemory
from llmserve.scheduler.plan import Chunk, SampleRequest, StepPlan
from llmserve.scheduler.sequence import sequences_for

VOCAB = 50
PARAMS = SamplingParams(repetition_penalty=1.5, temperature=0.0)


def ids_at(address: int, count: int) -> list[int]:
    return list((ctypes.c_int32 * count).from_address(address))


def sample_ids(flat: FlatStep) -> list[tuple[list[int], list[tuple[int, float]], list[int]]]:
    """History, bias and banned ids of every sample."""
    record = flat.record
    ids = ids_at(record.sample_ids, record.num_sample_ids)
    found = []
    for index in range(record.num_samples):
        sample = flat.samples[index]
        history, biased, banned = (
            range(sample[f"{name}_begin"], sample[f"{name}_end"]) for name in ("history", "bias", "banned")
        )
        biases = [ctypes.c_float.from_address(record.bias_values + 4 * i).value for i in biased]
        bias = list(zip([ids[i] for i in biased], biases, strict=True))
        found.append(([ids[i] for i in history], bias, [ids[i] for i in banned]))
    return found


def plan(*samples: tuple[Sequence[int], Sequence[tuple[int, float]], Sequence[int]]) -> StepPlan:
    return StepPlan(
        tuple(
            Chunk(i, (i,), 3, (2 * i, 2 * i + 1), SampleRequest(PARAMS, 0, 4, history, 1, bias, banned))
            for i, (history, bias, banned) in enumerate(samples)
        )
    )


def test_ids_of_samples_in_room_that_is_used_again() -> None:
    room = StepMemory()
    steps = [
        plan(((1, 2), ((7, 0.5),), (3,)), ((), (), ()), (array("i", [4, 5, 6]), (), (VOCAB, 9, -1))),
        plan((array("i", range(40)), ((1, 1.0), (2, -1.0)), (8, 9)), ((3,), ((0, 0.25),), ())),
        plan(((9,), (), ())),
    ]
    wanted = [
        [([1, 2], [(7, 0.5)], [3]), ([], [], []), ([4, 5, 6], [], [9])],
        [(list(range(40)), [(1, 1.0), (2, -1.0)], [8, 9]), ([3], [(0, 0.25)], [])],
        [([9], [], [])],
    ]
    for step, ids in zip(steps, wanted, strict=True):
        assert sample_ids(FlatStep(step, VOCAB, room)) == ids


def test_what_a_request_decides_is_packed_once_and_as_the_kernel_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = []
    pack = step_module._packed_draw

    def noting(*given: Any) -> Any:
        packed.append(given)
        return pack(*given)

    monkeypatch.setattr(step_module, "_packed_draw", noting)
    monkeypatch.setattr(step_module, "MAX_KNOWN_DRAWS", 3)
    memory = StepMemory()
    requests = [SamplingParams(top_k=1000 + i, temperature=0.5, top_p=0.25, seed=i) for i in range(3)]
    for position in (7, 8):
        samples = [SampleRequest(params, i, position, log_prob=i == 1) for i, params in enumerate(requests)]
        chunks = tuple(Chunk(i, (i,), 3, (i,), sample) for i, sample in enumerate(samples))
        flat = FlatStep(StepPlan(chunks), VOCAB, memory)
        wanted = {"position": position, "top_k": VOCAB, "temperature": 0.5, "top_p": 0.25, "repetition_penalty": 1.0}
        wanted |= dict.fromkeys(("min_p", "presence_penalty", "frequency_penalty", "num_top", "first_top"), 0)
        for i, sample in enumerate(flat.samples):
            own = {"seed": i, "stream": i, "selected": i, "want_log_prob": int(i == 1), "first_mask": NO_MASK}
            assert {name: sample[name] for name in (*wanted, *own)} == wanted | own
    assert len(packed) == 3
    another = StepPlan((Chunk(0, (1,), 3, (0,), SampleRequest(SamplingParams(), 0, 4)),))
    FlatStep(another, VOCAB, memory)
    assert len(memory._draws) == 1  # those before are forgotten: nothing grows
    FlatStep(another, VOCAB - 1, memory)
    assert len(packed) == 5


def test_chunks_and_rows() -> None:
    chunks = (
        Chunk(0, [5, 6, 7], 2, [3, 1]),
        Chunk(1, array("i", [8]), 0, array("i", [4]), SampleRequest(PARAMS, 0, 1), states=(3, 2), second_segment=9),
        Chunk(2, [9, 10], 4, [0, 2], SampleRequest(PARAMS, 0, 6), return_logits=True, kept_state=(7, 1), adapter=7),
    )
    flat = FlatStep(StepPlan(chunks), VOCAB, StepMemory())
    record = flat.record
    assert ids_at(record.token_ids, record.num_tokens) == [5, 6, 7, 8, 9, 10]
    assert ids_at(record.block_ids, record.num_block_ids) == [3, 1, 4, 0, 2]
    assert ids_at(record.selected_rows, record.num_selected) == [3, 4, 5]
    records = np.frombuffer(ctypes.string_at(record.chunks, record.num_chunks * CHUNK.itemsize), CHUNK)
    wanted = {"first_token": [0, 3, 4], "num_tokens": [3, 1, 2], "start": [2, 0, 4]}
    wanted |= {"first_block": [0, 2, 3], "num_blocks": [2, 1, 2], "state_before": [0, 3, 0], "state_after": [0, 2, 0]}
    wanted |= {"state_kept": [0, 0, 7], "num_kept": [0, 0, 1], "second_segment": [0, 9, 0], "adapter": [0, 0, 7]}
    assert {name: records[name].tolist() for name in CHUNK.names or ()} == wanted
    assert flat.samples["selected"].tolist() == [0, 2]
    result = flat.result()
    assert (result.tokens, {i: x.shape for i, x in result.logits.items()}) == ([0, 0], {2: (2, VOCAB)})


def test_a_sequence_hands_out_its_ids_as_memory() -> None:
    """Lists would be looked at number by number in every step: milliseconds with long histories."""
    request = GenerateRequest("r", tuple(range(40)), PARAMS)
    sequence = sequences_for(request, itertools.count(), max_seq_len=99, arrival_ns=0)[0]
    chunk = sequence.chunk(40)
    assert chunk.sample is not None
    kinds = [type(ids) for ids in (chunk.token_ids, chunk.block_table, chunk.sample.history)]
    assert kinds == [array] * 3
    with pytest.raises(TypeError):
        FlatStep(StepPlan((Chunk(0, array("q", [1]), 0, [0]),)), VOCAB, StepMemory())
