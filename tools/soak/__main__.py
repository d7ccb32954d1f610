"""`make soak`: a steady load on `llmserve serve ENGINE`, with checks of answers, memory, descriptors and latencies.

python -m tools.soak ENGINE [--seconds 3600] [--rate 5] [--report docs/benchmarks/soak.md]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from tools.benchmark.options import say
from tools.benchmark.statistics import quantile
from tools.servers import Endpoint, engine_server
from tools.soak.asking import CANCELLED_AFTER, STREAMS, Asker, StreamedAnswer, held, make_prompts
from tools.soak.report import report
from tools.soak.verdict import Period, judge

MAX_TOKENS, NUM_PROMPTS, SEED = 32, 64, 5
KV_TOKENS = 4096  # fewer than all prompts need, so that blocks are evicted continuously
KINDS = (*STREAMS, "http_whole", *STREAMS, "cancelled", "bad")
PERIOD_S, QUIET_S = 60.0, 0.5


class Soak:
    """One server's load, period after period. Create it in the event loop that runs it."""

    def __init__(self, server: Endpoint, rate: float) -> None:
        self._server = server
        self._rate = rate
        self._asker = Asker(server.grpc, server.http, max_tokens=MAX_TOKENS)
        self._prompts = make_prompts(NUM_PROMPTS, seed=SEED)
        self._numbers = itertools.count()
        self._expected: dict[tuple[str, str], str] = {}

    async def run(self, num_periods: int, period_s: float) -> list[Period]:
        periods = []
        try:
            for kind in (*STREAMS, "http_whole"):  # in parallel, to reach the most memory that the load can need
                answers = await asyncio.gather(*(self._asker.ask(kind, prompt) for prompt in self._prompts))
                if errors := [answer.error for answer in answers if answer.error]:
                    raise RuntimeError(f"an answer before the load: {errors[0]}")
                self._expected |= {(kind, p): answer.text for p, answer in zip(self._prompts, answers, strict=True)}
            for number in range(1, num_periods + 1):
                periods.append(await self._period(period_s))
                one = periods[-1]
                say(
                    f"{number}/{num_periods}: {one.num_answers} answers, RSS {one.rss_bytes / 2**20:.2f} MiB, "
                    f"{one.num_descriptors} descriptors, p99 {1e3 * one.first_p99_s:.1f} and "
                    f"{1e3 * one.gap_p99_s:.1f} ms, CPU {one.cpu_share:.0%}; {'; '.join(one.problems[:3])}"
                )
        finally:
            await self._asker.close()
        return periods

    async def _period(self, period_s: float) -> Period:
        """Sends requests at a steady rate, independent of earlier answers."""
        began, cpu_s = time.monotonic(), self._usage()["cpu_s"]
        tasks = []
        for number in range(max(1, int(self._rate * (period_s - QUIET_S)))):
            await asyncio.sleep(max(0.0, began + number / self._rate - time.monotonic()))
            tasks.append(asyncio.create_task(self._one(next(self._numbers))))
        results = await asyncio.gather(*tasks)
        await asyncio.sleep(max(QUIET_S, began + period_s - time.monotonic()))
        usage, (used_blocks, num_active) = self._usage(), await held(self._server.metrics_port)
        timed = [answer for answer, _ in results if answer is not None and len(answer.times_s) > 1]
        firsts = [answer.times_s[0] for answer in timed]
        gaps = [gap for answer in timed for gap in answer.gaps_s]
        return Period(
            num_answers=len(results),
            problems=tuple(problem for _, problem in results if problem),
            pss_bytes=int(usage["pss"]),
            rss_bytes=int(usage["rss"]),
            num_descriptors=int(usage["descriptors"]),
            num_threads=int(usage["threads"]),
            used_blocks=used_blocks,
            num_active=num_active,
            first_p50_s=quantile(firsts, 0.5),
            first_p99_s=quantile(firsts, 0.99),
            gap_p50_s=quantile(gaps, 0.5),
            gap_p99_s=quantile(gaps, 0.99),
            cpu_share=(usage["cpu_s"] - cpu_s) / (time.monotonic() - began),
            machine_load=os.getloadavg()[0],
        )

    async def _one(self, number: int) -> tuple[StreamedAnswer | None, str]:
        """Returns the answer, if it counts for latencies, and what is wrong with it."""
        kind, prompt = KINDS[number % len(KINDS)], self._prompts[number * 7 % NUM_PROMPTS]
        if kind == "bad":
            return None, await self._asker.ask_badly(number // len(KINDS))
        if kind == "cancelled":
            answer = await self._asker.ask("grpc_stream", prompt, pieces=CANCELLED_AFTER)
            right = self._expected["grpc_stream", prompt].startswith(answer.text)
        else:
            answer = await self._asker.ask(kind, prompt)
            right = answer.text == self._expected[kind, prompt]
        return answer, answer.error or ("" if right else f"{kind}: another text: {answer.text!r}")

    def _usage(self) -> Mapping[str, float]:
        """Resource usage of the server with all its processes."""
        root = psutil.Process(self._server.pid)
        sums = dict.fromkeys(("pss", "rss", "descriptors", "threads", "cpu_s"), 0.0)
        for process in (root, *root.children(recursive=True)):
            memory, cpu = process.memory_full_info(), process.cpu_times()
            found = (memory.pss, memory.rss, process.num_fds(), process.num_threads(), cpu.user + cpu.system)
            for name, value in zip(sums, found, strict=True):
                sums[name] += value
        return sums


def soak(engine: Path, seconds: int, rate: float) -> list[Period]:
    period_s = min(PERIOD_S, seconds / 10)
    flags = ("--threads", "1", "--max-kv-tokens", str(KV_TOKENS))
    with (
        TemporaryDirectory(prefix="llmserve-soak-") as folder,
        engine_server(engine, Path(folder) / "server.log", *flags) as server,
    ):
        return asyncio.run(run(server, rate, round(seconds / period_s), period_s))


async def run(server: Endpoint, rate: float, num_periods: int, period_s: float) -> list[Period]:
    return await Soak(server, rate).run(num_periods, period_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--seconds", type=int, default=3600)
    parser.add_argument("--rate", type=float, default=5.0, help="requests a second")
    parser.add_argument("--report", type=Path, help="file to write the report to")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the server, too
    periods = soak(given.engine, given.seconds, given.rate)
    checks = judge(periods)
    command = f"make soak SOAK_SECONDS={given.seconds}"
    page = report(periods, checks, seconds=given.seconds, rate=given.rate, command=command)
    if given.report:
        given.report.write_text(page, encoding="utf-8")
    say(page)
    sys.exit(0 if all(check.holds for check in checks) else 1)


if __name__ == "__main__":
    main()
