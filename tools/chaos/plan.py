"""Which faults come when: the same seed and length give the same plan."""

from __future__ import annotations

import random
from dataclasses import dataclass

MOST_KILLS = 5  # of the engine: after so many in a row it is left alone, by design
CALM_S = 4.0  # between the end of a fault and the next one, at least
LONGEST_PAUSE_S = 2.0
RESTARTS_S = (2.0, 4.0, 8.0, 16.0, 32.0)  # until a killed engine may answer again; its pauses double
FAULTS = ("kill_engine", "pause_engine", "pause_server", "slow_network", "cut_network", "full_disk", "clock_jump")


@dataclass(frozen=True, slots=True)
class Fault:
    """`begin_s` since the load began. A kill and a cut last no time."""

    kind: str
    begin_s: float
    lasts_s: float = 0.0


def make_plan(seed: int, seconds: float) -> list[Fault]:
    """Every kind comes before any comes again. The last calm ends with the load."""
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
