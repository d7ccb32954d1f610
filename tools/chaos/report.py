"""Writes `docs/benchmarks/chaos.md`."""

from __future__ import annotations

from collections.abc import Sequence

from llmserve.engine.machine.description import machine_name
from tools.benchmark.markdown import table
from tools.benchmark.statistics import Spread
from tools.chaos.plan import FAULTS, Fault
from tools.chaos.verdict import Asked, recovery_s
from tools.soak.verdict import Check

MEANINGS = {
    "kill_engine": "the engine's process is killed (SIGKILL), and restarts after 1, 2, 4, 8, 16 s",
    "pause_engine": "the engine's process is stopped (SIGSTOP), then continues",
    "pause_server": "the server's process is stopped, then continues",
    "slow_network": "50 ms of delay in each direction",
    "cut_network": "every connection is cut",
    "full_disk": "writes to files fail (RLIMIT_FSIZE of 0)",
    "clock_jump": "the wall clock jumps an hour ahead, then back",
}


def report(plan: Sequence[Fault], asked: Sequence[Asked], checks: Sequence[Check], command: str, seconds: float) -> str:
    verdict = "All checks hold." if all(check.holds for check in checks) else "**Not all checks hold.**"
    parts = [
        "# Chaos test",
        f"`{command}` on {machine_name()}: {seconds:.0f} s of `llmserve serve --engine-process` with the demo engine\n"
        f"under load over gRPC, HTTP and `/v1`, with {len(plan)} faults in sequence. {verdict}",
        table(["check", "found", "holds"], ([c.what, c.found, "yes" if c.holds else "**no**"] for c in checks)),
        "Recovery is the time from the end of a fault (of a kill: from the kill) to the first complete answer to a\n"
        "request that was sent after it: median (lowest-highest).",
        table(["fault", "what happens", "times", "recovery, s"], (line(kind, plan, asked) for kind in FAULTS)),
        "Cluster workers are not included; the tests kill them during streams ([clusters](../cluster.md)).\n"
        "A preloaded library shifts the programs' wall clock, because setting the machine's clock requires root.",
    ]
    return "\n\n".join(parts) + "\n"


def line(kind: str, plan: Sequence[Fault], asked: Sequence[Asked]) -> list[str]:
    times = [recovery_s(fault, asked) for fault in plan if fault.kind == kind]
    known = [time for time in times if time is not None]
    return [kind, MEANINGS[kind], str(len(times)), Spread.of(known).text(digits=2) if known else ""]
