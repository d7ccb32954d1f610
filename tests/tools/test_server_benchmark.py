"""The load generator counts what servers answer, and the report says what was measured."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tools.server_benchmark.report import Findings, json_report, markdown_report
from tools.server_benchmark.repository import SLEEP_MS, write_repository
from tools.server_benchmark.workloads import SLOW, STREAMS, UNARY, Measured, measure
from tools.servers import llmserve_server


def test_every_kind_of_workload_is_answered(tmp_path: Path) -> None:
    repository = write_repository(tmp_path / "models")
    with llmserve_server(repository, tmp_path / "log.txt") as server:
        for workload in (UNARY[0], UNARY[3], *STREAMS):
            found = measure(workload, server, 0.3)
            assert found.answers_per_s > 20, workload.name
            assert found.server_cpu_ms > 0
        url = f"http://{server.http}/v2/models/ensemble/stats"
        (statistics,) = httpx.get(url).json()["model_stats"]
        counts = {how: int(statistics["inference_stats"][how].get("count", 0)) for how in ("success", "fail")}
        assert counts["success"] > 0
        assert counts["fail"] == 0  # none of the last ones was cut off
        slow = measure(SLOW[0], server, 0.3)
        assert slow.p50_ms > SLEEP_MS
        assert slow.answers_per_s < 1000 / SLEEP_MS * 1.3


def test_a_server_that_refuses_is_a_failure(tmp_path: Path) -> None:
    repository = tmp_path / "one"
    repository.mkdir()
    (write_repository(tmp_path / "all") / "slow").rename(repository / "slow")
    with llmserve_server(repository, tmp_path / "log.txt") as server:
        for workload in (UNARY[0], UNARY[3], *STREAMS):
            with pytest.raises(RuntimeError, match=workload.name):
                measure(workload, server, 0.1)


def test_report() -> None:
    findings = Findings({})
    for name, rate in (("llmserve", 200.0), ("Triton", 100.0)):
        findings.add(SLOW[0].name, name, Measured(rate, 1, 2, 0.5))
        findings.add(SLOW[1].name, name, Measured(3 * rate, 1, 2, 0.5))
    findings.failures["Triton: streams"] = "no answer"
    page = markdown_report("A processor, 2 cores", findings, seconds=4)
    assert f"| {SLOW[0].name} | 200 | 100 | 2.00 |" in page
    assert f"| {SLOW[1].name} | 3.0 | 3.0 |" in page
    assert "* Triton: streams: no answer" in page
    assert json_report("m", findings)["samples"][SLOW[0].name]["llmserve"][0]["answers_per_s"] == 200.0
