"""Measures our engine against limits of the machine that are measured in the same run: `make bench`.

It measures prefill and decode at several batch sizes for every precision. Then it measures the whole engine: Python's
share of a step, in-flight against static batching, time to the first token under load, opening and memory. Finally, it
builds, measures and deletes a network of Baichuan2-7B's shape.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

from tools.benchmark import rounds
from tools.benchmark.contestants import OURS
from tools.benchmark.large import large_section, measure_large
from tools.benchmark.options import parse, say
from tools.benchmark.report import json_report, markdown_report, write_reports

SERVED = ("float16", "int8", "int4")


def main() -> None:
    options = parse(__doc__ or "", minutes=15)
    options.make_checkpoints()
    python = Path(sys.executable)
    entries = rounds.entries_for(options.chosen(OURS), options.shapes, lambda one: python, options.job())
    findings = rounds.prepare(entries, say)
    rounds.run_rounds(
        entries, findings, rounds=options.rounds, minutes=options.minutes, measure_limits=options.limits, say=say
    )
    rounds.serve([entry for entry in entries if entry.contestant.precision in SERVED], findings, say)
    machine = options.machine()
    page = markdown_report("llmserve against the machine's limits", machine, entries, findings)
    large = [] if options.quick else measure_large(options.chosen(OURS), options.job(), options.limits, say)
    if large:
        page += f"\n{large_section(large)}\n"
    say(page)
    content = {**json_report(machine, entries, findings), "large": [asdict(one) for one in large]}
    paths = write_reports(options.output, f"engine-{options.host_class()}", content, page)
    say(f"written: {', '.join(map(str, paths))}")


if __name__ == "__main__":
    main()
