"""What `make bench-batches` says of what it measured."""

from __future__ import annotations

from argparse import Namespace

from tools.bench_batches import Measured, report

OPTIONS = Namespace(requests=100, seconds=1.0)


def test_the_report_compares_with_one_full_step() -> None:
    found = Measured(alone=[[0.010] * 99 + [0.020]], beside=[[0.020] * 99 + [0.045]], done=[40], full_step_s=0.030)
    text = report(found, [], OPTIONS)
    assert "| alone, p99 | 20.0 | 20.0 |" in text
    assert "| with the batch, p50 | 20.0 | 20.0 |" in text
    assert "25.0 ms higher than without it, within one full step (30.0 ms" in text
    assert "every request has one result" in text
    found.full_step_s = 0.020
    text = report(found, ["99 results of 100 requests, or in a different order"], OPTIONS)
    assert "**more than** one full step" in text
    assert "Results of the batch: 99 results" in text
