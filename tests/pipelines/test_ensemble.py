"""The shipped repository in a real server core, over engines whose answers are known."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmserve.backends.python.backend import PythonBackend
from llmserve.backends.tensorrtllm import TensorrtLlmBackend
from llmserve.engine.base import Engine, RunnerInfo
from llmserve.engine.fake import fake_answer, fake_engine
from llmserve.errors import Code, LlmserveError
from llmserve.serving.backend import Backend
from llmserve.serving.core import InferenceCore, ServerSettings
from llmserve.serving.types import InferRequest, InferResponse, Tensor
from llmserve.stages.tokenizer import Tokenizer, load_tokenizer
from tests.backends.tensorrtllm.models import PIPELINES, ids, tensor, tensors, value
from tests.stages.conftest import write_baichuan
from tests.stages.scripted import ScriptedEngine

VOCAB_SIZE = 620
LIMITS = RunnerInfo(
    vocab_size=VOCAB_SIZE, block_size=4, num_blocks=512, max_num_tokens=64, max_batch_size=32, max_seq_len=256
)


@pytest.fixture(scope="module")
def text_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engine")
    write_baichuan(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(text_dir: Path) -> Tokenizer:
    return load_tokenizer(text_dir)


@asynccontextmanager
async def serving(text_dir: Path, open_engine: Callable[[], Engine]) -> AsyncIterator[InferenceCore]:
    tokenizer_dir = {"tokenizer_dir": str(text_dir)}
    settings = ServerSettings(
        (PIPELINES,),
        parameter_overrides={
            "preprocessing": tokenizer_dir,
            "postprocessing": tokenizer_dir,
            "tensorrt_llm": {"gpt_model_path": str(text_dir)},
        },
    )
    backends: dict[str, Backend] = {
        "tensorrtllm": TensorrtLlmBackend(lambda path, limits: open_engine()),
        "python": PythonBackend(),
    }
    core = InferenceCore(settings, backends)
    await core.start()
    assert core.ready(), core.repository_index()
    try:
        yield core
    finally:
        await core.stop(1.0)


@pytest.fixture
async def core(text_dir: Path) -> AsyncIterator[InferenceCore]:
    async with serving(text_dir, lambda: fake_engine(LIMITS)) as core:
        yield core


async def ask(core: InferenceCore, model: str, request_id: str = "", **values: Any) -> list[InferResponse]:
    sent = InferRequest(model, tensors(values), request_id=request_id)
    responses = [response async for response in core.infer_stream(sent)]
    for response in responses:
        if response.error is not None:
            raise response.error
    return responses


def text_of(responses: list[InferResponse], sequence: int = 0) -> str:
    texts = []
    for response in responses:
        found = response.output("text_output")
        if found is not None and value(response, "sequence_index") == sequence:
            assert found.shape == (1,)  # existing clients decode output[0]
            texts.append(found.data[0].decode())
    return "".join(texts)


def expected_text(tokenizer: Tokenizer, prompt_ids: list[int], num_tokens: int) -> str:
    answer = fake_answer(prompt_ids, num_tokens, VOCAB_SIZE)
    return tokenizer.decode(answer[: answer.index(2)] if 2 in answer else answer)


async def test_text_in_text_out(core: InferenceCore, tokenizer: Tokenizer) -> None:
    prompt = "The small red fox"
    expected = expected_text(tokenizer, tokenizer.encode(prompt), 24)
    whole = await ask(core, "ensemble", text_input=prompt, max_tokens=24)
    streamed = await ask(core, "ensemble", text_input=prompt, max_tokens=24, stream=True)
    assert len(whole) == 1
    assert len(streamed) > 10
    assert text_of(whole) == text_of(streamed) == expected
    assert value(streamed[-1], "finish_reason") == "length"
    assert value(streamed[-1], "num_prompt_tokens") == len(tokenizer.encode(prompt))
    assert [response.final for response in streamed] == [False] * (len(streamed) - 1) + [True]


def rows(**columns: list[Any]) -> dict[str, Tensor]:
    """Inputs of a batch: a value for each row."""
    of_rows = {name: [tensor(name, each) for each in column] for name, column in columns.items()}
    return {
        name: Tensor(name, each[0].datatype, np.concatenate([row.data for row in each]))
        for name, each in of_rows.items()
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_a_batch_of_texts_gets_the_text_of_each(core: InferenceCore, tokenizer: Tokenizer, stream: bool) -> None:
    prompts, lengths = ["The small red fox", "The fox runs over hill 3", "hill"], [24, 8, 16]
    inputs = rows(text_input=prompts, max_tokens=lengths, stream=[stream] * 3)
    parts = [part async for part in core.infer_stream(InferRequest("ensemble", inputs))]
    assert [part.final for part in parts] == [False] * (len(parts) - 1) + [True]
    for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        of_row = [part for part in parts if part.output("batch_index") and value(part, "batch_index") == row]
        assert text_of(of_row) == expected_text(tokenizer, tokenizer.encode(prompt), length)
        assert value(of_row[-1], "num_prompt_tokens") == len(tokenizer.encode(prompt))
    (statistics,) = core.statistics("tensorrt_llm")
    assert statistics.inference_count == 3


async def test_a_batch_ends_with_the_error_of_one_row(core: InferenceCore) -> None:
    for name, wrong in (("text_input", ""), ("temperature", -1.0)):
        columns: dict[str, list[Any]] = {
            "text_input": ["fox", "hill"],
            "max_tokens": [4, 4],
            "temperature": [1.0, 1.0],
        }
        inputs = rows(**{**columns, name: [columns[name][0], wrong]})
        *_, last = [part async for part in core.infer_stream(InferRequest("ensemble", inputs))]
        assert last.final
        assert last.error is not None
        assert last.error.code is Code.INVALID_ARGUMENT
        assert "row 1" in str(last.error)


async def test_concurrent_streams_each_get_their_own_text(core: InferenceCore, tokenizer: Tokenizer) -> None:
    prompts = [f"The fox runs over hill {number}" for number in range(12)]
    answers = await asyncio.gather(*(ask(core, "ensemble", text_input=p, max_tokens=16, stream=True) for p in prompts))
    assert [text_of(a) for a in answers] == [expected_text(tokenizer, tokenizer.encode(p), 16) for p in prompts]


async def test_chat_messages_in_text_out(core: InferenceCore, tokenizer: Tokenizer) -> None:
    messages = json.dumps([{"role": "user", "content": "fox"}])
    answer = await ask(core, "ensemble", messages=messages, max_tokens=8, stream=True)
    assert text_of(answer) == expected_text(tokenizer, [195, *tokenizer.encode("fox"), 196], 8)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_does_not_fit_is_said_at_the_end(core: InferenceCore, stream: bool) -> None:
    talk = [{"role": "user" if i % 2 == 0 else "assistant", "content": "The small red fox runs."} for i in range(9)]
    cut = await ask(core, "ensemble", messages=json.dumps(talk), max_tokens=40, stream=stream)
    assert "the conversation was truncated, without the first" in value(cut[-1], "warning")
    long = await ask(core, "ensemble", text_input="The small red fox", max_tokens=10_000, stream=stream)
    assert value(long[-1], "warning").startswith("max_tokens is 10000, and after a prompt of ")
    assert long[-1].output("num_completion_tokens") is not None
    plain = await ask(core, "ensemble", text_input="The small red fox", max_tokens=4, stream=stream)
    assert [response.output("warning") for response in (*cut[:-1], *long[:-1], *plain)] == [None] * (
        len(cut) + len(long) + len(plain) - 2
    )


async def test_parameters_that_nobody_reads_are_named(core: InferenceCore) -> None:
    """`generate` makes a request parameter of every key that is no input, as Triton does: a misspelt one, too."""
    sent = InferRequest(
        "ensemble", tensors({"text_input": "fox", "max_tokens": 4}), parameters={"temprature": 0.5, "n": 2}
    )
    (response,) = [response async for response in core.infer_stream(sent)]
    assert value(response, "warning") == "no input has the name n, temprature, so it was ignored"


async def test_each_step_can_be_called_on_its_own(core: InferenceCore, tokenizer: Tokenizer) -> None:
    (prepared,) = await ask(core, "preprocessing", QUERY="The fox", REQUEST_OUTPUT_LEN=6)
    found = prepared.output("INPUT_ID")
    assert found is not None
    prompt_ids = found.data[0].tolist()
    assert prompt_ids == tokenizer.encode("The fox")
    (generated,) = await ask(
        core, "tensorrt_llm", input_ids=prompt_ids, input_lengths=len(prompt_ids), request_output_len=6
    )
    assert ids(generated) == fake_answer(prompt_ids, 6, VOCAB_SIZE)
    (text,) = await ask(core, "postprocessing", TOKENS_BATCH=[ids(generated)], SEQUENCE_LENGTH=[6])
    found = text.output("OUTPUT")
    assert found is not None
    assert found.data[0].decode() == tokenizer.decode(ids(generated))


async def test_the_end_token_ends_the_answer_unless_overridden(text_dir: Path, tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine([[token] for token in tokenizer.encode("The fox")])
    async with serving(text_dir, lambda: engine) as core:
        await ask(core, "ensemble", text_input="x", max_tokens=4)
        await ask(core, "ensemble", text_input="x", max_tokens=4, end_id=-1)
        await ask(core, "ensemble", text_input="x", max_tokens=4, end_id=7)
    assert [sent.end_id for sent in engine.requests] == [2, None, 7]


async def test_settings_of_the_client_reach_the_engine(text_dir: Path, tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine([[token] for token in tokenizer.encode("fox")])
    async with serving(text_dir, lambda: engine) as core:
        await ask(
            core, "ensemble", text_input="x", max_tokens=4, top_k=5, top_p=0.5, temperature=0.25, min_length=2,
            random_seed=9, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.25, min_p=0.125,
            length_penalty=1.0, beam_width=1, return_log_probs=True, bad_words=["hill"], stop_words=["river", ""],
            embedding_bias_words=["fox"], embedding_bias_weights=[2.0],
        )  # fmt: skip
    (sent,) = engine.requests
    sampling = sent.sampling
    assert (sampling.top_k, sampling.top_p, sampling.temperature, sampling.min_tokens) == (5, 0.5, 0.25, 2)
    assert (sampling.seed, sampling.min_p, sampling.max_tokens) == (9, 0.125, 4)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.5, 0.5, 0.25)
    assert sent.bad_ids[0] == tuple(tokenizer.encode("hill"))
    assert sent.stop_ids == ()  # the one answer's text is watched
    assert sent.embedding_bias == tuple(sorted((token, 2.0) for token in set(tokenizer.encode("fox"))))
    assert sent.return_log_probs


@pytest.mark.parametrize("stream", [True, False])
async def test_a_stop_string_ends_the_text_wherever_it_falls(
    text_dir: Path, tokenizer: Tokenizer, stream: bool
) -> None:
    engine = ScriptedEngine([[token] for token in tokenizer.encode("The fox é runs. STOP here")])
    async with serving(text_dir, lambda: engine) as core:
        answer = await ask(core, "ensemble", text_input="x", max_tokens=40, stream=stream, stop_words=["TOP"])
    assert text_of(answer) == "The fox é runs. S"
    assert value(answer[-1], "finish_reason") == "stop_words"


async def test_an_answer_that_a_stop_string_ends_tells_what_was_cached(
    core: InferenceCore, tokenizer: Tokenizer
) -> None:
    prompt = "The small red fox runs over the hill"
    text = expected_text(tokenizer, tokenizer.encode(prompt), 24)
    stop = text[-3:]
    for is_cached in (False, True):
        answer = await ask(core, "ensemble", text_input=prompt, max_tokens=24, stop_words=[stop], stream=True)
        assert text_of(answer) == text[: text.index(stop)]
        last = answer[-1]
        assert value(last, "finish_reason") == "stop_words"
        assert (value(last, "num_cached_tokens") > 0) is is_cached
        times = [value(last, f"{name}_time_ns") for name in ("arrival", "first_scheduled", "first_token", "last_token")]
        assert times == sorted(set(times))
        assert not any(response.output("arrival_time_ns") for response in answer[:-1])  # not before it is known


async def test_logits_asked_for_by_name_only_are_empty(core: InferenceCore) -> None:
    sent = InferRequest(
        "ensemble",
        tensors({"text_input": "fox", "max_tokens": 2, "decoder_text_input": ""}),
        requested_outputs=("text_output", "context_logits", "generation_logits"),
    )
    (response,) = [response async for response in core.infer_stream(sent)]
    assert {tensor.name: tensor.data.size for tensor in response.outputs if "logits" in tensor.name} == {
        "context_logits": 0,
        "generation_logits": 0,
    }
    assert text_of([replace(response, outputs=(*response.outputs, tensor("sequence_index", 0)))])


async def test_what_is_asked_about_the_distribution_reaches_the_client(
    core: InferenceCore, tokenizer: Tokenizer
) -> None:
    asked: dict[str, Any] = {"num_top_log_probs": 2, "return_prompt_log_probs": True, "return_context_logits": True}
    first, *others = await ask(core, "ensemble", text_input="The small fox", max_tokens=3, stream=True, **asked)
    num_prompt = len(tokenizer.encode("The small fox"))
    shapes = {tensor.name: tensor.shape for tensor in first.outputs}
    assert shapes["prompt_log_probs"] == (1, num_prompt - 1)
    assert shapes["prompt_top_ids"] == shapes["prompt_top_log_probs"] == (1, num_prompt - 1, 2)
    assert shapes["context_logits"] == (1, num_prompt, LIMITS.vocab_size)
    assert all(part.output("prompt_log_probs") is None for part in others)
    for part in (first, *others):
        top = part.output("output_top_ids")
        assert top is not None
        assert top.data.tolist() == [[[0, 1]] * top.shape[1]]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_guided_answer_has_the_form_that_was_asked_for(core: InferenceCore, stream: bool) -> None:
    guide = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": r"[a-z]{2,8}( [a-z]{2,8}){2}\."}
    answer = await ask(core, "ensemble", text_input="The fox", max_tokens=60, stream=stream, **guide)
    assert re.fullmatch(guide["guided_decoding_guide"], text_of(answer))
    assert value(answer[-1], "finish_reason") == "end_id"


async def test_stop_with_the_requests_id_ends_it(text_dir: Path) -> None:
    async with serving(text_dir, lambda: fake_engine(LIMITS, step_delay_s=0.01)) as core:
        running = asyncio.create_task(
            ask(core, "ensemble", "mine", text_input="The fox", max_tokens=200, stream=True, end_id=-1)
        )
        await asyncio.sleep(0.3)
        (stopped,) = await ask(core, "ensemble", "mine", text_input="", max_tokens=1, stop=True)
        assert stopped.final
        answer = await asyncio.wait_for(running, 30)
        assert 1 < len(answer) < 200
        assert value(answer[-1], "finish_reason") == "cancelled"


@pytest.mark.parametrize(
    ("values", "code", "words"),
    [
        ({"text_input": ""}, Code.INVALID_ARGUMENT, "prompt is empty"),
        ({}, Code.INVALID_ARGUMENT, "there is no prompt: give text"),
        ({"text_input": b"\xff\xfe"}, Code.INVALID_ARGUMENT, "UTF-8"),
        ({"text_input": "word " * 500}, Code.INVALID_ARGUMENT, "too long"),
        ({"text_input": "x", "max_tokens": 0}, Code.INVALID_ARGUMENT, "max_tokens"),
        ({"text_input": "x", "temperature": float("nan")}, Code.INVALID_ARGUMENT, "temperature"),
        ({"text_input": "x", "beam_width": 4}, Code.INVALID_ARGUMENT, "beam_width"),
        ({"text_input": "x", "num_top_log_probs": 21}, Code.INVALID_ARGUMENT, "num_top_log_probs must be from 0 to 20"),
        ({"text_input": "x", "decoder_text_input": "y"}, Code.UNIMPLEMENTED, "decoder_text_input.* is not supported"),
        ({"text_input": "x", "prompt_table_extra_id": 1}, Code.UNIMPLEMENTED, "prompt_table_extra_id.* not supported"),
        ({"text_input": "x", "lora_task_id": 1}, Code.INVALID_ARGUMENT, "there is no adapter '1'"),
        ({"messages": "{"}, Code.INVALID_ARGUMENT, "JSON"),
        (
            {"text_input": "x", "guided_decoding_guide_type": "regex", "guided_decoding_guide": "["},
            Code.INVALID_ARGUMENT,
            "the regex guide cannot be followed: .*unclosed",
        ),
    ],
)
async def test_bad_requests_are_refused_and_the_next_one_is_served(
    core: InferenceCore, values: dict[str, Any], code: Code, words: str
) -> None:
    with pytest.raises(LlmserveError, match=words) as caught:
        await ask(core, "ensemble", **{"max_tokens": 4, **values})
    assert caught.value.code is code
    assert len(await ask(core, "ensemble", text_input="fox", max_tokens=4)) == 1
