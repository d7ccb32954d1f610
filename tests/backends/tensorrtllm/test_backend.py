from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest

from llmserve.backends.tensorrtllm import backend
from llmserve.backends.tensorrtllm.backend import EngineInstance
from llmserve.core import FinishReason
from llmserve.engine import validation
from llmserve.engine.fake import fake_answer, fake_engine, fake_log_prob, fake_prompt_log_prob
from llmserve.engine.inflight import InflightEngine
from llmserve.errors import Code, InvalidArgument, LlmserveError
from llmserve.scheduler.settings import SchedulerSettings
from llmserve.stages.postprocess import Postprocessor
from llmserve.stages.stage_arrays import text_arrays
from llmserve.stages.tokenizer import load_tokenizer
from tests.backends.tensorrtllm.models import ids, instance_over, load_model, read_config, request, responses, value
from tests.stages.conftest import write_baichuan
from tests.stages.scripted import ScriptedEngine

PROMPT = [1, 2, 3]
ANSWER = fake_answer(PROMPT, 5)


@pytest.fixture
async def engine() -> AsyncIterator[InflightEngine]:
    engine = fake_engine()
    yield engine
    engine.close()


@pytest.fixture
async def slow_engine() -> AsyncIterator[InflightEngine]:
    engine = fake_engine(step_delay_s=0.01)
    yield engine
    engine.close()


async def wait_until_idle(engine: InflightEngine) -> None:
    deadline = time.monotonic() + 60
    while engine.stats().num_active_requests or engine.stats().used_num_blocks:
        assert time.monotonic() < deadline, engine.stats()
        await asyncio.sleep(0.01)


async def refusal(instance: EngineInstance, **values: Any) -> LlmserveError:
    (response,) = await responses(instance, request(PROMPT, **values))
    assert response.final
    assert response.outputs == ()
    assert response.error is not None
    return response.error


async def test_a_unary_answer_is_one_response(engine: InflightEngine) -> None:
    (response,) = await responses(instance_over(engine), request(PROMPT, "mine"))
    assert response.final
    assert (response.request_id, response.model_name, response.model_version) == ("mine", "tensorrt_llm", "1")
    assert ids(response) == ANSWER
    assert value(response, "sequence_length") == 5
    assert value(response, "finish_reason") == "length"
    assert (value(response, "num_prompt_tokens"), value(response, "num_completion_tokens")) == (3, 5)


async def test_a_bias_must_fit_the_tokenizer_or_the_engine(engine: InflightEngine, tmp_path: Path) -> None:
    write_baichuan(tmp_path)
    instance = instance_over(engine, tokenizer_dir=str(tmp_path))
    sizes = (load_tokenizer(tmp_path).vocab_size, engine.info.vocab_size)
    assert sizes[0] != sizes[1]
    for size in sizes:
        bias = [0.0] * size
        bias[9] = 1e6
        (response,) = await responses(instance, request(PROMPT, embedding_bias=bias))
        assert ids(response) == [9] * 5
    error = await refusal(instance, embedding_bias=[1.0, 2.0])
    assert error.code is Code.INVALID_ARGUMENT
    assert all(str(size) in str(error) for size in (*sizes, 2))


async def test_streaming_gives_new_ids_as_they_come(engine: InflightEngine) -> None:
    parts = await responses(instance_over(engine), request(PROMPT, streaming=True))
    assert len(parts) >= 5
    assert [token for part in parts for token in ids(part)] == ANSWER
    assert [part.final for part in parts] == [False] * (len(parts) - 1) + [True]
    assert [value(part, "finish_reason") for part in parts[:-1]] == [""] * (len(parts) - 1)
    assert value(parts[-1], "finish_reason") == "length"


