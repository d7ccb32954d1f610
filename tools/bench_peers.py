"""Compares our engine with OpenVINO GenAI, llama.cpp, ik_llama.cpp and transformers: `make bench-peers`.

All of them get the same random weights, prompts and number of threads, in turn, each in its own process. If a peer
cannot be installed or run, the reason is reported and the others continue.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tools.benchmark import rounds
from tools.benchmark.contestants import OURS, OURS_OF_GGUF, PEERS, Contestant
from tools.benchmark.environment import Environment, groups_of
from tools.benchmark.options import Options, parse, say
from tools.benchmark.process import ROOT
from tools.benchmark.report import json_report, markdown_report, write_reports
from tools.quality.columns import COLUMNS, QUICK_TEXTS
from tools.quality.contestants import CONTESTANTS
from tools.quality.losses import Losses
from tools.quality.measuring import Measurement
from tools.quality.networks import Networks

QUALITY_COLUMN = "smollm2"


def measured_losses(options: Options, python: Path, missing: Mapping[str, str]) -> dict[str, Losses]:
    """The loss of a trained network for each measured precision, by contestant. ik_llama.cpp runs llama.cpp's files, so
    it has the same losses."""
    chosen = {(one.engine, one.precision) for one in options.chosen((*OURS, *PEERS)) if one.bits <= 8}
    contestants = [one for one in CONTESTANTS if (one.engine, one.precision) in chosen]
    [column] = (column for column in COLUMNS if column.name == QUALITY_COLUMN)
    if options.quick:
        column = replace(column, num_texts=QUICK_TEXTS)
    networks = Networks(options.folder.parent / "quality", python, options.threads, say)
    found = Measurement(networks, python, missing, options.threads, say).run([column], contestants)
    by_name = {f"{one.engine} {one.precision}": losses for one in contestants
               if (losses := found.losses.get((one.name, column.name))) is not None}  # fmt: skip
    of_files = {name: losses for name, losses in by_name.items() if name.startswith("llama.cpp ")}
    return by_name | {name.replace("llama.cpp", "ik_llama"): losses for name, losses in of_files.items()}


def main() -> None:
    options = parse(__doc__ or "", minutes=25)
    environment = Environment(ROOT / ".venv-bench", say)
    chosen = options.chosen((*OURS, OURS_OF_GGUF, *PEERS))
    missing = environment.install(groups_of(one.requirement for one in chosen))
    options.make_checkpoints()

    def python(contestant: Contestant) -> Path:
        return Path(sys.executable) if contestant.is_ours else environment.python

    entries = rounds.entries_for(chosen, options.shapes, python, options.job())
    left_out = {str(entry): reason for entry in entries for module, reason in missing.items()
                if entry.contestant.module.endswith(f".{module}")}  # fmt: skip
    findings = rounds.prepare([entry for entry in entries if str(entry) not in left_out], say)
    findings.failures.update(left_out)
    findings.losses = measured_losses(options, environment.python, missing)
    rounds.run_rounds(
        entries, findings, rounds=options.rounds, minutes=options.minutes, measure_limits=options.limits, say=say
    )
    machine = options.machine()
    page = markdown_report("llmserve compared with other engines", machine, entries, findings)
    say(page)
    name = f"peers-{options.host_class()}"
    paths = write_reports(options.output, name, json_report(machine, entries, findings), page)
    plot = options.output / f"{name}.svg"
    drawn = subprocess.run([environment.python, "-m", "tools.benchmark.plot", paths[0], plot], cwd=ROOT, check=False)
    say(f"written: {', '.join(map(str, (*paths, *([plot] if drawn.returncode == 0 else []))))}")


if __name__ == "__main__":
    main()
