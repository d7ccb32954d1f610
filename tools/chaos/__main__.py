"""`make chaos`: runs one server under load while its processes, network, disk and clock fail.

python -m tools.chaos ENGINE [--seconds 600] [--seed 1] [--report docs/benchmarks/chaos.md]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import resource
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from tools.benchmark.options import say
from tools.chaos.clock import Clock
from tools.chaos.plan import Fault, make_plan
from tools.chaos.proxy import Proxy
from tools.chaos.report import report
from tools.chaos.verdict import Asked, AtRest, judge
from tools.servers import Endpoint, engine_server
from tools.soak.asking import STREAMS, Asker, held, make_prompts
from tools.soak.verdict import Check

KINDS = (*STREAMS, "http_whole")
NUM_USERS, THINK_S, MAX_TOKENS, NUM_PROMPTS, SEED = 4, 0.5, 64, 16, 7
DELAY_S = 0.05
AHEAD_S = 3600
QUIET_S, END_S = 1.0, 90.0


class Storm:
    """The users of one server, and its faults. Create it in the event loop that runs it."""

    def __init__(self, server: Endpoint, clock: Clock) -> None:
        self._server, self._clock = server, clock
        self._process = psutil.Process(server.pid)
        self._proxies = (Proxy(server.grpc_port), Proxy(server.http_port))
        self._prompts = make_prompts(NUM_PROMPTS, seed=SEED, longest=60)
        self._questions = itertools.cycle(itertools.product(self._prompts, KINDS))
        self._expected: dict[tuple[str, str], str] = {}
        self.asked: list[Asked] = []

    async def run(self, plan: Sequence[Fault], seconds: float) -> list[Check]:
        asker = Asker(*[await proxy.start() for proxy in self._proxies], max_tokens=MAX_TOKENS)
        try:
            keys = list(itertools.product(KINDS, self._prompts))
            found = await asyncio.gather(
                *(asker.ask(*key) for key in keys)
            )  # in parallel, to reach the most memory that the load can need
            self._expected = {key: answer.text for key, answer in zip(keys, found, strict=True)}
            if errors := [answer.error for answer in found if answer.error]:
                raise RuntimeError(f"an answer before the load: {errors[0]}")
            before = await self._at_rest()
            began = time.monotonic()
            users = [asyncio.create_task(self._user(asker, began, seconds)) for _ in range(NUM_USERS)]
            for fault in plan:
                await asyncio.sleep(max(0.0, began + fault.begin_s - time.monotonic()))
                say(f"{fault.begin_s:6.1f} s: {fault.kind}, {fault.lasts_s:.1f} s")
                await self._strike(fault)
            await asyncio.wait(users, timeout=max(0.0, began + seconds - time.monotonic()) + END_S)
            for user in users:
                user.cancel()
            return judge(plan, self.asked, before, await self._at_rest())
        finally:
            await asker.close()
            for proxy in self._proxies:
                await proxy.close()

    async def _user(self, asker: Asker, began: float, seconds: float) -> None:
        is_last = False
        while not is_last:
            is_last = time.monotonic() >= began + seconds  # so that a request is sent after the last fault
            prompt, kind = next(self._questions)
            begin_s, answer = time.monotonic() - began, None
            try:
                answer = await asker.ask(kind, prompt)
            finally:
                end_s = time.monotonic() - began
                self.asked.append(Asked(kind, self._expected[kind, prompt], begin_s, end_s, answer))
            await asyncio.sleep(THINK_S)

    async def _strike(self, fault: Fault) -> None:
        """Applies the fault, and returns when it is over."""
        await getattr(self, f"_{fault.kind}")(fault.lasts_s)

    async def _kill_engine(self, lasts_s: float) -> None:
        self._engine().kill()

    async def _pause_engine(self, lasts_s: float) -> None:
        await paused(self._engine(), lasts_s)

    async def _pause_server(self, lasts_s: float) -> None:
        await paused(self._process, lasts_s)

    async def _slow_network(self, lasts_s: float) -> None:
        for proxy in self._proxies:
            proxy.delay_s = DELAY_S
        await asyncio.sleep(lasts_s)
        for proxy in self._proxies:
            proxy.delay_s = 0.0

    async def _cut_network(self, lasts_s: float) -> None:
        for proxy in self._proxies:
            proxy.cut()

    async def _full_disk(self, lasts_s: float) -> None:
        both = [self._process, self._engine()]
        limits = [process.rlimit(resource.RLIMIT_FSIZE) for process in both]
        for process, (_, hard) in zip(both, limits, strict=True):
            process.rlimit(resource.RLIMIT_FSIZE, (0, hard))
        await asyncio.sleep(lasts_s)
        for process, limit in zip(both, limits, strict=True):
            process.rlimit(resource.RLIMIT_FSIZE, limit)

    async def _clock_jump(self, lasts_s: float) -> None:
        self._clock.jump(AHEAD_S)
        await asyncio.sleep(lasts_s)
        self._clock.jump(0)

    def _engine(self) -> psutil.Process:
        (engine,) = self._process.children()
        return engine

    async def _at_rest(self) -> AtRest:
        await asyncio.sleep(QUIET_S)
        blocks, active = await held(self._server.metrics_port)
        return AtRest(self._process.memory_info().rss, blocks, active)


async def paused(process: psutil.Process, seconds: float) -> None:
    process.suspend()
    try:
        await asyncio.sleep(seconds)
    finally:
        process.resume()


async def storm(
    server: Endpoint, clock: Clock, plan: Sequence[Fault], seconds: float
) -> tuple[list[Asked], list[Check]]:
    made = Storm(server, clock)
    checks = await made.run(plan, seconds)
    return made.asked, checks


def chaos(engine: Path, plan: Sequence[Fault], seconds: float) -> tuple[list[Asked], list[Check]]:
    with TemporaryDirectory(prefix="llmserve-chaos-") as name:
        folder = Path(name)
        clock = Clock(folder)
        flags = ("--engine-process", "--threads", "1", "--max-kv-tokens", "8192", "--log-verbose", "1")
        trace = f"triton,file={folder / 'trace.json'}"
        more = ("--log-file", str(folder / "log"), "--trace-config", trace, "--trace-config", "rate=1")
        with engine_server(engine, folder / "server.log", *flags, *more, environment=clock.environment) as server:
            return asyncio.run(storm(server, clock, plan, seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path, help="file to write the report to")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the server, too
    plan = make_plan(given.seed, given.seconds)
    asked, checks = chaos(given.engine, plan, given.seconds)
    command = f"make chaos CHAOS_SECONDS={given.seconds} CHAOS_SEED={given.seed}"
    page = report(plan, asked, checks, command, given.seconds)
    if given.report:
        given.report.write_text(page, encoding="utf-8")
    say(page)
    sys.exit(0 if all(check.holds for check in checks) else 1)


if __name__ == "__main__":
    main()