async def test_every_declared_output_is_there_with_its_type(engine: InflightEngine) -> None:
    declared = {output.name: output for output in read_config("tensorrt_llm").output}
    sent = replace(request(PROMPT), requested_outputs=tuple(declared))
    (response,) = await responses(instance_over(engine), sent)
    assert [tensor.name for tensor in response.outputs] == list(declared)
    kinds = {"INT32": 8, "INT64": 9, "FP32": 11, "BYTES": 13}
    for tensor in response.outputs:
        assert kinds[tensor.datatype] == declared[tensor.name].data_type
        assert len(tensor.shape) == len(declared[tensor.name].dims) + 1


TELLING = {"output_ids", "sequence_length", "batch_index", "sequence_index", "window_ids", "tail_text", "finish_reason"}
LOG_PROBS = {"cum_log_probs", "output_log_probs"}
KNOWN_AT_THE_END = {
    "num_prompt_tokens", "num_cached_tokens", "num_completion_tokens", "arrival_time_ns", "first_scheduled_time_ns",
    "first_token_time_ns", "last_token_time_ns", "kv_cache_alloc_new_blocks", "kv_cache_reused_blocks",
    "kv_cache_alloc_total_blocks", "acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens",
}  # fmt: skip


@pytest.mark.parametrize("asked", [set(), LOG_PROBS])
async def test_nothing_is_told_that_says_nothing(engine: InflightEngine, asked: set[str]) -> None:
    more: dict[str, Any] = {"return_log_probs": True} if asked else {}
    parts = await responses(instance_over(engine), request(PROMPT, streaming=True, **more))
    *before, last = [[tensor.name for tensor in part.outputs] for part in parts]
    assert len(before) == len(ANSWER) - 1
    assert all(set(names) == TELLING | asked for names in before)
    assert set(last) == TELLING | asked | KNOWN_AT_THE_END
    assert all(names == sorted(names, key=_declared_order) for names in (*before, last))


async def test_what_is_named_is_told_in_every_response(engine: InflightEngine) -> None:
    names = ("cum_log_probs", "num_prompt_tokens", "arrival_time_ns", "context_logits")
    parts = await responses(instance_over(engine), replace(request(PROMPT, streaming=True), requested_outputs=names))
    assert all(tuple(t.name for t in part.outputs) == tuple(sorted(names, key=_declared_order)) for part in parts)
    assert [value(part, "num_prompt_tokens") for part in parts] == [0] * (len(ANSWER) - 1) + [len(PROMPT)]


async def test_what_a_later_step_needs_is_told_in_every_response_beside_what_says_something(
    engine: InflightEngine,
) -> None:
    needed = ("output_ids", "cum_log_probs", "context_logits", "num_prompt_tokens")
    parts = await responses(instance_over(engine), replace(request(PROMPT, streaming=True), needed_outputs=needed))
    *before, last = [{tensor.name for tensor in part.outputs} for part in parts]
    assert all(names == TELLING | set(needed) for names in before)
    assert last == TELLING | set(needed) | KNOWN_AT_THE_END


def test_outputs_that_no_answer_has_are_known_at_load(engine: InflightEngine) -> None:
    config = read_config("tensorrt_llm")
    assert not load_model(engine, config).missing_outputs
    config.output.add(name="context_phase_params")
    assert load_model(engine, config).missing_outputs == {"context_phase_params"}


def _declared_order(name: str) -> int:
    return [output.name for output in read_config("tensorrt_llm").output].index(name)


async def test_only_requested_outputs_are_made(engine: InflightEngine) -> None:
    sent = replace(request(PROMPT), requested_outputs=("output_ids", "finish_reason"))
    (response,) = await responses(instance_over(engine), sent)
    assert [tensor.name for tensor in response.outputs] == ["output_ids", "finish_reason"]


