"""Measures CPU time per token of an engine in this process and in its own process.

    python -m tools.bench_engine_process ENGINE [--streams 64] [--tokens 256] [--rounds 5]

Both run in turn. "consumer" is this process: with the engine in this process, it includes the engine; otherwise only
what a server does with tokens. Then it measures how long writing and reading the message of one step takes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import NamedTuple

import psutil

from llmserve.cli.backends import ENGINE_PROCESS
from llmserve.core import GenerateRequest, SamplingParams, TokenEvent
from llmserve.engine.base import Engine
from llmserve.engine.open import open_engine
from llmserve.engine.remote.frames import FrameReader, preamble
from llmserve.engine.remote.messages import EventWriter, read_events
from llmserve.engine.remote.process import ProcessEngine
from llmserve.engine.settings import EngineSettings

US = 1e6
NUM_MESSAGES = 500


class Cost(NamedTuple):
    """Results of one round, per token, in microseconds: CPU time here and in the engine's process, and elapsed time."""

    consumer_us: float
    engine_us: float
    clock_us: float


async def ask(engine: Engine, num_streams: int, num_tokens: int, round_: int) -> int:
    async def answer(number: int) -> int:
        prompt = tuple((number + 7 * i + round_) % 4000 + 100 for i in range(16))
        request = GenerateRequest(str(number), prompt, SamplingParams(max_tokens=num_tokens, temperature=0.0))
        async with aclosing(engine.submit(request)) as stream:
            return sum([len(event.token_ids) async for event in stream])

    return sum(await asyncio.gather(*map(answer, range(num_streams))))


def measured(engine: Engine, pid: int, num_streams: int, num_tokens: int, round_: int) -> Cost:
    def cpu_s(pid: int) -> float:
        times = psutil.Process(pid).cpu_times()
        return times.user + times.system

    def now() -> tuple[float, float, float]:
        return cpu_s(os.getpid()), cpu_s(pid), time.perf_counter()

    before = now()
    count = asyncio.run(ask(engine, num_streams, num_tokens, round_))
    here, there, clock = (US * (end - begin) / count for end, begin in zip(now(), before, strict=True))
    return Cost(here, 0.0 if pid == os.getpid() else there, clock)


def message_cost(num_streams: int) -> tuple[int, float, float]:
    """Bytes of a step's message, and microseconds for writing and reading it."""
    events = [TokenEvent((1000 + number,)) for number in range(num_streams)]

    def written() -> bytes:
        writer = EventWriter()
        for number, event in enumerate(events):
            writer.add(number, event)
        return writer.frame().encoded()

    data = written()
    reader = FrameReader(1 << 30)
    list(reader.feed(preamble()))

    def read() -> None:
        for frame in reader.feed(data):
            assert len(read_events(frame)) == num_streams

    return len(data), median_us(written), median_us(read)


def median_us(work: Callable[[], object]) -> float:
    times = []
    for _ in range(NUM_MESSAGES):
        begin = time.perf_counter()
        work()
        times.append(US * (time.perf_counter() - begin))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    settings = EngineSettings(threads=options.threads, max_kv_tokens=options.streams * (options.tokens + 64))
    here = open_engine(options.engine, settings)
    there = ProcessEngine(ENGINE_PROCESS, options.engine, options.engine, settings)
    engines: dict[str, tuple[Engine, int]] = {"in this process": (here, os.getpid()), "own process": (there, there.pid)}
    costs: dict[str, list[Cost]] = {name: [] for name in engines}
    for round_ in range(options.rounds + 1):  # the first warms up
        for name, (engine, pid) in engines.items():
            cost = measured(engine, pid, options.streams, options.tokens, round_)
            if round_:
                costs[name].append(cost)
    for name, rounds in costs.items():
        consumer, engine_us, clock = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(
            f"{name:16} CPU us a token: consumer {consumer:6.1f}, engine's process {engine_us:6.1f}, "
            f"together {consumer + engine_us:6.1f}; by the clock {clock:6.1f}"
        )
    size, write_us, read_us = message_cost(options.streams)
    print(f"a step of {options.streams}: {size} bytes, {write_us:.0f} us to write, {read_us:.0f} us to read")
    here.close()
    there.close()


if __name__ == "__main__":
    main()
