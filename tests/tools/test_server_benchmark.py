"""The load generator counts what servers answer, and the report says what was measured."""

from __future__ import annotations

import os
import signal
from argparse import ArgumentTypeError
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx
import pytest

from tools import bench_server
from tools.bench_server import cpus, measure_again_if_it_ends
from tools.server_benchmark import token_cost, workloads
from tools.server_benchmark.clients import Client, Tally
from tools.server_benchmark.report import Findings, json_report, markdown_report
from tools.server_benchmark.repository import SLEEP_MS, write_repository
from tools.server_benchmark.token_cost import Cost
from tools.server_benchmark.workloads import SLOW, STREAMS, UNARY, Measured, NoAnswer, measure
from tools.servers import Endpoint, RevivedServer, llmserve_server, on_cpus

SECONDS = 1.5  # in which a busy machine answers at least once


def test_every_kind_of_workload_is_answered(tmp_path: Path) -> None:
    repository = write_repository(tmp_path / "models")
    with llmserve_server(repository, tmp_path / "log.txt") as server:
        for workload in (UNARY[0], UNARY[3], *STREAMS):
            found = measure(workload, server, SECONDS)
            assert found.answers_per_s > 0, workload.name
            assert found.server_cpu_ms > 0
            assert found.client_cpu_ms > 0
        url = f"http://{server.http}/v2/models/ensemble/stats"
        (statistics,) = httpx.get(url).json()["model_stats"]
        counts = {how: int(statistics["inference_stats"][how].get("count", 0)) for how in ("success", "fail")}
        assert counts["success"] > 0
        assert counts["fail"] == 0  # none of the last ones was cut off
        slow = measure(SLOW[0], server, SECONDS)
        assert slow.p50_ms > SLEEP_MS
        assert slow.answers_per_s < 1000 / SLEEP_MS * 1.3


def repository_of(model: str, folder: Path) -> Path:
    repository = folder / "one"
    repository.mkdir()
    (write_repository(folder / "all") / model).rename(repository / model)
    return repository


def test_a_server_that_refuses_is_a_failure(tmp_path: Path) -> None:
    with RevivedServer(partial(llmserve_server, repository_of("slow", tmp_path), tmp_path / "log.txt")) as server:
        for workload in (UNARY[0], UNARY[3], *STREAMS):
            with pytest.raises(RuntimeError, match=r"unknown model|without an answer"):
                measure(workload, server.endpoint(), 0.1)
        assert not server.has_ended()


def test_a_server_that_ends_is_started_again_and_measured_again(tmp_path: Path) -> None:
    victims: list[int] = []

    def connect(endpoint: Endpoint, tally: Tally) -> Client:
        if not victims:
            victims.append(endpoint.pid)
            os.kill(endpoint.pid, signal.SIGKILL)
        return UNARY[0].connect(endpoint, tally)

    findings = Findings({})
    workload = replace(UNARY[0], connect=connect)
    with RevivedServer(partial(llmserve_server, repository_of("identity", tmp_path), tmp_path / "log.txt")) as server:
        found = measure_again_if_it_ends(workload, "llmserve", server, findings, SECONDS)
        assert server.endpoint().pid not in victims
    assert found.answers_per_s > 0
    assert findings.ends == {"llmserve": [workload.name]}
    assert f"* llmserve: {workload.name}" in markdown_report("A processor", findings, seconds=4)


def test_a_server_that_does_not_answer_is_started_again_and_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workloads, "FIRST_S", 0.1)
    monkeypatch.setattr(workloads, "DRAIN_S", 0.1)
    monkeypatch.setattr(bench_server, "END_S", 0.1)
    silent: set[int] = set()

    def connect(endpoint: Endpoint, tally: Tally) -> Client:
        if not silent:
            silent.add(endpoint.pid)
        return Client(tally) if endpoint.pid in silent else UNARY[0].connect(endpoint, tally)

    findings = Findings({})
    workload = replace(UNARY[0], connect=connect)
    with RevivedServer(partial(llmserve_server, repository_of("identity", tmp_path), tmp_path / "log.txt")) as server:
        found = measure_again_if_it_ends(workload, "llmserve", server, findings, SECONDS)
        assert server.endpoint().pid not in silent
        silent.add(server.endpoint().pid)
        with pytest.raises(NoAnswer):
            measure(workload, server.endpoint(), 0.2)
    assert found.answers_per_s > 0
    assert findings.ends == {"llmserve": [workload.name]}


