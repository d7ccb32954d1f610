"""Our engine beside OpenVINO GenAI, llama.cpp and transformers: `make bench-peers`.

The same random weights, prompts and number of threads for all, in turn, each in a process of its own. A peer that
cannot be installed or run is reported with the reason and stops nobody else.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tools.benchmark import rounds
from tools.benchmark.contestants import OURS, PEERS, Contestant
from tools.benchmark.environment import Environment
from tools.benchmark.options import parse, say
from tools.benchmark.report import json_report, markdown_report, write_reports


def main() -> None:
    options = parse(__doc__ or "", minutes=25)
    environment = Environment(rounds.ROOT / ".venv-bench", say)
    missing = environment.install()
    options.make_checkpoints()

    def python(contestant: Contestant) -> Path:
        return Path(sys.executable) if contestant.is_ours else environment.python

    entries = rounds.entries_for(options.chosen((*OURS, *PEERS)), options.shapes, python, options.job())
    left_out = {str(entry): reason for entry in entries for module, reason in missing.items()
                if entry.contestant.module.endswith(f".{module}")}  # fmt: skip
    findings = rounds.prepare([entry for entry in entries if str(entry) not in left_out], say)
    findings.failures.update(left_out)
    rounds.run_rounds(
        entries, findings, rounds=options.rounds, minutes=options.minutes, measure_limits=options.limits, say=say
    )
    machine = options.machine()
    page = markdown_report("llmserve beside other engines", machine, entries, findings)
    say(page)
    name = f"peers-{options.host_class()}"
    paths = write_reports(options.output, name, json_report(machine, entries, findings), page)
    plot = options.output / f"{name}.svg"
    drawn = subprocess.run(
        [environment.python, "-m", "tools.benchmark.plot", paths[0], plot], cwd=rounds.ROOT, check=False
    )
    say(f"written: {', '.join(map(str, (*paths, *([plot] if drawn.returncode == 0 else []))))}")


if __name__ == "__main__":
    main()