async def test_the_prompt_is_echoed_as_the_parameter_and_the_request_say(engine: InflightEngine) -> None:
    echoing = instance_over(engine, exclude_input_in_output="false")
    (response,) = await responses(echoing, request(PROMPT))
    assert ids(response) == PROMPT + ANSWER
    assert value(response, "sequence_length") == 8
    (response,) = await responses(echoing, request(PROMPT, exclude_input_in_output=True))
    assert ids(response) == ANSWER
    (response,) = await responses(instance_over(engine), request(PROMPT, exclude_input_in_output=False))
    assert ids(response) == PROMPT + ANSWER
    parts = await responses(echoing, request(PROMPT, streaming=True))
    assert [token for part in parts for token in ids(part)] == ANSWER  # a stream never echoes


@pytest.mark.parametrize("streaming", [True, False])
async def test_log_probs(engine: InflightEngine, streaming: bool) -> None:
    parts = await responses(instance_over(engine), request(PROMPT, streaming=streaming, return_log_probs=True))
    expected = [fake_log_prob(token) for token in ANSWER]
    got = [float(x) for part in parts for x in part.output("output_log_probs").data[0, 0]]  # type: ignore[union-attr]
    assert got == pytest.approx(expected)
    assert value(parts[-1], "cum_log_probs") == pytest.approx(sum(expected))


@pytest.mark.parametrize("streaming", [True, False])
async def test_scores_of_prompt_and_answer(engine: InflightEngine, streaming: bool) -> None:
    asked: dict[str, Any] = {"return_context_logits": True, "return_generation_logits": True}
    sent = request(PROMPT, streaming=streaming, return_prompt_log_probs=True, num_top_log_probs=2, **asked)
    first, *others = await responses(instance_over(engine), sent)
    outputs = {tensor.name: tensor.data for tensor in first.outputs}
    assert outputs["prompt_log_probs"].tolist() == [
        pytest.approx([fake_prompt_log_prob(PROMPT[:1], 2), fake_prompt_log_prob(PROMPT[:2], 3)])
    ]
    assert outputs["prompt_top_ids"].tolist() == [[[0, 1], [0, 1]]]
    assert outputs["prompt_top_log_probs"].tolist() == [[pytest.approx([fake_log_prob(0), fake_log_prob(1)])] * 2]
    assert outputs["context_logits"].shape == (1, len(PROMPT), 1000)
    assert outputs["context_logits"][0].argmax(axis=1).tolist() == [2, 9, 31]
    num_first = outputs["output_ids"].shape[-1]
    assert outputs["output_top_ids"].tolist() == [[[0, 1]] * num_first]
    assert outputs["generation_logits"].shape == (1, 1, num_first, 1000)
    assert outputs["generation_logits"][0, 0].argmax(axis=1).tolist() == ANSWER[:num_first]
    of_prompt = {"prompt_log_probs", "prompt_top_ids", "prompt_top_log_probs", "context_logits"}
    assert all(not {tensor.name for tensor in part.outputs} & of_prompt for part in others)
    assert all(part.output("output_top_log_probs") for part in others)


async def test_scores_that_nobody_asked_for_are_empty(engine: InflightEngine) -> None:
    names = ("output_top_ids", "prompt_log_probs", "prompt_top_log_probs", "generation_logits")
    (response,) = await responses(instance_over(engine), replace(request(PROMPT), requested_outputs=names))
    assert [tensor.data.shape for tensor in response.outputs] == [(1, 5, 0), (1, 0), (1, 0, 0), (1, 1, 0, 0)]


async def test_a_prompt_of_one_token_has_no_log_probs(engine: InflightEngine) -> None:
    (response,) = await responses(
        instance_over(engine), request([4], return_prompt_log_probs=True, num_top_log_probs=1)
    )
    outputs = {tensor.name: tensor.data.shape for tensor in response.outputs}
    assert (outputs["prompt_log_probs"], outputs["prompt_top_ids"]) == ((1, 0), (1, 0, 0))


