"""When a model's process is started again."""

from __future__ import annotations

from llmserve.backends.python.process.back_off import BackOff


def test_processes_that_die_young_wait_longer_and_longer() -> None:
    back_off = BackOff()
    assert [back_off.pause_after(0.5) for _ in range(8)] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


def test_one_that_has_lived_is_started_again_at_once() -> None:
    back_off = BackOff()
    back_off.pause_after(0.5)
    assert [back_off.pause_after(lived_s) for lived_s in (11.0, 0.5)] == [0.0, 0.1]
