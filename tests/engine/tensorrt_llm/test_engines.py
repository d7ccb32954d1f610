"""Both engines over the fakes: settings, metrics, crashes, beams. What every engine promises is in the contract."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.core import BeamSearch, FinishReason, GenerateRequest, SamplingParams, TokenEvent
from llmserve.engine.base import Engine, StepResult
from llmserve.engine.cpu.runner import CpuRunner
from llmserve.engine.open import open_engine
from llmserve.engine.settings import EngineSettings, GpuSettings
from llmserve.errors import EngineFileError, InternalError, InvalidArgument, ResourceExhausted, Unavailable
from llmserve.scheduler.plan import StepPlan
from llmserve.scheduler.settings import Policy, SchedulerSettings
from tests.checkpoints import make_checkpoint
from tests.engine.tensorrt_llm.conftest import Build
from tests.fakes.gpu_machine import altered, gpu_machine

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
REQUEST = GenerateRequest("r", (11, 12, 13, 14, 15, 16, 17, 18, 19), GREEDY)
RELEASES = ("1.2", "1.3")


@contextmanager
def opened(path: Path, release: str, settings: EngineSettings | None = None) -> Iterator[Any]:
    with gpu_machine(release):
        engine = open_engine(path, settings)
    try:
        yield engine
    finally:
        engine.close()


async def events_of(engine: Engine, request: GenerateRequest) -> list[TokenEvent]:
    async with aclosing(engine.submit(request)) as stream:
        return [event async for event in stream]


async def answer_of(engine: Engine, request: GenerateRequest) -> list[int]:
    return [token for event in await events_of(engine, request) for token in event.token_ids]


def library_of(engine: Any, release: str) -> Any:
    return engine._executor if release == "1.2" else engine._llm


@pytest.mark.parametrize("kind", ["llama", "baichuan2-7b", "baichuan2-13b", "mistral", "qwen2", "qwen3"])
async def test_two_gpus_answer_what_the_cpu_engine_answers(kind: str, build: Build, tmp_path: Path) -> None:
    """The shards went through our writer, and the fake joined them by rules of its own."""
    path = build("1.2", kind, tp_size=2, pp_size=1)
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256}
    if kind == "baichuan2-13b":
        sizes["num_attention_heads"] = 4
    checkpoint = make_checkpoint(tmp_path / "hf", kind, **sizes)
    build_engine(checkpoint, tmp_path / "cpu", BuildOptions(dtype="float16", tokens_per_block=8, max_batch_size=4))
    cpu = open_engine(tmp_path / "cpu", EngineSettings(threads=1))
    try:
        expected = await answer_of(cpu, REQUEST)
    finally:
        cpu.close()
    with opened(path, "1.2") as engine:
        assert await answer_of(engine, REQUEST) == expected
        if kind == "mistral":
            assert engine._executor.config.kv_cache_config.max_attention_window == [16, 16]


async def test_weight_only_engines_answer_from_rounded_weights(build: Build) -> None:
    path = build("1.2", quantization="int8")
    weights = load_file(path / "rank0.engine")
    assert weights["transformer.layers.0.mlp.fc.weight"].dtype == "int8"
    with opened(path, "1.2") as engine:
        assert len(await answer_of(engine, REQUEST)) == 12


def test_parameters_become_the_executors_configuration(build: Build) -> None:
    gpu = GpuSettings(
        enable_chunked_context=False, max_attention_window_size=(64, 32), sink_token_length=4,
        kv_cache_host_memory_bytes=1 << 20, kv_cache_onboard_blocks=False, iter_stats_max_iterations=7,
        gpu_device_ids=(1,), normalize_log_probs=False, multi_block_mode=False, cuda_graph_mode=True,
        gpu_weights_percent=0.5,
    )  # fmt: skip
    scheduler = SchedulerSettings(Policy.MAX_UTILIZATION, enable_block_reuse=False)
    path = build("1.2", context_fmha="disable")  # with it, the blocks have to come back to the GPU
    with opened(path, "1.2", EngineSettings(0, 0.5, 800, scheduler, gpu)) as engine:
        config = engine._executor.config
    kv = config.kv_cache_config
    assert (kv.enable_block_reuse, kv.free_gpu_memory_fraction, kv.max_tokens) == (False, 0.5, 800)
    assert (kv.max_attention_window, kv.sink_token_length) == ([64, 32], 4)
    assert (kv.host_cache_size, kv.onboard_blocks) == (1 << 20, False)
    assert config.scheduler_config.capacity_scheduler_policy.name == "MAX_UTILIZATION"
    assert (config.enable_chunked_context, config.normalize_log_probs, config.iter_stats_max_iterations) == (
        False,
        False,
        7,
    )
    assert (config.parallel_config.device_ids, config.gpu_weights_percent) == ([1], 0.5)
    knobs = config.extended_runtime_perf_knob_config
    assert (knobs.multi_block_mode, knobs.cuda_graph_mode) == (False, True)


def test_the_llm_gets_the_same_and_says_what_it_cannot_honour(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    gpu = GpuSettings(enable_chunked_context=False, max_attention_window_size=(64,), cuda_graph_mode=True)
    with opened(build("1.3", tp_size=2), "1.3", EngineSettings(3, 0.5, 800, gpu=gpu)) as engine:
        arguments = engine._llm.arguments
    assert (arguments["tensor_parallel_size"], arguments["enable_chunked_prefill"]) == (2, False)
    kv = arguments["kv_cache_config"]
    assert (kv.max_attention_window, kv.max_tokens, kv.tokens_per_block) == ([64], 800, 8)
    told = [record for record in caplog.records if not record.name.startswith("llmserve.builder")]
    assert [record.getMessage() for record in told if record.levelno == logging.WARNING] == [
        "num_threads = 3 has no effect on this engine",
        "parameter cuda_graph_mode = true has no effect on this engine",
    ]


def test_the_cpu_engine_says_what_is_for_gpus(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = make_checkpoint(tmp_path / "hf", "llama")
    build_engine(checkpoint, tmp_path / "e", BuildOptions(dtype="float32"))
    gpu = GpuSettings(max_beam_width=1, enable_chunked_context=True, sink_token_length=4, gpu_device_ids=(0, 1))
    open_engine(tmp_path / "e", EngineSettings(1, gpu=gpu)).close()
    assert [record.getMessage() for record in caplog.records] == [
        "parameter sink_token_length = 4 has no effect on this engine",
        "parameter gpu_device_ids = 0,1 has no effect on this engine",
    ]


@pytest.mark.parametrize("release", RELEASES)
async def test_statistics_are_the_librarys(release: str, build: Build) -> None:
    with opened(build(release), release) as engine:
        assert engine.stats().tokens_per_block == 8
        stream = engine.submit(replace(REQUEST, sampling=replace(GREEDY, max_tokens=200)))
        await anext(stream)
        async with asyncio.timeout(60):
            while not (stats := engine.stats()).iteration:  # noqa: ASYNC110 - 1.3 polls it
                await asyncio.sleep(0.01)
        await stream.aclose()
    assert stats.max_num_blocks > 0
    assert stats.gpu_mem_usage == 12345678
    assert engine.stats().num_active_requests == 0


@pytest.mark.parametrize("release", RELEASES)
async def test_a_crash_ends_every_stream_once_and_turns_readiness_off(
    release: str, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = threading.Semaphore(0)  # no answer is complete before the crash, however late this thread runs
    step = CpuRunner.step

    def allowed_step(self: CpuRunner, plan: StepPlan) -> StepResult:
        steps.acquire()
        return step(self, plan)

    with opened(build(release), release) as engine:
        monkeypatch.setattr(CpuRunner, "step", allowed_step)
        streams = [engine.submit(replace(REQUEST, sampling=replace(GREEDY, max_tokens=200))) for _ in range(3)]
        firsts = {asyncio.ensure_future(anext(stream)) for stream in streams}
        for _ in range(100):
            steps.release()
            _, waiting = await asyncio.wait(firsts, timeout=0.05)
            if not waiting:
                break
        assert not waiting
        library_of(engine, release).crash()
        steps.release(1000)
        for stream in streams:
            with pytest.raises(InternalError, match="failed"):
                async for _ in stream:
                    pass
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        assert not engine.healthy()
        with pytest.raises(Unavailable, match="failed"):
            engine.submit(REQUEST)


@pytest.mark.parametrize("release", RELEASES)
async def test_a_crash_while_nobody_asks_is_noticed(release: str, build: Build) -> None:
    with opened(build(release), release) as engine:
        assert engine.healthy()
        library_of(engine, release).crash()
        deadline = time.monotonic() + 60
        while engine.healthy():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)


async def test_priorities_reach_a_release_that_takes_them(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def generate_async(self: Any, inputs: list[int], *, priority: float = 0.5, **more: Any) -> Any:
        given.append(priority)
        return without(self, inputs, **more)

    path = build("1.3")
    with gpu_machine("1.3"):
        library = import_module("tensorrt_llm")
        without = library.LLM.generate_async
        monkeypatch.setattr(library.LLM, "generate_async", generate_async)
        engine = open_engine(path)
    await answer_of(engine, replace(REQUEST, priority=3))
    engine.close()
    assert given == [0.53]


async def test_beams_come_best_first_and_at_the_end(build: Build) -> None:
    with opened(build("1.2", max_beam_width=3), "1.2") as engine:
        assert engine.info.max_beam_width == 3
        request = replace(REQUEST, beam=BeamSearch(3, length_penalty=1.0, early_stopping=1), return_log_probs=True)
        events = await events_of(engine, request)
        assert [event.sequence_index for event in events] == [0, 1, 2]
        assert [event.finish_reason for event in events] == [FinishReason.LENGTH] * 3
        assert [len(event.token_ids) for event in events] == [12] * 3
        sums = [event.cum_log_prob for event in events]
        assert sums == sorted(sums, reverse=True)
        with pytest.raises(InvalidArgument, match="beam width must be from 1 to 3"):
            engine.submit(replace(request, beam=BeamSearch(4)))


async def test_limits_of_the_library_are_the_requests_fault(build: Build) -> None:
    narrow = EngineSettings(gpu=GpuSettings(enable_chunked_context=False))
    with opened(build("1.2", max_num_tokens=16), "1.2", narrow) as engine:
        with pytest.raises(InvalidArgument, match="takes at most 16"):
            engine.submit(replace(REQUEST, prompt_ids=(1,) * 17))
        with pytest.raises(InvalidArgument, match="top_k must be at most 1024"):
            engine.submit(replace(REQUEST, sampling=SamplingParams(top_k=2000)))
    with opened(build("1.2", max_num_tokens=16), "1.2") as engine:  # chunked, unless told otherwise
        assert len(await answer_of(engine, replace(REQUEST, prompt_ids=(1,) * 40))) == 12


@pytest.mark.parametrize("release", RELEASES)
async def test_the_queue_has_an_end(release: str, build: Build) -> None:
    settings = EngineSettings(scheduler=SchedulerSettings(max_queue_size=1))
    with opened(build(release), release, settings) as engine:
        request = replace(REQUEST, sampling=replace(GREEDY, max_tokens=200))
        streams = [engine.submit(request) for _ in range(6)]
        first = await asyncio.gather(*(anext(stream) for stream in streams), return_exceptions=True)
        assert [isinstance(each, TokenEvent) for each in first] == [True] * 5 + [False]
        assert isinstance(first[5], ResourceExhausted)
        assert "queue is full" in str(first[5])
        for stream in streams:
            await stream.aclose()
        with pytest.raises(InvalidArgument, match="ask for fewer"):
            await anext(engine.submit(replace(request, num_sequences=6)))
        assert len(await answer_of(engine, REQUEST)) == 12


def test_an_engine_that_does_not_fit_is_refused_before_anything_starts(build: Build) -> None:
    path = build("1.2", tp_size=2)
    with gpu_machine("1.3", FAKE_GPUS="1", FAKE_GPU_CAPABILITY="8.6"), pytest.raises(EngineFileError) as caught:
        open_engine(path)
    for words in ("3 problems", "1.2.1", "needs 2 GPUs", "--tp-size 1"):
        assert words in str(caught.value), str(caught.value)


def test_settings_that_do_not_go_with_the_engine_are_listed(build: Build) -> None:
    gpu = GpuSettings(max_beam_width=2, gpu_device_ids=(1,), executor_worker_path="/nowhere/executorWorker")
    with gpu_machine("1.2"), pytest.raises(EngineFileError) as caught:
        open_engine(build("1.2", tp_size=2), EngineSettings(gpu=gpu))
    for words in (
        "3 problems",
        "--max-beam-width 2",
        "names 1 GPUs, but the engine needs 2",
        "/nowhere/executorWorker",
    ):
        assert words in str(caught.value)


ANEW = [  # engines whose prompts may not begin in the cache, and why
    ("baichuan2-13b", {}, "TensorRT-LLM's ALiBi is not verified"),
    ("llama", {"context_fmha": "disable"}, "the engine was built with --context-fmha disable"),
]


@pytest.mark.parametrize(("kind", "flags", "reason"), ANEW)
async def test_prompts_that_start_anew(kind: str, flags: dict[str, Any], reason: str, build: Build) -> None:
    path = build("1.2", kind, max_num_tokens=16, **flags)
    with opened(path, "1.2") as engine:
        config = engine._executor.config
        assert (config.kv_cache_config.enable_block_reuse, config.enable_chunked_context) == (False, False)
        with pytest.raises(InvalidArgument, match="takes at most 16"):
            engine.submit(replace(REQUEST, prompt_ids=(1,) * 17))
        assert len(await answer_of(engine, REQUEST)) == 12
    asked = EngineSettings(
        scheduler=SchedulerSettings(enable_block_reuse=True), gpu=GpuSettings(enable_chunked_context=True)
    )
    with gpu_machine("1.2"), pytest.raises(EngineFileError) as caught:
        open_engine(path, asked)
    for name in ("enable_chunked_context", "enable_kv_cache_reuse"):
        assert f"{name} cannot be true: {reason}" in str(caught.value)


def test_blocks_come_back_to_the_gpu_where_kernels_read_them_there(build: Build) -> None:
    settings = EngineSettings(gpu=GpuSettings(kv_cache_onboard_blocks=False))
    with gpu_machine("1.2"), pytest.raises(EngineFileError, match="kv_cache_onboard_blocks cannot be false"):
        open_engine(build("1.2"), settings)


async def test_what_the_installed_sampler_ignores_is_refused(build: Build, tmp_path: Path) -> None:
    """Releases before the penalties, and before them min_p, took them and did nothing."""
    sampler = "_torch/pyexecutor/sampler"
    release = altered("1.3", tmp_path / "earlier", {
        f"{sampler}/sampler_common.py": ("    min_p: float | None = None\n", ""),
        f"{sampler}/penalties.py": ("sampling_config.", "of_nobody."),
    })  # fmt: skip
    penalized = replace(GREEDY, repetition_penalty=1.1, presence_penalty=0.5)
    drawn = SamplingParams(max_tokens=4, min_p=0.1, frequency_penalty=0.5)
    with opened(build("1.3"), release) as engine:
        with pytest.raises(InvalidArgument, match="ignores repetition_penalty, presence_penalty; leave them out"):
            engine.submit(replace(REQUEST, sampling=penalized))
        with pytest.raises(InvalidArgument, match="ignores min_p, frequency_penalty; leave them out"):
            engine.submit(replace(REQUEST, sampling=drawn))
        assert len(await answer_of(engine, REQUEST)) == 12
    with opened(build("1.3"), "1.3") as engine:
        assert len(await answer_of(engine, replace(REQUEST, sampling=penalized))) == 12


def test_a_cache_setting_that_a_release_has_no_more_is_reported(
    build: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    release = altered("1.3", tmp_path / "newer", {"llmapi/llm_args.py": ("    onboard_blocks: bool = True\n", "")})
    settings = EngineSettings(gpu=GpuSettings(kv_cache_onboard_blocks=True, kv_cache_host_memory_bytes=1 << 20))
    with opened(build("1.3"), release, settings) as engine:
        assert engine._llm.arguments["kv_cache_config"].host_cache_size == 1 << 20
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "parameter kv_cache_onboard_blocks has no effect on this engine: its release has no onboard_blocks"
    ]


def test_values_that_no_engine_takes_are_listed() -> None:
    with pytest.raises(InvalidArgument) as caught:
        GpuSettings(
            max_beam_width=0, max_attention_window_size=(64, 0), sink_token_length=-1, kv_cache_host_memory_bytes=-1,
            iter_stats_max_iterations=-1, gpu_device_ids=(0, 0), cuda_graph_cache_size=-1, gpu_weights_percent=2.0,
        )  # fmt: skip
    assert "8 problems" in str(caught.value)
    assert "gpu_device_ids must be distinct numbers, 0 or more, got 0,0" in str(caught.value)


def test_what_the_library_refuses_is_one_error(build: Build) -> None:
    refusing = gpu_machine("1.2", FAKE_TRTLLM_OPEN="CUDA out of memory")
    with refusing, pytest.raises(InternalError, match=r"could not open .*: .*CUDA out of memory"):
        open_engine(build("1.2"))


def test_the_directory_is_the_librarys_own_beside_our_manifest(build: Build) -> None:
    path = build("1.2")
    assert set(json.loads((path / "config.json").read_text())) == {"version", "pretrained_config", "build_config"}