async def test_more_logits_than_fit_are_refused(engine: InflightEngine) -> None:
    with patch.object(validation, "MAX_LOGITS_BYTES", 4 * 1000 * 7):
        error = await refusal(instance_over(engine), return_generation_logits=True, return_context_logits=True)
    assert "the logits asked for are 32000 bytes (8 tokens, 1000 numbers of 4 bytes each)" in str(error)


async def test_several_sequences_are_told_apart(engine: InflightEngine) -> None:
    sent = request(PROMPT, num_return_sequences=3, runtime_top_k=5, seed=4)
    parts = await responses(instance_over(engine), sent)
    assert sorted(value(part, "sequence_index") for part in parts) == [0, 1, 2]
    assert [part.final for part in parts] == [False, False, True]
    answers = {value(part, "sequence_index"): ids(part) for part in parts}
    assert all(len(answer) == 5 for answer in answers.values())
    assert len({tuple(answer) for answer in answers.values()}) == 3
    events = await responses(
        instance_over(engine), request(PROMPT, num_return_sequences=3, runtime_top_k=5, seed=4, streaming=True)
    )
    for index, answer in answers.items():
        assert [t for part in events if value(part, "sequence_index") == index for t in ids(part)] == answer
    assert [part.final for part in events].count(True) == 1


async def test_the_end_id_stops_and_is_not_shown(engine: InflightEngine) -> None:
    (response,) = await responses(instance_over(engine), request(PROMPT, end_id=ANSWER[3]))
    assert ids(response) == ANSWER[:3]
    assert value(response, "finish_reason") == "end_id"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"request_output_len": 0}, "max_tokens"),
        ({"temperature": float("nan")}, "temperature"),
        ({"beam_width": 2}, "beam_width"),
        ({"input_ids": [], "input_lengths": 0}, "empty"),
        ({"input_ids": [1] * 300, "input_lengths": 300}, "too long"),
        ({"input_ids": [5000, 1, 1]}, "vocabulary"),
        ({"stop_words": [b"x"]}, "tokenizer"),
        ({"guided_decoding_guide_type": [b"json"]}, "guides need a tokenizer"),
    ],
)
async def test_bad_requests_become_an_error_response(
    engine: InflightEngine, values: dict[str, object], words: str
) -> None:
    error = await refusal(instance_over(engine), **values)
    assert error.code is Code.INVALID_ARGUMENT
    assert words in str(error)


