"""Plans the times of faults: the same seed and length give the same plan."""

from __future__ import annotations

import random
from dataclasses import dataclass

MOST_KILLS = 5  # of the engine: by design, it is not restarted after this many in a row
CALM_S = 4.0  # at least, from the end of a fault to the next one
LONGEST_PAUSE_S = 2.0
RESTARTS_S = (2.0, 4.0, 8.0, 16.0, 32.0)  # for a killed engine to answer again; its pauses double
FAULTS = ("kill_engine", "pause_engine", "pause_server", "slow_network", "cut_network", "full_disk", "clock_jump")


@dataclass(frozen=True, slots=True)
class Fault:
    """`begin_s` is the time since the load began. A kill and a cut have no duration."""

    kind: str
    begin_s: float
    lasts_s: float = 0.0


def make_plan(seed: int, seconds: float) -> list[Fault]:
    """Returns faults: every kind occurs before any is repeated. The load ends after a calm period."""
    generator = random.Random(seed)
    plan: list[Fault] = []
    num_kills, begin_s = 0, CALM_S
    waiting: list[str] = []
    while True:
        if not waiting:
            waiting = generator.sample(FAULTS, len(FAULTS))
        kind = waiting.pop()
        if kind == "kill_engine" and num_kills == MOST_KILLS:
            continue
        lasts_s = 0.0 if kind in ("kill_engine", "cut_network") else generator.uniform(0.5, LONGEST_PAUSE_S)
        recovers_s = RESTARTS_S[num_kills] if kind == "kill_engine" else 0.0
        calm_from_s = begin_s + lasts_s + recovers_s + CALM_S
        if calm_from_s > seconds:
            return plan
        num_kills += kind == "kill_engine"
        plan.append(Fault(kind, begin_s, lasts_s))
        begin_s = calm_from_s + generator.uniform(0.0, CALM_S)
