"""Requests with several prompts: their answers come interleaved, each response of one row."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmserve.core import GenerateRequest, Tenant, TokenEvent
from llmserve.engine.fake import fake_answer, fake_engine
from llmserve.engine.inflight import InflightEngine
from llmserve.errors import InvalidArgument
from llmserve.serving.types import InferRequest, InferResponse, Tensor
from llmserve.stages.tokenizer import load_tokenizer
from tests.backends.tensorrtllm.models import ids, instance_over, load_model, read_config, responses, tensors, value
from tests.stages.conftest import write_baichuan

PROMPTS = ([1, 2, 3], [7, 8], [5, 6, 7, 8, 9])
LENGTHS = (4, 7, 2)


@pytest.fixture
async def engine() -> AsyncIterator[InflightEngine]:
    engine = fake_engine(step_delay_s=0.002)
    yield engine
    engine.close()


def batch(request_id: str = "", lengths: tuple[int, ...] = LENGTHS, **columns: Any) -> InferRequest:
    """`columns`: a value for each row."""
    longest = max(map(len, PROMPTS))
    inputs = {
        "input_ids": np.array([prompt + [0] * (longest - len(prompt)) for prompt in PROMPTS], np.int32),
        "input_lengths": np.array([[len(prompt)] for prompt in PROMPTS], np.int32),
        "request_output_len": np.array([[length] for length in lengths], np.int32),
    }
    made = {name: Tensor(name, "INT32", data) for name, data in inputs.items()}
    for name, column in columns.items():
        rows = [tensors({name: each})[name] for each in column]
        made[name] = replace(rows[0], data=np.concatenate([row.data for row in rows]))
    return InferRequest("tensorrt_llm", made, model_version="1", request_id=request_id)


def by_row(parts: list[InferResponse]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for part in parts:
        found.setdefault(value(part, "batch_index"), []).extend(ids(part))
    return found


async def wait_until_idle(engine: InflightEngine) -> None:
    deadline = time.monotonic() + 60
    while engine.stats().num_active_requests or engine.stats().used_num_blocks:
        assert time.monotonic() < deadline, engine.stats()
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("streaming", [False, True])
async def test_each_row_has_the_answer_that_it_has_alone(engine: InflightEngine, streaming: bool) -> None:
    parts = await responses(instance_over(engine), batch("mine", streaming=[streaming] * 3))
    assert by_row(parts) == {
        row: fake_answer(prompt, length) for row, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True))
    }
    assert [part.final for part in parts] == [False] * (len(parts) - 1) + [True]
    assert {part.request_id for part in parts} == {"mine"}
    ended = {value(part, "batch_index"): part for part in parts if value(part, "finish_reason")}
    assert [value(ended[row], "num_prompt_tokens") for row in range(3)] == [3, 2, 5]
    assert [value(ended[row], "num_completion_tokens") for row in range(3)] == list(LENGTHS)
    rows = [value(part, "batch_index") for part in parts]
    assert len(parts) == (sum(LENGTHS) if streaming else 3)
    assert rows != sorted(rows)  # they run side by side


async def test_inputs_are_of_each_row(engine: InflightEngine) -> None:
    second = fake_answer(PROMPTS[1], 7)
    stop_words = np.array([[[0], [-1]], [[second[2]], [1]], [[0], [-1]]], np.int32)
    sent = batch(end_id=[fake_answer(PROMPTS[0], 4)[1], -1, -1])
    inputs = {**sent.inputs, "stop_words_list": Tensor("stop_words_list", "INT32", stop_words)}
    parts = await responses(instance_over(engine), sent.with_inputs(inputs))
    reasons = {value(part, "batch_index"): value(part, "finish_reason") for part in parts}
    assert reasons == {0: "end_id", 1: "stop_words", 2: "length"}


async def test_an_error_of_one_row_ends_the_request(engine: InflightEngine) -> None:
    sent = batch(lengths=(50, 0, 50), streaming=[True] * 3)
    parts = await responses(instance_over(engine), sent)
    last = parts[-1]
    assert [part.final for part in parts] == [False] * (len(parts) - 1) + [True]
    assert isinstance(last.error, InvalidArgument)
    assert str(last.error).startswith("in row 1 of the batch, ")
    assert "request_output_len (max_tokens) must be at least 1, got 0" in str(last.error)
    await wait_until_idle(engine)


async def test_a_client_that_leaves_ends_all_rows(engine: InflightEngine) -> None:
    (stream,) = instance_over(engine).execute([batch(lengths=(100, 100, 100), streaming=[True] * 3)])
    async with aclosing(stream):
        await anext(stream)
        while engine.stats().num_active_requests < 3:  # the first row may answer before the last one is admitted
            await anext(stream)
    await wait_until_idle(engine)


async def test_stop_ends_all_rows(engine: InflightEngine) -> None:
    instance = instance_over(engine)
    (stream,) = instance.execute([batch("mine", lengths=(100, 100, 100), streaming=[True] * 3)])
    async with aclosing(stream):
        await anext(stream)
        (stopped,) = await responses(instance, batch("mine", stop=[True] * 3))
        assert (stopped.final, stopped.outputs) == (True, ())
        parts = [part async for part in stream]
    reasons = [value(part, "finish_reason") for part in parts if value(part, "finish_reason")]
    assert reasons == ["cancelled"] * 3
    await wait_until_idle(engine)


async def test_a_row_that_stops_at_a_word_leaves_the_engine_before_the_others(
    engine: InflightEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, left = engine.submit, []

    async def watched(request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        async with aclosing(submit(request)) as events:
            try:
                async for event in events:
                    yield event
            finally:
                left.append(list(request.prompt_ids))

    monkeypatch.setattr(engine, "submit", watched)
    write_baichuan(tmp_path)
    word = load_tokenizer(tmp_path).decode(fake_answer(PROMPTS[0], 3)[2:])
    assert word
    sent = batch(lengths=(200, 200, 200), streaming=[True] * 3, stop_words=[word, "nothing", "nothing"])
    (stream,) = instance_over(engine, gpt_model_path=str(tmp_path)).execute([sent])
    async with aclosing(stream):
        reasons = {}
        while 0 not in reasons:
            part = await anext(stream)
            if reason := value(part, "finish_reason"):
                reasons[value(part, "batch_index")] = reason
        assert reasons == {0: "stop_words"}
        assert left == [PROMPTS[0]]


async def test_a_key_may_have_as_many_answers_as_it_may_without_batches(engine: InflightEngine) -> None:
    instance = instance_over(engine)
    (part,) = await responses(instance, replace(batch(), tenant=Tenant("few", max_answers=2)))
    assert isinstance(part.error, InvalidArgument)
    assert "a batch of 3 is more than the 2 answers that 'few' may have" in str(part.error)
    parts = await responses(instance, replace(batch(), tenant=Tenant("enough", max_answers=3)))
    assert len(by_row(parts)) == 3


async def test_a_model_that_is_not_decoupled_takes_one_row(engine: InflightEngine) -> None:
    config = read_config("tensorrt_llm")
    config.model_transaction_policy.decoupled = False
    (part,) = await responses(instance_over(engine, config), batch())
    assert part.final
    assert isinstance(part.error, InvalidArgument)
    assert "a batch of 3 is answered with several responses and needs a decoupled model" in str(part.error)


async def test_answers_to_batches_are_not_compared(engine: InflightEngine) -> None:
    assert load_model(engine).reads_answer(batch()) is None
