"""The steps of `make check-cuda`: our own engines for NVIDIA GPUs."""

from __future__ import annotations

import shutil

from llmserve.cli.targets import check_target
from tools.gpu_check.checks import (
    MINUTE_S,
    Plan,
    Step,
    Subject,
    build,
    contract,
    environment,
    evaluation,
    failed,
    llmserve,
    parity,
    require_engine,
)
from tools.gpu_check.program import run
from tools.gpu_check.steps import Details, NotRun

SANITIZER = "compute-sanitizer"
ERROR_CODE = 86  # of a program that it found something in; none of ours ends so
SHORT_RUN = ("--benchmark", "3", "--input-tokens", "40", "--max-output-len", "4")  # under it everything takes long


def machine_problems() -> list[str]:
    unmet = [check for check in check_target("cuda") if not check.is_met]
    return [f"{check.need}: {check.found}" + (f"; {check.advice}" if check.advice else "") for check in unmet]


SUBJECT = Subject(
    target="cuda",
    title="llmserve's CUDA engines",
    command="check-cuda",
    extras="cuda,check-gpu",
    contract_engines="cuda",
    lacks="there is no GPU that cuda engines run on, or not what they need",
    machine_problems=machine_problems,
)


def memcheck(plan: Plan) -> Details:
    """No kernel reads or writes what is not its own."""
    return _sanitized(plan, "memcheck")


def racecheck(plan: Plan) -> Details:
    """No two threads of a program meet in its shared memory without waiting for each other."""
    return _sanitized(plan, "racecheck")


def _sanitized(plan: Plan, tool: str) -> Details:
    require_engine(plan)
    if shutil.which(SANITIZER) is None:
        raise NotRun(f"there is no {SANITIZER}; it comes with the CUDA toolkit")
    flags = ("--tool", tool, "--error-exitcode", str(ERROR_CODE), "--target-processes", "all")
    command = [SANITIZER, *flags, *llmserve("run", str(plan.engine), *SHORT_RUN)]
    done = run(command, timeout_s=30 * MINUTE_S)
    if done.code != 0:
        raise failed(f"{SANITIZER} --tool {tool}", done)
    return {"output": done.tail()}


STEPS: tuple[Step, ...] = (environment, build, contract, evaluation, parity, memcheck, racecheck)
