"""Measures the loss by rounding, ours and other engines': `make bench-quality`.

It compares llmserve, OpenVINO and llama.cpp in 8 and 4 bits with transformers in float32, with the same weights and
token ids: SmolLM2-135M-Instruct, the demo network, and networks with outliers. If a peer cannot be installed or run,
the reason is reported and the others continue.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from llmserve.engine.machine.cores import usable_cores
from llmserve.engine.machine.description import machine_name
from llmserve.engine.native.library import chosen_isa
from tools.benchmark.environment import Environment, groups_of
from tools.benchmark.options import say
from tools.benchmark.process import ROOT
from tools.benchmark.report import write_reports
from tools.quality.columns import COLUMNS, QUICK, QUICK_TEXTS, Column
from tools.quality.contestants import CONTESTANTS
from tools.quality.measuring import Measurement
from tools.quality.networks import Networks
from tools.quality.report import json_report, markdown_report


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_TEXTS} texts of {' and '.join(QUICK)} only")
    parser.add_argument("--column", action="append", choices=[column.name for column in COLUMNS], help="repeatable")
    parser.add_argument("--only", action="append", default=[], help="part of a contestant's name; may be repeated")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="of every engine; all cores by default")
    parser.add_argument("--folder", type=Path, default=ROOT / "engines" / "quality", help="for networks and engines")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "benchmarks", help="for the reports")
    return parser.parse_args()


def chosen_columns(names: list[str] | None, *, quick: bool) -> list[Column]:
    chosen = [column for column in COLUMNS if column.name in (names or (QUICK if quick else [c.name for c in COLUMNS]))]
    return [replace(column, num_texts=min(column.num_texts, QUICK_TEXTS)) for column in chosen] if quick else chosen


def main() -> None:
    given = parse()
    environment = Environment(ROOT / ".venv-bench", say)
    networks = Networks(given.folder.resolve(), environment.python, given.threads, say)
    columns = chosen_columns(given.column, quick=given.quick)
    contestants = [one for one in CONTESTANTS if not given.only or any(text in one.name for text in given.only)]
    missing = environment.install(groups_of(one.requirement for one in contestants))
    findings = Measurement(networks, environment.python, missing, given.threads, say).run(columns, contestants)
    machine = f"{machine_name()}; kernels for {chosen_isa()}"
    page = markdown_report(machine, columns, contestants, findings)
    say(page)
    name = f"quality-{chosen_isa()}"
    paths = write_reports(given.output, name, json_report(machine, columns, contestants, findings), page)
    say(f"written: {', '.join(map(str, paths))}")


if __name__ == "__main__":
    main()
