"""One thing that reads bytes, how its bytes are made, and what may come of them.

Allowed is an answer or an error of the project's own. Not allowed: any other exception, an error in the log, seconds of
CPU for one input, much memory, no answer.
"""

from __future__ import annotations

import faulthandler
import hashlib
import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from llmserve.errors import LlmserveError

CORPUS = Path(__file__).parent / "corpus"
MAX_CPU_S = 2.0  # of one input, on this thread
MAX_GROWTH_BYTES = 512 * 2**20  # of the process, by one input
HANG_S = 60
EXAMPLES_A_ROUND = 25


class Finding(AssertionError):
    """What one input did that none may do."""


@dataclass(frozen=True, slots=True)
class Target:
    name: str
    inputs: st.SearchStrategy[bytes]
    run: Callable[[bytes], None]

    @property
    def corpus(self) -> list[Path]:
        return sorted((CORPUS / self.name).glob("*.bin"))

    def check(self, data: bytes) -> None:
        """Raises `Finding`."""
        before = reset_peak()
        begin = time.thread_time()
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        try:
            with watched_log() as errors, suppress(LlmserveError):
                self.run(data)
        except Finding:
            raise
        except Exception as error:
            raise Finding(f"{self.name}: {error!r}") from error
        finally:
            faulthandler.cancel_dump_traceback_later()
        if errors:
            raise Finding(f"{self.name}: the log says {errors[:3]}")
        if (took := time.thread_time() - begin) > MAX_CPU_S:
            raise Finding(f"{self.name}: {len(data)} bytes took {took:.1f} s")
        if (grown := peak_bytes() - before) > MAX_GROWTH_BYTES:
            raise Finding(f"{self.name}: {len(data)} bytes took {grown / 2**20:.0f} MiB")


def reset_peak() -> int:
    """The process's memory in bytes, from which its peak counts anew: tests before may have had more."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def peak_bytes() -> int:
    """The most physical memory that the process has had, in bytes."""
    (kilobytes,) = re.findall(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return 1024 * int(kilobytes)


@contextmanager
def watched_log() -> Iterator[list[str]]:
    """What is logged as an error meanwhile: exceptions that somebody has caught at a border."""
    seen: list[str] = []

    class Watcher(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(f"{record.getMessage()} {record.exc_info[1]!r}" if record.exc_info else record.getMessage())

    watcher = Watcher(logging.ERROR)
    loggers = [logging.getLogger(name) for name in ("llmserve", "asyncio")]
    for logger in loggers:
        logger.addHandler(watcher)
    try:
        yield seen
    finally:
        for logger in loggers:
            logger.removeHandler(watcher)


def fuzz(target: Target, seconds: float, *, first_round: int = 0) -> int:
    """Draw inputs until the time is over; their number. Raises `Finding`, having written the smallest such input.

    Every round has a seed of its own; `first_round` makes a run differ from another.
    """
    end = time.monotonic() + seconds
    num_inputs, round_number, last = 0, first_round, b""
    running_file = CORPUS / target.name / "running"  # of an input that ends the process, this is what is left

    def one(data: bytes) -> None:
        nonlocal num_inputs, last
        num_inputs += 1
        last = data
        running_file.write_bytes(data)
        target.check(data)

    running_file.parent.mkdir(parents=True, exist_ok=True)
    while time.monotonic() < end:
        drawn = settings(
            max_examples=EXAMPLES_A_ROUND,
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )(seed(round_number)(given(target.inputs)(one)))
        try:
            drawn()
        except Finding as finding:  # Hypothesis has run the smallest one last
            path = running_file.with_name(f"{hashlib.sha256(last).hexdigest()[:16]}.bin")
            path.write_bytes(last)
            raise Finding(f"{finding}; the input is {path.relative_to(CORPUS.parents[2])}") from finding
        round_number += 1
    running_file.unlink(missing_ok=True)
    return num_inputs
