"""`make chaos`, for some seconds: each fault but the kill, which tests/e2e/test_engine_process.py has."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tools.chaos.__main__ import chaos
from tools.chaos.plan import Fault

FAULTS = ("cut_network", "pause_engine", "full_disk", "clock_jump", "pause_server", "slow_network")


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_a_short_storm_leaves_answers_right_and_nothing_held(demo_engine: Path) -> None:
    plan = [Fault(kind, 1.0 + number, 0.3) for number, kind in enumerate(FAULTS)]
    asked, checks = chaos(demo_engine, plan, 7.0)
    assert [f"{check.what}: {check.found}" for check in checks if not (check.holds or "memory" in check.what)] == []
    assert len(asked) > len(FAULTS)
