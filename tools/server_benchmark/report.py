"""Results as JSON and as a page. Neither names the host."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from tools.benchmark.markdown import table
from tools.benchmark.statistics import Spread
from tools.server_benchmark.repository import SLEEP_MS, TOKENS
from tools.server_benchmark.token_cost import Cost
from tools.server_benchmark.workloads import SLOW, Measured

OURS, REAL = "llmserve", "Triton"


@dataclass(slots=True)
class Findings:
    samples: dict[str, dict[str, list[Measured]]]  # workload -> server -> one for each round
    failures: dict[str, str] = field(default_factory=dict)
    ends: dict[str, list[str]] = field(default_factory=dict)  # server -> workloads during which it ended or hung
    costs: list[Cost] = field(default_factory=list)  # of tokens in the shipped pipelines, one for each round

    def add_end(self, server: str, workload: str) -> None:
        self.ends.setdefault(server, []).append(workload)

    def add(self, workload: str, server: str, found: Measured) -> None:
        self.samples.setdefault(workload, {}).setdefault(server, []).append(found)


def host_class(server_cpus: int = 0) -> str:
    """A machine's class for file names. `server_cpus`: how many CPUs the servers used; 0: all."""
    return f"{server_cpus or len(os.sched_getaffinity(0))}x-{platform.machine()}"


def json_report(machine: str, findings: Findings) -> dict[str, Any]:
    return {
        "machine": machine,
        "python": platform.python_version(),
        "samples": {
            workload: {server: [asdict(sample) for sample in samples] for server, samples in servers.items()}
            for workload, servers in findings.samples.items()
        },
        "token_costs": [asdict(cost) for cost in findings.costs],
        "failures": findings.failures,
        "ends": findings.ends,
    }


def markdown_report(machine: str, findings: Findings, *, seconds: float, server_cpus: int = 0) -> str:
    apart = f"Each server is pinned to {server_cpus} of them, the client to the others."
    sharing = apart if server_cpus else "Client and servers share the machine."
    parts = [
        "# llmserve beside Triton",
        f"{machine}. {sharing} Each measurement takes {seconds:g} s; medians, lowest and highest in "
        f"brackets. A stream is {TOKENS} responses; the slow model sleeps {SLEEP_MS} ms per execution. [How it is "
        "measured](README.md#the-server-make-bench-server).",
        "## Answers per second",
        _rates(findings),
        "## Latency and the server's CPU time",
        _latencies(findings),
    ]
    if findings.costs:
        parts += ["## A token of the shipped pipelines", _costs(findings.costs)]
    if gains := _gains(findings):
        parts += ["## Gains on the slow model", gains]
    if findings.ends:
        ended = [f"* {name}: {', '.join(workloads)}" for name, workloads in findings.ends.items()]
        parts += ["## Crashed or hung, then restarted and measured again", "\n".join(ended)]
    if findings.failures:
        parts += ["## Not measured", *(f"* {name}: {reason}" for name, reason in findings.failures.items())]
    return "\n\n".join(parts) + "\n"


def _rates(findings: Findings) -> str:
    lines = []
    for workload, servers in findings.samples.items():
        rates = {name: [one.answers_per_s for one in samples] for name, samples in servers.items()}
        cells = [Spread.of(rates[name]).text() if name in rates else "" for name in (OURS, REAL)]
        ratio = f"{median(rates[OURS]) / median(rates[REAL]):.2f}" if rates.keys() >= {OURS, REAL} else ""
        lines.append([workload, *cells, ratio])
    return table(["", OURS, REAL, "ratio"], lines)


def _latencies(findings: Findings) -> str:
    lines = [
        [workload, name, *(f"{value:,.3f}" for value in _medians(samples))]
        for workload, servers in findings.samples.items()
        for name, samples in sorted(servers.items())
    ]
    head = ["", "server", "p50, ms", "p99, ms", "CPU per answer, ms", "the client's own, ms"]
    return table(head, lines)


def _costs(costs: Sequence[Cost]) -> str:
    """Microseconds of CPU and calls of Python functions, by stage."""
    counts = sorted({cost.num_streams for cost in costs})
    lines = []
    for stage in dict.fromkeys(cost.stage for cost in costs):
        cells = []
        for count in counts:
            found = [cost for cost in costs if (cost.stage, cost.num_streams) == (stage, count)]
            cpu = Spread.of([cost.cpu_us for cost in found]).text() if found else ""
            cells += [cpu, f"{median(cost.calls for cost in found):.0f}" if found else ""]
        lines.append([stage, *cells])
    heads = [head for count in counts for head in (f"{count} streams: CPU, µs", "Python calls")]
    return table(["", *heads], lines)


def _medians(samples: Sequence[Measured]) -> tuple[float, float, float, float]:
    return (
        median(one.p50_ms for one in samples),
        median(one.p99_ms for one in samples),
        median(one.server_cpu_ms for one in samples),
        median(one.client_cpu_ms for one in samples),
    )


def _gains(findings: Findings) -> str:
    """Throughput relative to one instance without batching."""
    base, *others = (workload.name for workload in SLOW)
    if base not in findings.samples:
        return ""
    lines = []
    for workload in others:
        gains = []
        for name in (OURS, REAL):
            slow, faster = (findings.samples.get(one, {}).get(name) for one in (base, workload))
            is_known = slow is not None and faster is not None
            gains.append(f"{_rate(faster or ()) / _rate(slow or ()):.1f}" if is_known else "")
        lines.append([workload, *gains])
    return table(["", OURS, REAL], lines)


def _rate(samples: Sequence[Measured]) -> float:
    return median(one.answers_per_s for one in samples)
