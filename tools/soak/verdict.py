"""The checks of a soak test, from what each of its periods measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MEMORY_SHARE = 0.02
P99_RATIO = 1.25
WARM_UP_SHARE = 0.1  # of the periods, at the beginning


@dataclass(frozen=True, slots=True)
class Period:
    """A minute of load and the quiet time after it, when no request is running."""

    num_answers: int
    problems: tuple[str, ...]  # wrong answers, and errors except for bad requests
    pss_bytes: int
    rss_bytes: int
    num_descriptors: int
    num_threads: int
    used_blocks: float  # of the KV cache
    num_active: float  # requests, according to the server
    first_p50_s: float
    first_p99_s: float
    gap_p50_s: float  # between two pieces
    gap_p99_s: float
    cpu_share: float  # of one core, the server's
    machine_load: float  # mean number of processes that wanted a core


@dataclass(frozen=True, slots=True)
class Check:
    what: str
    found: str
    holds: bool


def judge(periods: Sequence[Period]) -> list[Check]:
    """The first tenth of the periods, at least one, is warm-up: only answers and KV blocks are checked in it."""
    steady = periods[max(1, round(len(periods) * WARM_UP_SHARE)) :]
    if len(steady) < 2:
        raise ValueError(f"{len(periods)} periods are too few to judge: at least 3")
    problems = [problem for period in periods for problem in period.problems]
    num_answers = sum(period.num_answers for period in periods)
    held = [period for period in periods if period.used_blocks or period.num_active]
    wrong = f"{num_answers:,} requests, {len(problems)} problems"
    return [
        Check("each answer equals the one without load; bad requests are refused", wrong, not problems),
        Check("nothing held at rest", f"KV blocks or requests held after {len(held)} periods", not held),
        memory_check(steady),
        no_more("descriptors", steady, lambda period: period.num_descriptors),
        no_more("threads", steady, lambda period: period.num_threads),
        steady_check("first token", steady, lambda period: period.first_p99_s),
        steady_check("between tokens", steady, lambda period: period.gap_p99_s),
    ]


def memory_check(steady: Sequence[Period]) -> Check:
    """Compares each period with the first one. PSS would fall if another process mapped the same libraries."""
    base = steady[0].rss_bytes
    shares = [period.rss_bytes / base - 1 for period in steady]
    found = f"{base / 2**20:.1f} MiB after warm-up, then {min(shares):+.2%} to {max(shares):+.2%}"
    return Check(f"memory (RSS) within {MEMORY_SHARE:.0%}", found, max(map(abs, shares)) <= MEMORY_SHARE)


def no_more(name: str, steady: Sequence[Period], count: Callable[[Period], int]) -> Check:
    """Compares the maximum of the second half with that of the first."""
    first, second = (max(map(count, half)) for half in halves(steady))
    return Check(f"no growth of {name}", f"{first} at most, then {second}", second <= first)


def steady_check(name: str, steady: Sequence[Period], p99_s: Callable[[Period], float]) -> Check:
    """Compares the medians of the periods' p99 in both halves: one slow minute of a shared machine has no effect."""
    first, second = (statistics.median(map(p99_s, half)) for half in halves(steady))
    found = f"{1e3 * first:.1f} ms, then {1e3 * second:.1f} ms"
    return Check(f"p99 {name} at most {P99_RATIO} times", found, second <= P99_RATIO * first)


def halves(steady: Sequence[Period]) -> tuple[Sequence[Period], Sequence[Period]]:
    middle = len(steady) // 2
    return steady[:middle], steady[middle:]
