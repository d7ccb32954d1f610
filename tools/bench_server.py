"""llmserve beside a real Triton: `make bench-server`.

Both serve the same Python models at the same time on this machine, and are asked in turn; the order changes with every
round. The load comes from this process, over the loopback device.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from llmserve.evaluation.machine import machine_name
from tools.benchmark.options import say
from tools.benchmark.report import write_reports
from tools.server_benchmark.report import Findings, host_class, json_report, markdown_report
from tools.server_benchmark.repository import write_repository
from tools.server_benchmark.workloads import Workload, choose, measure
from tools.servers import Endpoint, llmserve_server, triton_server

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    given = options()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # which ends the servers, too
    workloads = choose(given.only)
    findings = Findings({})
    with ExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory()))
        repository = write_repository(folder / "models")
        servers = {"llmserve": running.enter_context(llmserve_server(repository, folder / "llmserve.txt"))}
        if given.triton is not None:
            server = triton_server(given.triton.absolute(), repository, folder / "triton.txt")
            servers["Triton"] = running.enter_context(server)
        for number in range(given.rounds):
            for workload in workloads:
                one_after_the_other(workload, servers, findings, given.seconds, is_reversed=number % 2 == 1)
    page = markdown_report(machine_name(), findings, seconds=given.seconds)
    say(page)
    paths = write_reports(given.output, f"server-{host_class()}", json_report(machine_name(), findings), page)
    say(f"written: {', '.join(map(str, paths))}")


def one_after_the_other(
    workload: Workload, servers: Mapping[str, Endpoint], findings: Findings, seconds: float, *, is_reversed: bool
) -> None:
    for name in sorted(servers, reverse=is_reversed):
        try:
            found = measure(workload, servers[name], seconds)
        except (RuntimeError, OSError) as error:
            findings.failures[f"{name}: {workload.name}"] = str(error)
            continue
        findings.add(workload.name, name, found)
        say(f"{workload.name:50} {name:8} {found.answers_per_s:9,.0f}/s  p50 {found.p50_ms:7.2f} ms")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--triton", type=Path, help="environment with nvidia-pytriton; none: llmserve alone")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4, help="of each measurement")
    parser.add_argument("--only", action="append", default=[], help="part of a workload's name; may be repeated")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "benchmarks", help="for the reports")
    return parser.parse_args()


if __name__ == "__main__":
    main()
