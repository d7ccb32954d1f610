"""How many cores this process may use, and how many threads an engine gets."""

from __future__ import annotations

import logging
import math
import os

from llmserve.engine.machine.cgroups import ControlGroup, control_groups
from llmserve.errors import InvalidArgument

MOST_THREADS_PER_CORE = 16  # more threads per core than this are a mistake

logger = logging.getLogger(__name__)


def usable_cores() -> int:
    """Cores in the affinity mask, or fewer if a control group's quota allows less time."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = quota_cores()
    return max(1, allowed if quota is None else min(allowed, quota))


def quota_cores() -> int | None:
    """Cores allowed by the quotas of control groups; None without a quota."""
    quotas = [_quota_cores(group) for group in control_groups("cpu")]
    return min((cores for cores in quotas if cores), default=None)


def num_threads(wanted: int) -> int:
    """`wanted` threads, or one per usable core if it is 0. More threads than cores are logged as a warning.

    Raises `InvalidArgument` for a number that is not sensible on this machine.
    """
    cores = usable_cores()
    if not 0 <= wanted <= MOST_THREADS_PER_CORE * cores:
        raise InvalidArgument(
            f"threads must be 0 (one per core) to {MOST_THREADS_PER_CORE * cores}, {MOST_THREADS_PER_CORE} for each of "
            f"the {cores} cores that this process may use; got {wanted}"
        )
    if wanted > cores:
        logger.warning("%d threads share %d cores; more threads than cores do not make an engine faster", wanted, cores)
    return wanted or cores


def _quota_cores(group: ControlGroup) -> int | None:
    """None without a quota."""
    if group.version == 1:
        texts = [group.read("cpu.cfs_quota_us"), group.read("cpu.cfs_period_us")]
    else:
        texts = group.read("cpu.max").split()
    try:
        quota, period = map(int, texts)
    except ValueError:  # missing, or "max"
        return None
    return math.ceil(quota / period) if quota > 0 and period > 0 else None
