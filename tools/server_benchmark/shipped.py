"""Measures what a streamed token costs without a model: runs the shipped pipelines over a fake engine, by stage.

    python -m tools.server_benchmark.shipped engine --streams 32 --seconds 4     measures itself, prints JSON
    python -m tools.server_benchmark.shipped serve --wire grpcio                 prints its ports, serves until SIGTERM

Each stage includes the previous one: `engine` is `Engine.submit`, `stages` adds direct calls of the generate and
postprocess steps, `ensemble` is the server core with the repository of `pipelines/`, `serve` adds the wires.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import signal
import sys
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import uvloop

from llmserve.backends.python.backend import PythonBackend
from llmserve.backends.tensorrtllm import TensorrtLlmBackend
from llmserve.cli.pipelines import packaged_repository
from llmserve.cli.serve import COLLECTOR_THRESHOLDS
from llmserve.core import GenerateRequest, SamplingParams
from llmserve.engine.base import Engine, RunnerInfo
from llmserve.engine.fake import fake_engine
from llmserve.frontends.grpc.inference_service import start_grpc
from llmserve.frontends.http.inference_api import start_http
from llmserve.frontends.text.front_end import text_apis
from llmserve.serving.backend import Backend
from llmserve.serving.core import InferenceCore, ServerSettings
from llmserve.serving.types import InferRequest, Tensor
from llmserve.stages.generate import generate
from llmserve.stages.postprocess import Postprocessor
from llmserve.stages.tokenizer import load_tokenizer
from tools.server_benchmark.grpcio_wire import start_grpcio
from tools.server_benchmark.repository import TOKENS

CHECKPOINT = Path(__file__).resolve().parents[2] / "build" / "checkpoints" / "baichuan2-tiny-docsum"
HOST = "127.0.0.1"
LIMITS = RunnerInfo(
    vocab_size=5120, block_size=16, num_blocks=4096, max_num_tokens=4096, max_batch_size=256, max_seq_len=512
)
WARM_S = 0.5
Stream = Callable[[str], AsyncGenerator[object, None]]  # the answer to a prompt, of TOKENS events


class CallCount:
    """Counts calls of Python functions, including resumed generators, except in the engine's thread."""

    def __init__(self) -> None:
        self.total = 0

    def __enter__(self) -> CallCount:
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        return self

    def __exit__(self, *failure: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _see(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and not threading.current_thread().name.startswith("llmserve-engine"):
            self.total += 1


def make_engine() -> Engine:
    return fake_engine(LIMITS)


def engine_stream(engine: Engine, prompt_ids: tuple[int, ...]) -> AsyncGenerator[object, None]:
    return engine.submit(_request(prompt_ids))


async def stages_stream(
    engine: Engine, postprocessor: Postprocessor, prompt_ids: tuple[int, ...]
) -> AsyncGenerator[object, None]:
    async with aclosing(generate(engine, _request(prompt_ids), tokenizer=postprocessor.tokenizer)) as events:
        async for event in events:
            yield postprocessor.event_text(event)


def _request(prompt_ids: tuple[int, ...]) -> GenerateRequest:
    return GenerateRequest("r", prompt_ids, SamplingParams(max_tokens=TOKENS, temperature=0.0))


@asynccontextmanager
async def running_core(step_s: float = 0.0) -> AsyncIterator[InferenceCore]:
    """`step_s`: the time of an engine's step."""
    tokenizer = {"tokenizer_dir": str(CHECKPOINT)}
    settings = ServerSettings(
        (packaged_repository(),),
        parameter_overrides={
            "preprocessing": tokenizer,
            "postprocessing": tokenizer,
            "tensorrt_llm": {"gpt_model_path": str(CHECKPOINT)},
        },
    )
    backends: dict[str, Backend] = {
        "tensorrtllm": TensorrtLlmBackend(lambda path, limits: fake_engine(LIMITS, step_delay_s=step_s)),
        "python": PythonBackend(),
    }
    core = InferenceCore(settings, backends)
    await core.start()
    if not core.ready():
        raise RuntimeError(f"the pipelines were not loaded: {core.repository_index()}")
    try:
        yield core
    finally:
        await core.stop(1.0)


def prompt(number: int) -> str:
    """A different prompt for each stream, so that streams cannot reuse each other's decoded text."""
    return f"Return the sum of two numbers and {7919 * number}."


def ensemble_request(text: str) -> InferRequest:
    values = {
        "text_input": ("BYTES", np.array([[text.encode()]], dtype=object)),
        "max_tokens": ("INT32", np.array([[TOKENS]], np.int32)),
        "end_id": ("INT32", np.array([[-1]], np.int32)),
        "stream": ("BOOL", np.array([[True]])),
    }
    return InferRequest("ensemble", {name: Tensor(name, *value) for name, value in values.items()})


@asynccontextmanager
async def opened(stage: str) -> AsyncIterator[Stream]:
    """Yields a function that generates one answer at that stage."""
    if stage == "ensemble":
        async with running_core() as core:
            yield lambda text: core.infer_stream(ensemble_request(text))
        return
    engine, postprocessor = make_engine(), Postprocessor(load_tokenizer(CHECKPOINT))
    encode = lru_cache(postprocessor.tokenizer.encode)
    try:
        if stage == "engine":
            yield lambda text: engine_stream(engine, tuple(encode(text)))
        else:
            yield lambda text: stages_stream(engine, postprocessor, tuple(encode(text)))
    finally:
        await asyncio.to_thread(engine.close)


async def measured(stage: str, num_streams: int, seconds: float) -> dict[str, float]:
    """CPU microseconds and Python calls per event, of this whole process."""
    sys.set_asyncgen_hooks(firstiter=None)  # as in `llmserve serve`
    async with opened(stage) as stream:
        await _for(WARM_S, stream, num_streams)
        began = time.process_time()
        num_events = await _for(seconds, stream, num_streams)
        cpu_s = time.process_time() - began
        with CallCount() as calls:
            num_counted = await _for(WARM_S, stream, num_streams)
    return {"cpu_us": 1e6 * cpu_s / num_events, "calls": calls.total / num_counted}


async def _for(seconds: float, stream: Stream, num_streams: int) -> int:
    """Runs answers that start within that time to their ends; returns their number of events."""
    end = time.monotonic() + seconds

    async def one_after_the_other(text: str) -> int:
        num_events = 0
        while time.monotonic() < end:
            async with aclosing(stream(text)) as events:
                async for _ in events:
                    num_events += 1
        return num_events

    return sum(await asyncio.gather(*(one_after_the_other(prompt(number)) for number in range(num_streams))))


async def serve(wire: str, count_calls: bool, step_s: float) -> None:
    """Serves until SIGTERM. SIGUSR1 prints the numbers of calls and tokens."""
    stopped = asyncio.Event()
    loop, calls = asyncio.get_running_loop(), CallCount()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    async with AsyncExitStack() as running:
        if count_calls:
            running.enter_context(calls)
        sys.set_asyncgen_hooks(firstiter=None)
        core = await running.enter_async_context(running_core(step_s))
        loop.add_signal_handler(
            signal.SIGUSR1, lambda: say(calls=calls.total, tokens=core.statistics("postprocessing")[0].inference_count)
        )
        start: Callable[..., Awaitable[Any]] = start_grpcio if wire == "grpcio" else start_grpc
        grpc, http = await start(core, HOST, 0), await start_http(core, HOST, 0, mounts=[text_apis])
        running.push_async_callback(grpc.stop)
        running.push_async_callback(http.stop)
        say(grpc_port=grpc.port, http_port=http.port)
        await stopped.wait()


def say(**values: float) -> None:
    print(json.dumps(values), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=("engine", "stages", "ensemble", "serve"))
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--wire", choices=("llmserve", "grpcio"), default="llmserve", help="gRPC's, of `serve`")
    parser.add_argument("--count-calls", action="store_true", help="of Python functions, while it serves: slow")
    parser.add_argument("--step-ms", type=float, default=0.0, help="that a step of the engine takes, when it serves")
    given = parser.parse_args()
    uvloop.install()
    gc.set_threshold(*COLLECTOR_THRESHOLDS)
    if given.stage == "serve":
        asyncio.run(serve(given.wire, given.count_calls, given.step_ms / 1000))
    else:
        say(**asyncio.run(measured(given.stage, given.streams, given.seconds)))


if __name__ == "__main__":
    main()
