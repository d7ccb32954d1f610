"""Tests everything on a machine with an NVIDIA GPU: `make check-gpu` and `make check-cuda`.

It checks the machine, a build, the contract of every engine, answers against Hugging Face's, and what only one target
has. Each step passes, fails or is not run, with a reason, and one report has the results. The report is written after
every step, and --resume continues an earlier run. The exit code is 0 if every step has passed.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from llmserve import __version__
from tools.benchmark.options import say
from tools.benchmark.report import write_reports
from tools.gpu_check import cuda, tensorrt_llm
from tools.gpu_check.checks import MINUTE_S, ROOT, Plan, Step, Subject
from tools.gpu_check.page import page_of
from tools.gpu_check.steps import Result, State, run_steps

FORMAT = 2
TARGETS: Mapping[str, tuple[Subject, Sequence[Step]]] = {
    room.SUBJECT.target: (room.SUBJECT, room.STEPS) for room in (tensorrt_llm, cuda)
}


def main(arguments: Sequence[str] | None = None) -> int:
    given = options(arguments)
    subject, every = TARGETS[given.target]
    earlier = _earlier(given.output, subject) if given.resume else {}
    work = given.output / f"{subject.command}-work"
    if not given.resume:
        shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + MINUTE_S * given.minutes
    plan = Plan(subject, work.resolve(), given.suite.resolve(), given.num_samples, given.batches, given.kit, ends)
    steps = {step.__name__: partial(step, plan) for step in every}
    record = partial(_write, given.output, subject)
    is_time = lambda: time.monotonic() < ends  # noqa: E731
    results = run_steps(steps, say, earlier=earlier, chosen=given.steps, record=record, is_time=is_time)
    passed = _passed(results)
    if passed:  # the run is complete, so there is nothing to resume
        shutil.rmtree(work)
    report = given.output / subject.command
    say(f"\nreport: {report}.json and {report}.md")
    if missing := subject.machine_problems():
        say(f"\n{subject.command} cannot run on this machine:")
        say("\n".join(f"* {text}" for text in missing))
    return 0 if passed else 1


def _header(subject: Subject) -> dict[str, Any]:
    return {"format": FORMAT, "llmserve": __version__, "target": subject.target}


def _passed(results: Mapping[str, Result]) -> bool:
    return all(result.state is State.PASSED for result in results.values())


def _write(folder: Path, subject: Subject, results: Mapping[str, Result]) -> None:
    steps = {name: asdict(result) | {"state": result.state.value} for name, result in results.items()}
    content = {**_header(subject), "passed": _passed(results), "steps": steps}
    write_reports(folder, subject.command, content, page_of(subject, results))


def _earlier(folder: Path, subject: Subject) -> Mapping[str, Result]:
    """Results of an existing report; empty if there is none. Exits if the report is for something else."""
    path = folder / f"{subject.command}.json"
    if not path.is_file():
        return {}
    report = json.loads(path.read_text())
    differences = [f"{key} {report.get(key)}, not {value}" for key, value in _header(subject).items()
                   if report.get(key) != value]  # fmt: skip
    if differences:
        sys.exit(f"{path} is of another run ({'; '.join(differences)}): leave out --resume, or name another --output")
    return {name: Result(**(step | {"state": State(step["state"])})) for name, step in report["steps"].items()}


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="check-gpu", description=__doc__)
    parser.add_argument("--target", choices=sorted(TARGETS), default="tensorrt_llm")
    parser.add_argument("--output", type=Path, default=ROOT / "gpu-report", help="folder for the report")
    parser.add_argument("--resume", action="store_true", help="keep what passed in the report there, run the others")
    parser.add_argument("--kit", type=Path, help="folder that make gpu-kit has made on another machine")
    parser.add_argument("--minutes", type=float, default=math.inf, help="end after so many, to go on with --resume")
    parser.add_argument("--steps", type=lambda text: text.split(","), help="only these, separated by commas")
    parser.add_argument("--suite", type=Path, default=ROOT / "eval/suites/docstrings.yaml", help="of the evaluation")
    parser.add_argument("--num-samples", type=int, help="only the first so many of the suite")
    parser.add_argument(
        "--batches",
        default="1,4,16,64",
        help="requests at the same time, of what is measured through the engine or a server",
    )
    given = parser.parse_args(arguments)
    names = [step.__name__ for step in TARGETS[given.target][1]]
    if unknown := [name for name in given.steps or () if name not in names]:
        parser.error(f"--steps: no step is called {', '.join(unknown)}; there are {', '.join(names)}")
    return given


if __name__ == "__main__":
    sys.exit(main())
