"""The checks of a chaos test: acceptable and unacceptable effects of faults on answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tools.chaos.plan import Fault
from tools.soak.asking import StreamedAnswer
from tools.soak.verdict import Check

MEMORY_SHARE = 0.05  # of the server's process, idle before and after
CLEAR_ERRORS = (  # errors for a missing server or a broken connection
    "Unavailable:", "HTTPStatusError: Server error '503", "ReadError:", "RemoteProtocolError:", "ConnectError:",
    "WriteError:",
)  # fmt: skip
IN_STREAM = ("LlmserveError: ", "Unfinished: in the stream: ")  # errors in a stream have no status to check
ENGINE_ENDED = "the engine's process has ended"


@dataclass(frozen=True, slots=True)
class Asked:
    """Times are since the load began. `answer` is None if the request has not ended."""

    kind: str
    expected: str
    begin_s: float
    end_s: float
    answer: StreamedAnswer | None


@dataclass(frozen=True, slots=True)
class AtRest:
    """The idle server."""

    rss_bytes: int
    used_blocks: float
    num_active: float


def wrong(asked: Asked) -> str:
    """Returns what is wrong with the end of a request, or an empty string."""
    if asked.answer is None:
        return f"{asked.kind}: it has not ended"
    if not asked.answer.error:
        return "" if asked.answer.text == asked.expected else f"{asked.kind}: another text: {asked.answer.text!r}"
    if not asked.expected.startswith(asked.answer.text):
        return f"{asked.kind}: the beginning of another text: {asked.answer.text!r}"
    error = asked.answer.error
    clear = error.startswith(CLEAR_ERRORS) or (error.startswith(IN_STREAM) and ENGINE_ENDED in error)
    return "" if clear else f"{asked.kind}: {error}"


def judge(plan: Sequence[Fault], asked: Sequence[Asked], before: AtRest, after: AtRest) -> list[Check]:
    problems = [problem for one in asked if (problem := wrong(one))]
    never = [fault.kind for fault in plan if recovery_s(fault, asked) is None]
    held = f"{after.used_blocks:g} KV blocks, {after.num_active:g} requests"
    share = after.rss_bytes / before.rss_bytes - 1
    whole = sum(one.answer is not None and not one.answer.error for one in asked)
    ended = f"{len(asked):,} requests: {whole:,} answered, {len(asked) - whole - len(problems):,} refused or broken off"
    return [
        Check(
            "each request ends with its complete answer or, after part of it, a clear error",
            "; ".join([f"{ended}, {len(problems)} wrong", *problems[:5]]),
            not problems,
        ),
        Check("nothing held afterwards", held, not after.used_blocks and not after.num_active),
        Check(
            f"memory of the server's process within {MEMORY_SHARE:.0%}",
            f"{before.rss_bytes / 2**20:.1f} MiB, {share:+.1%}",
            abs(share) <= MEMORY_SHARE,
        ),
        Check("recovers from each fault", ", ".join(never) or f"{len(plan)} faults", not never),
    ]


def recovery_s(fault: Fault, asked: Sequence[Asked]) -> float | None:
    """Seconds from a fault's end to the first complete answer to a later request; None: there was none."""
    over_s = fault.begin_s + fault.lasts_s
    ends = [one.end_s for one in asked if one.begin_s >= over_s and one.answer is not None and not one.answer.error]
    return min(ends) - over_s if ends else None
