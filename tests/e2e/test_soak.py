"""`make soak`, for some seconds."""

from __future__ import annotations

from pathlib import Path

from tools.soak.__main__ import soak
from tools.soak.report import report
from tools.soak.verdict import judge


def test_a_short_one_asks_every_kind_and_leaves_nothing_behind(demo_engine: Path) -> None:
    """Not checked: latency and memory, which need an hour."""
    periods = soak(demo_engine, 12, 20.0)
    assert len(periods) == 10
    assert sum(period.num_answers for period in periods) >= 100
    checks = judge(periods)
    assert [check.holds for check in checks[:2]] == [True, True]
    assert all(period.first_p99_s > 0 and period.pss_bytes > 2**20 for period in periods)
    page = report(periods, checks, seconds=12, rate=20.0, command="make soak SOAK_SECONDS=12")
    assert page.count("\n| ") >= 6 + len(checks)