def test_servers_can_keep_to_some_cpus(tmp_path: Path) -> None:
    usable = os.sched_getaffinity(0)
    if len(usable) < 2:
        pytest.skip("one CPU is all there is")
    chosen = {min(usable)}
    repository = repository_of("identity", tmp_path)
    with on_cpus(chosen, partial(llmserve_server, repository, tmp_path / "log.txt")) as server:
        assert os.sched_getaffinity(0) == usable - chosen
        threads = list(Path(f"/proc/{server.pid}/task").iterdir())
        assert len(threads) > 1
        assert all(os.sched_getaffinity(int(thread.name)) == chosen for thread in threads)
        assert measure(UNARY[0], server, 0.1).answers_per_s > 0
    assert os.sched_getaffinity(0) == usable
    assert cpus(str(min(usable))) == chosen
    with pytest.raises(ArgumentTypeError, match="but not all"):
        cpus(",".join(map(str, usable)))


def test_a_token_of_the_shipped_pipelines_at_every_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_cost, "WARM_S", 0.5)
    monkeypatch.setattr(token_cost, "COUNTING_S", 0.5)
    costs = {cost.stage: cost for cost in token_cost.token_costs(2, 0.5)}
    assert list(costs) == [
        "engine",
        "+ stages",
        "+ ensemble",
        "+ gRPC",
        "+ SSE",
        "+ OpenAI's chat",
        "+ gRPC by grpcio's server",
    ]
    assert all(cost.cpu_us > 0 and cost.num_streams == 2 for cost in costs.values())
    calls = [costs[stage].calls for stage in ("engine", "+ stages", "+ ensemble")]
    assert 0 < calls[0] < calls[1] < calls[2] < min(costs["+ gRPC"].calls, costs["+ SSE"].calls)
    wires = ("+ gRPC", "+ SSE", "+ OpenAI's chat")
    assert max(costs[wire].calls for wire in wires) < 300  # of Python functions: a count, not a time
    assert costs["+ OpenAI's chat"].calls < 1.3 * costs["+ gRPC"].calls


def test_token_costs_in_the_report() -> None:
    findings = Findings({}, costs=[Cost("+ gRPC", 32, 140.0, 250.0), Cost("+ gRPC", 256, 150.0, 260.0)])
    findings.costs.append(Cost("+ gRPC", 32, 160.0, 251.0))
    findings.costs.append(Cost("+ gRPC", 32, 150.0, 252.0))
    page = markdown_report("A processor", findings, seconds=4)
    assert "| + gRPC | 150 (140-160) | 251 | 150 | 260 |" in page
    assert json_report("m", findings)["token_costs"][0]["cpu_us"] == 140.0


def test_report() -> None:
    findings = Findings({})
    for name, rate in (("llmserve", 200.0), ("Triton", 100.0)):
        findings.add(SLOW[0].name, name, Measured(rate, 1, 2, 0.5, 0.1))
        findings.add(SLOW[1].name, name, Measured(3 * rate, 1, 2, 0.5, 0.1))
    findings.failures["Triton, round 2, streams"] = "no answer"
    page = markdown_report("A processor, 2 cores", findings, seconds=4)
    assert f"| {SLOW[0].name} | 200 | 100 | 2.00 |" in page
    assert f"| {SLOW[1].name} | 3.0 | 3.0 |" in page
    assert "* Triton, round 2, streams: no answer" in page
    assert "Client and servers share the machine." in page
    assert "Each server is pinned to 1 of them" in markdown_report("A processor", findings, seconds=4, server_cpus=1)
    assert json_report("m", findings)["samples"][SLOW[0].name]["llmserve"][0]["answers_per_s"] == 200.0
