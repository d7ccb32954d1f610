"""Compares llmserve with a real Triton: `make bench-server`.

Both serve the same Python models at the same time on this machine. They get requests in turn, in a different order in
every round. The load comes from this process, over the loopback device.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from llmserve.engine.machine.description import machine_name
from tools.benchmark.options import say
from tools.benchmark.report import write_reports
from tools.server_benchmark.report import Findings, host_class, json_report, markdown_report
from tools.server_benchmark.repository import write_repository
from tools.server_benchmark.token_cost import token_costs
from tools.server_benchmark.workloads import Measured, NoAnswer, Workload, choose, measure
from tools.servers import RevivedServer, llmserve_server, on_cpus, triton_server

ROOT = Path(__file__).resolve().parents[1]
TOKEN_COSTS = "token of the shipped pipelines"
TOKEN_STREAMS = (32, 256)
END_S = 5.0  # time for a server to end after its first connection has ended


def main() -> None:
    given = options()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends the servers, too
    workloads = choose(given.only)
    measures_tokens = not given.only or any(name in TOKEN_COSTS for name in given.only)
    findings = Findings({})
    with ExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory()))
        repository = write_repository(folder / "models")
        starts = {"llmserve": partial(llmserve_server, repository, folder / "llmserve.txt")}
        if given.triton is not None:
            starts["Triton"] = partial(triton_server, given.triton.absolute(), repository, folder / "triton.txt")
        if given.server_cpus:
            starts = {name: partial(on_cpus, given.server_cpus, start) for name, start in starts.items()}
        servers = {name: running.enter_context(RevivedServer(start)) for name, start in starts.items()}
        for server in servers.values():
            server.endpoint()
        for number in range(given.rounds):
            for workload in workloads:
                one_after_the_other(workload, servers, findings, given.seconds, round_number=number + 1)
    for _ in range(given.rounds if measures_tokens else 0):  # alone, because other servers would disturb it
        add_token_costs(findings, given.seconds)
    num_cpus = len(given.server_cpus)
    page = markdown_report(machine_name(), findings, seconds=given.seconds, server_cpus=num_cpus)
    say(page)
    paths = write_reports(given.output, f"server-{host_class(num_cpus)}", json_report(machine_name(), findings), page)
    say(f"written: {', '.join(map(str, paths))}")


def one_after_the_other(
    workload: Workload, servers: Mapping[str, RevivedServer], findings: Findings, seconds: float, *, round_number: int
) -> None:
    for name in sorted(servers, reverse=round_number % 2 == 0):
        try:
            found = measure_again_if_it_ends(workload, name, servers[name], findings, seconds)
        except (RuntimeError, OSError) as error:
            findings.failures[f"{name}, round {round_number}, {workload.name}"] = str(error)
            continue
        findings.add(workload.name, name, found)
        say(f"{workload.name:50} {name:8} {found.answers_per_s:9,.0f}/s  p50 {found.p50_ms:7.2f} ms")


def measure_again_if_it_ends(
    workload: Workload, name: str, server: RevivedServer, findings: Findings, seconds: float
) -> Measured:
    """Measures again if the server ends or stops answering; if it does so every time, it is a failure."""
    try:
        return measure(workload, server.endpoint(), seconds)
    except (RuntimeError, OSError) as error:
        if not server.has_ended(within_s=END_S):
            if not isinstance(error, NoAnswer):
                raise
            server.end()
        findings.add_end(name, workload.name)
        say(f"{workload.name:50} {name:8} has ended or hangs, and is started again")
        return measure(workload, server.endpoint(), seconds)


def add_token_costs(findings: Findings, seconds: float) -> None:
    for num_streams in TOKEN_STREAMS:
        for cost in token_costs(num_streams, seconds):
            findings.costs.append(cost)
            say(f"{TOKEN_COSTS}, {num_streams} streams, {cost.stage:28} {cost.cpu_us:7.1f} us {cost.calls:5.0f} calls")


def cpus(text: str) -> frozenset[int]:
    chosen, usable = frozenset(map(int, text.split(","))), os.sched_getaffinity(0)
    if not chosen < usable:
        raise argparse.ArgumentTypeError(f"expected some of {sorted(usable)}, but not all: the load needs one, too")
    return chosen


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--triton", type=Path, help="environment with nvidia-pytriton; none: llmserve alone")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4, help="of each measurement")
    parser.add_argument("--only", action="append", default=[], help="part of a workload's name; may be repeated")
    parser.add_argument("--server-cpus", type=cpus, default=frozenset(), metavar="N,N",
                        help="that each server keeps to, and the load to the others; none: all share all")  # fmt: skip
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "benchmarks", help="for the reports")
    return parser.parse_args()


if __name__ == "__main__":
    main()