@pytest.mark.parametrize("count", [129, 2**31 - 1])
async def test_too_many_sequences_are_refused_before_memory_is_taken_for_them(
    count: int, engine: InflightEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = instance_over(engine)
    with monkeypatch.context() as patch:
        patch.setattr(backend, "ResponseBuilder", Mock(side_effect=AssertionError("too early")))
        error = await refusal(instance, num_return_sequences=count)
    assert error.code is Code.INVALID_ARGUMENT
    assert f"from 1 to 128, got {count}" in str(error)
    (response,) = await responses(instance, request(PROMPT))
    assert ids(response) == ANSWER


async def test_a_model_that_is_not_decoupled_gives_one_response(engine: InflightEngine) -> None:
    config = read_config("tensorrt_llm")
    config.model_transaction_policy.decoupled = False
    instance = instance_over(engine, config)
    (response,) = await responses(instance, request(PROMPT))
    assert ids(response) == ANSWER
    assert "decoupled" in str(await refusal(instance, streaming=True))
    assert "decoupled" in str(await refusal(instance, num_return_sequences=2))


async def test_a_full_queue_refuses(slow_engine: InflightEngine) -> None:
    slow_engine.close()
    engine = fake_engine(settings=SchedulerSettings(max_queue_size=1), step_delay_s=0.01)
    instance = instance_over(engine)
    answers = await asyncio.gather(*(responses(instance, request([n])) for n in range(1, 80)))
    errors = [answer[-1].error for answer in answers if answer[-1].error is not None]
    assert errors
    assert {error.code for error in errors} == {Code.RESOURCE_EXHAUSTED}
    engine.close()


@pytest.mark.parametrize("streaming", [True, False])
async def test_stop_ends_the_running_request_of_that_id(slow_engine: InflightEngine, streaming: bool) -> None:
    instance = instance_over(slow_engine)
    sent = request(PROMPT, "long", request_output_len=200, streaming=streaming)
    running = asyncio.create_task(responses(instance, sent))
    other = asyncio.create_task(responses(instance, request([9], "other", streaming=streaming)))
    await asyncio.sleep(0.15)
    (stopped,) = await responses(instance, request(PROMPT, "long", stop=True))
    assert stopped.final
    assert stopped.outputs == ()
    assert stopped.error is None
    parts = await asyncio.wait_for(running, 30)
    assert parts[-1].final
    assert value(parts[-1], "finish_reason") == "cancelled"
    got = [token for part in parts for token in ids(part)]
    assert 0 < len(got) < 200
    assert got == fake_answer(PROMPT, len(got))
    assert ids(parts[-1]) == ([] if streaming else got)
    assert value(parts[-1], "num_completion_tokens") == len(got)
    assert [t for part in await other for t in ids(part)] == fake_answer([9], 5)
    await wait_until_idle(slow_engine)


async def test_stop_while_the_client_is_not_reading(slow_engine: InflightEngine) -> None:
    instance = instance_over(slow_engine)
    (stream,) = instance.execute([request(PROMPT, "lazy", request_output_len=200, streaming=True)])
    async with aclosing(stream):
        await anext(stream)
        await responses(instance, request(PROMPT, "lazy", stop=True))
        last = await anext(stream)
        assert last.final
        assert value(last, "finish_reason") == "cancelled"
    await wait_until_idle(slow_engine)


async def test_stop_reaches_every_request_of_an_id_that_is_used_twice(slow_engine: InflightEngine) -> None:
    instance = instance_over(slow_engine)
    sent = [request([n], "same", request_output_len=200, streaming=True) for n in (1, 2)]
    running = [asyncio.create_task(responses(instance, each)) for each in sent]
    finished = await responses(instance, request([3], "same", request_output_len=1, streaming=True))
    assert finished[-1].final  # the end of one of them does not unregister the others
    await responses(instance, request(PROMPT, "same", stop=True))
    for parts in await asyncio.wait_for(asyncio.gather(*running), 60):
        assert value(parts[-1], "finish_reason") == "cancelled"
    await wait_until_idle(slow_engine)


async def test_stop_needs_an_id_and_forgives_an_unknown_one(engine: InflightEngine) -> None:
    instance = instance_over(engine)
    error = await refusal(instance, stop=True)
    assert isinstance(error, InvalidArgument)
    assert str(error) == "Trying to stop a request but request ID is not provided"
    (response,) = await responses(instance, request(PROMPT, "gone", stop=True))
    assert response.final
    assert response.error is None


async def test_closing_the_stream_frees_the_sequence(slow_engine: InflightEngine) -> None:
    (stream,) = instance_over(slow_engine).execute([request(PROMPT, "x", request_output_len=200, streaming=True)])
    await anext(stream)
    await stream.aclose()
    await wait_until_idle(slow_engine)


async def test_a_failing_engine_answers_with_an_error_and_is_not_healthy() -> None:
    engine = fake_engine(fail_at_step=2)
    instance = instance_over(engine)
    parts = await responses(instance, request(PROMPT, streaming=True))
    assert parts[-1].final
    assert parts[-1].error is not None
    assert parts[-1].error.code is Code.INTERNAL
    assert not instance.healthy()
    await instance.close()


async def test_stop_strings_and_windows_with_a_tokenizer(tmp_path: Path) -> None:
    write_baichuan(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    script = [[token] for token in tokenizer.encode("The fox é runs. STOP here")]
    engine = ScriptedEngine(script)
    instance = instance_over(engine, gpt_model_path=str(tmp_path))
    for streaming in (True, False):
        parts = await responses(instance, request(PROMPT, streaming=streaming, stop_words=[b"STOP"]))
        post = Postprocessor(tokenizer)
        names = {"output_ids": "TOKENS_BATCH", "sequence_length": "SEQUENCE_LENGTH", "window_ids": "WINDOW_IDS",
                 "tail_text": "TAIL_TEXT", "finish_reason": "FINISH_REASON"}  # fmt: skip
        texts = [
            text_arrays(post, {names[t.name]: t.data for t in part.outputs if t.name in names})["OUTPUT"][0].decode()
            for part in parts
        ]
        assert "".join(texts) == "The fox é runs. "
        assert value(parts[-1], "finish_reason") == FinishReason.STOP_WORDS.value
        assert engine.closed


async def test_gauges_have_tritons_names(engine: InflightEngine) -> None:
    model = load_model(engine)
    assert model.batches_itself
    samples = {(family, *labels.items()): number for family, labels, number in model.gauges()}
    assert samples["nv_trt_llm_kv_cache_block_metrics", ("kv_cache_block_type", "max")] == 256
    assert samples["nv_trt_llm_kv_cache_block_metrics", ("kv_cache_block_type", "tokens_per")] == 4
    assert samples["nv_trt_llm_request_metrics", ("request_type", "active")] == 0
    assert samples["nv_trt_llm_runtime_memory_metrics", ("memory_type", "cpu")] > 2**20
    assert ("nv_trt_llm_inflight_batcher_metrics", ("inflight_batcher_specific_metric", "paused_requests")) in samples
    assert ("nv_trt_llm_general_metrics", ("general_type", "iteration_counter")) in samples


async def test_several_instances_make_no_difference_and_say_so(
    engine: InflightEngine, caplog: pytest.LogCaptureFixture
) -> None:
    config = read_config("tensorrt_llm")
    config.instance_group[0].count = 2
    with caplog.at_level(logging.WARNING):
        assert len(load_model(engine, config).instances) == 1
    assert "more have no effect" in caplog.text


async def test_priority_counts_from_one(engine: InflightEngine) -> None:
    scripted = ScriptedEngine([[4]])
    config = read_config("tensorrt_llm")
    config.dynamic_batching.priority_levels = 3
    config.dynamic_batching.default_priority_level = 2
    instance = instance_over(scripted, config)
    for priority in (0, 1, 3):
        await responses(instance, replace(request(PROMPT), priority=priority, deadline=7.0))
    assert [sent.priority for sent in scripted.requests] == [0, 1, -1]
    assert {sent.deadline for sent in scripted.requests} == {7.0}
    assert len({sent.request_id for sent in scripted.requests}) == 3


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_receipt_comes_with_the_end_of_each_answer(engine: InflightEngine, streaming: bool) -> None:
    asked = request(PROMPT, streaming=streaming, return_receipt=True, num_return_sequences=2, seed=5, runtime_top_k=4)
    parts = await responses(instance_over(engine), asked)
    receipts = [value(part, "receipt") for part in parts if part.output("receipt") is not None]
    found = [json.loads(each) for each in receipts]
    assert sorted(each["sequence_index"] for each in found) == [0, 1]
    for each in found:
        index = each["sequence_index"]
        said = [token for part in parts if value(part, "sequence_index") == index for token in ids(part)]
        assert each["output_ids"] == said
        assert (each["prompt_ids"], each["sampling"]["seed"]) == (PROMPT, 5)
        assert each["engine"] == {"name": "fake", "digest": "0" * 64, "target": "fake", "kernels": "fake"}


async def test_an_engine_that_promises_nothing_gives_no_receipts() -> None:
    (response,) = await responses(instance_over(ScriptedEngine([])), request(PROMPT, return_receipt=True))
    assert response.error is not None
    assert response.error.code is Code.UNIMPLEMENTED
    assert "does not promise the same tokens" in str(response.error)
