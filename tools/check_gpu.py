"""On a machine with an NVIDIA GPU and TensorRT-LLM: does everything work there? `make check-gpu`.

The machine, the names that we use of the installed library, a build, what every engine promises, answers against
Hugging Face's, and speed: each step passes, fails or is not run, with the reason, and one report says all of it. Exit
code 0 when every step has passed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from llmserve import __version__
from llmserve.engine.tensorrt_llm.fits import machine_problems
from tools.benchmark.options import say
from tools.benchmark.report import write_reports
from tools.gpu_check.checks import ROOT, Plan
from tools.gpu_check.page import page_of
from tools.gpu_check.steps import State, run_steps

FORMAT = 1


def main(arguments: Sequence[str] | None = None) -> int:
    given = options(arguments)
    with tempfile.TemporaryDirectory(prefix="check-gpu-") as folder:
        plan = Plan(Path(folder), given.suite.resolve(), given.num_samples, given.batches)
        results = run_steps(plan.steps(), say)
    passed = all(result.state is State.PASSED for result in results.values())
    steps = {name: asdict(result) | {"state": result.state.value} for name, result in results.items()}
    content = {"format": FORMAT, "llmserve": __version__, "passed": passed, "steps": steps}
    paths = write_reports(given.output, "check-gpu", content, page_of(results))
    say(f"\nreport: {' and '.join(map(str, paths))}")
    if missing := machine_problems():
        say("\ncheck-gpu cannot run on this machine:")
        say("\n".join(f"* {text}" for text in missing))
    return 0 if passed else 1


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="check-gpu", description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "gpu-report", help="folder for the report")
    parser.add_argument("--suite", type=Path, default=ROOT / "eval/suites/docstrings.yaml", help="of the evaluation")
    parser.add_argument("--num-samples", type=int, help="only the first so many of the suite")
    parser.add_argument("--batches", default="1,4,16,64", help="of the benchmark")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
