"""`make soak`: its checks, and the rows of its report."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tools.soak.report import shown
from tools.soak.verdict import Period, judge

STEADY = Period(
    num_answers=297, problems=(), pss_bytes=144 << 20, rss_bytes=162 << 20, num_descriptors=18, num_threads=7,
    used_blocks=0, num_active=0, first_p50_s=0.02, first_p99_s=0.04, gap_p50_s=0.002, gap_p99_s=0.008,
    cpu_share=0.2, machine_load=1.0,
)  # fmt: skip


def failed(periods: list[Period]) -> list[str]:
    return [check.what for check in judge(periods) if not check.holds]


def test_what_stays_as_it_is_holds_whatever_the_warm_up_was() -> None:
    cold = replace(STEADY, rss_bytes=100 << 20, num_descriptors=40, first_p99_s=2.0)
    assert failed([cold, *[STEADY] * 9]) == []


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        (replace(STEADY, rss_bytes=int(1.021 * STEADY.rss_bytes)), "memory (RSS) within 2%"),
        (replace(STEADY, rss_bytes=int(0.979 * STEADY.rss_bytes)), "memory (RSS) within 2%"),
        (replace(STEADY, num_descriptors=19), "no growth of descriptors"),
        (replace(STEADY, num_threads=8), "no growth of threads"),
        (replace(STEADY, used_blocks=1), "nothing held at rest"),
        (replace(STEADY, num_active=1), "nothing held at rest"),
        (replace(STEADY, problems=("x",)), "each answer equals the one without load; bad requests are refused"),
    ],
)
def test_one_bad_minute_is_found(changed: Period, what: str) -> None:
    assert failed([*[STEADY] * 8, changed, STEADY]) == [what]


def test_a_slow_minute_is_none_and_a_slow_half_is_one() -> None:
    slow = replace(STEADY, first_p99_s=0.06, gap_p99_s=0.011)
    assert failed([*[STEADY] * 9, slow]) == []
    assert failed([*[STEADY] * 5, *[slow] * 5]) == [
        "p99 first token at most 1.25 times",
        "p99 between tokens at most 1.25 times",
    ]


def test_too_few_minutes_are_not_judged() -> None:
    with pytest.raises(ValueError, match="at least 3"):
        judge([STEADY] * 2)


@pytest.mark.parametrize(("count", "wanted"), [(60, [1, 12, 24, 36, 48, 60]), (3, [1, 2, 3])])
def test_the_report_shows_a_handful_of_minutes(count: int, wanted: list[int]) -> None:
    assert shown(count) == wanted
