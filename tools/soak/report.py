"""Writes `docs/benchmarks/soak.md`."""

from __future__ import annotations

from collections.abc import Sequence

from llmserve.engine.machine.description import machine_name
from tools.benchmark.markdown import table
from tools.soak.verdict import Check, Period

HEAD = (
    "minute", "answers", "PSS, MiB", "RSS, MiB", "descriptors", "threads", "first token p50, ms", "p99",
    "between tokens p50, ms", "p99", "server's CPU", "machine's load",
)  # fmt: skip
NUM_ROWS = 6
HOW = """Each minute's load ends when all its answers have ended. Half a second later, with no request under way, the
tool reads the server's memory, descriptors, threads and KV blocks. The first tenth of the minutes is warm-up. After
it, the RSS of each minute must be within 2 % of the first one's, and the second half must not have more descriptors
or threads than the first. The p99 check compares the medians of the minutes' p99 in both halves. PSS depends on which
other programs map the same libraries, so no check uses it. "Load" is the load average of the machine."""


def report(periods: Sequence[Period], checks: Sequence[Check], *, seconds: int, rate: float, command: str) -> str:
    verdict = "All checks hold." if all(check.holds for check in checks) else "**Not all checks hold.**"
    length = seconds / len(periods)
    minutes = "" if length == 60 else f' A "minute" is {length:.0f} s here.'
    parts = [
        "# Soak test",
        f"`{command}` on {machine_name()}: {seconds / 60:.0f} minutes of `llmserve serve` with the demo engine at\n"
        f"{rate:g} requests per second over loopback: streams over gRPC, HTTP and `/v1`, unary requests over HTTP,\n"
        f"streams that the client cancels, and bad requests, in turn.{minutes} {verdict}",
        table(["check", "found", "holds"], ([c.what, c.found, "yes" if c.holds else "**no**"] for c in checks)),
        HOW,
        table(HEAD, (line(number, periods[number - 1]) for number in shown(len(periods)))),
    ]
    return "\n\n".join(parts) + "\n"


def shown(count: int) -> list[int]:
    """The numbers of the first and the last minute, and some in between."""
    return sorted({1 + number * (count - 1) // (NUM_ROWS - 1) for number in range(NUM_ROWS)})


def line(number: int, period: Period) -> list[str]:
    times = (period.first_p50_s, period.first_p99_s, period.gap_p50_s, period.gap_p99_s)
    return [
        str(number), str(period.num_answers), f"{period.pss_bytes / 2**20:.2f}", f"{period.rss_bytes / 2**20:.2f}",
        str(period.num_descriptors), str(period.num_threads), *(f"{1e3 * time:.1f}" for time in times),
        f"{period.cpu_share:.0%}", f"{period.machine_load:.1f}",
    ]  # fmt: skip
