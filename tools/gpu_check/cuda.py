"""The steps of `make check-cuda`: our own engines for NVIDIA GPUs."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from llmserve.cli.targets import check_target
from tools.benchmark.checkpoint import make_checkpoint
from tools.benchmark.job import Job
from tools.benchmark.ours_cuda import engine_directory
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
    require_machine,
)
from tools.gpu_check.program import run
from tools.gpu_check.speed_of_networks import CELLS, NETWORKS, PRECISIONS, measured
from tools.gpu_check.steps import Details, NotRun

SANITIZER = "compute-sanitizer"
NO_LIMITS = {"copied_bytes_per_s": 0.0, "products_per_s": {}}  # measured
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


def bandwidth(plan: Plan) -> Details:
    """What the GPU can do at most: bytes copied, read and written both counted, and products of floats."""
    require_machine(plan)
    report = _bandwidth_report(plan)
    report.unlink(missing_ok=True)  # of an earlier run
    done = run([sys.executable, "-m", "tools.gpu_check.bandwidth", str(report)], timeout_s=5 * MINUTE_S)
    if not report.is_file():
        raise failed("measuring the GPU", done)
    return dict(json.loads(report.read_text()))


def _bandwidth_report(plan: Plan) -> Path:
    return plan.folder / "bandwidth.json"


def _speed(plan: Plan, network: str, precision: str) -> Details:
    require_machine(plan)
    job = Job("tools.benchmark.ours_cuda", precision, network, plan.folder, threads=0, cells=CELLS, passes=3)
    make_checkpoint(job.checkpoint, job.shape)
    report = plan.folder / f"speed-{network}-{precision}.jsonl"
    report.unlink(missing_ok=True)
    try:
        for command in ("prepare", "measure"):
            worker = [sys.executable, "-m", "tools.benchmark.worker", command, job.to_json(), str(report)]
            done = run(worker, timeout_s=30 * MINUTE_S)
            if done.code != 0:
                raise failed(f"the worker's '{command}'", done)
        idle = _idle(engine_directory(job), plan.folder / f"idle-{network}-{precision}.json")
    finally:  # a large network takes as much as its checkpoint again
        shutil.rmtree(engine_directory(job), ignore_errors=True)
        if precision == PRECISIONS[-1]:
            shutil.rmtree(job.checkpoint, ignore_errors=True)
    known = _bandwidth_report(plan)
    limits: dict[str, Any] = json.loads(known.read_text()) if known.is_file() else NO_LIMITS
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    return {**measured(lines, job, limits["copied_bytes_per_s"], limits["products_per_s"]), "idle": idle}


def _idle(engine: Path, report: Path) -> list[Any]:
    batches = ",".join(str(cell.batch) for cell in CELLS if cell.phase == "decode")
    command = [sys.executable, "-m", "tools.gpu_check.idle", str(engine), str(report), batches]
    done = run(command, timeout_s=10 * MINUTE_S)
    if done.code != 0:
        raise failed("measuring how long the GPU waits", done)
    return list(json.loads(report.read_text()))


def speed_of(network: str, precision: str) -> Step:
    """A network of random numbers, without scheduler and server. It passes when it ends."""

    def step(plan: Plan) -> Details:
        return _speed(plan, network, precision)

    step.__name__ = f"speed-{network}-{precision}"
    return step


STEPS: tuple[Step, ...] = (
    environment, build, contract, evaluation, parity, memcheck, racecheck, bandwidth,
    *(speed_of(network, precision) for network in NETWORKS for precision in PRECISIONS),
)  # fmt: skip
