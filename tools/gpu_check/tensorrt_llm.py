"""The steps of `make check-gpu`, for an installed TensorRT-LLM."""

from __future__ import annotations

import sys

from llmserve.engine.tensorrt_llm.fits import machine_problems
from llmserve.engine.tensorrt_llm.library import installed
from llmserve.errors import LlmserveError
from tools.gpu_check.checks import (
    MINUTE_S,
    Plan,
    Step,
    Subject,
    build,
    contract,
    environment,
    evaluation,
    parity,
    require_engine,
)
from tools.gpu_check.steps import Details, NotRun, StepFailed

SUBJECT = Subject(
    target="tensorrt_llm",
    title="llmserve on TensorRT-LLM",
    command="check-gpu",
    extras="check-gpu",
    contract_engines="installed",
    lacks="there is no GPU, or no supported TensorRT-LLM",
    machine_problems=machine_problems,
)


def names(plan: Plan) -> Details:
    """Checks that the installed package has the names that we use, with the parameters that we pass."""
    try:
        library = installed()
    except LlmserveError as error:
        raise NotRun("no supported TensorRT-LLM is installed") from error
    report = plan.folder / "names.json"
    command = [sys.executable, "-m", "tools.gpu_check.names", str(report)]
    found = plan.reported(report, "importing tensorrt_llm", command, timeout_s=10 * MINUTE_S)
    details = {"library": str(library), **found}
    if found["problems"]:
        raise StepFailed("\n".join(found["problems"]), details)
    return details


def benchmark(plan: Plan) -> Details:
    """Measures tokens per second. There is no reference to compare with, so it passes if it completes."""
    require_engine(plan)
    report = plan.folder / "speed.json"
    command = [sys.executable, "-m", "tools.gpu_check.speed", str(plan.engine), str(report), plan.batches]
    return dict(plan.reported(report, "the benchmark", command, timeout_s=20 * MINUTE_S))


STEPS: tuple[Step, ...] = (environment, names, build, contract, evaluation, parity, benchmark)
