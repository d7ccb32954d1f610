"""The steps of `make check-cuda`: our own engines for NVIDIA GPUs."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from llmserve.cli.targets import check_target
from llmserve.evaluation.served.process import own_server
from tools.benchmark.checkpoint import make_checkpoint
from tools.benchmark.hybrids import HYBRIDS
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
    llmserve,
    parity,
    require_engine,
    require_machine,
)
from tools.gpu_check.speed_of_networks import (
    CELLS,
    LAYER_PRECISIONS,
    LAYERS,
    NETWORKS,
    PEER_PRECISION,
    PRECISIONS,
    beside,
    measured,
)
from tools.gpu_check.steps import Details, NotRun, StepFailed

SANITIZER = "compute-sanitizer"
NO_LIMITS = {"copied_bytes_per_s": 0.0, "products_per_s": {}}  # if they were not measured
ERROR_CODE = 86  # reports that a program has errors; none of our programs exits with it
SERVED_REQUESTS = 128  # at each concurrency
HAS_TORCH = "import torch, transformers; assert torch.cuda.is_available(), 'torch sees no GPU'"
SHORT_RUN = ("--benchmark", "3", "--input-tokens", "40", "--max-output-len", "4")  # for the slow sanitizer


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


def tune(plan: Plan) -> Details:
    """Tunes the products' tiles of the demo engine, which must not change a bit of its results."""
    require_engine(plan)
    done = plan.succeed("llmserve tune", llmserve("tune", str(plan.engine)), timeout_s=10 * MINUTE_S)
    verifying = llmserve("inspect", str(plan.engine), "--verify")
    plan.succeed("llmserve inspect --verify of the tuned engine", verifying, timeout_s=5 * MINUTE_S)
    return {"output": done.stdout.strip()}


def law(plan: Plan) -> Details:
    """Checks that a sequence has bitwise identical logits in any batch, however its tokens are divided into chunks."""
    require_engine(plan)
    report = plan.folder / "law.json"
    command = _module("law", str(plan.engine), str(report))
    return _lawful({"law": plan.reported(report, "comparing logits", command, timeout_s=5 * MINUTE_S)})


def _lawful(details: Details) -> Details:
    if broken := [row for row in details["law"] if row["differ"]]:
        words = [f"{row['case']}: {row['differ']} of {row['rows']} rows differ" for row in broken]
        raise StepFailed("\n".join(words), details)
    return details


def layers_of(precision: str) -> Step:
    """Checks the law, and measures the speed, of a few layers of a large network: the quickest results."""

    def step(plan: Plan) -> Details:
        return _lawful(_reported(plan, "layers", f"{LAYERS}-{precision}", str(plan.folder / LAYERS), precision))

    step.__name__ = f"layers-{precision}"
    return step


def states_of(name: str) -> Step:
    """Like `layers_of`, for layers with states. Also compares results with the reference."""

    def step(plan: Plan) -> Details:
        details = _reported(plan, "states", f"states-{name}", str(plan.folder / f"states-{name}"), name)
        if not details["passed"]:
            raise StepFailed(details["selftest"], details)
        return _lawful(details)

    step.__name__ = f"states-{name}"
    return step


def _reported(plan: Plan, module: str, name: str, *arguments: str) -> Details:
    """Returns the report of a program that uses the kit's kernels with that name."""
    require_machine(plan)
    report, kernels = plan.folder / f"{name}.json", plan.kernels(name)
    command = _module(module, *arguments, str(report), *([str(kernels)] if kernels else []))
    return dict(plan.reported(report, f"measuring {module}", command, timeout_s=20 * MINUTE_S))


def _module(name: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", f"tools.gpu_check.{name}", *arguments]


def serving(plan: Plan) -> Details:
    """Measures the demo engine in the shipped pipeline behind gRPC: tokens per second, and time to the first token."""
    require_engine(plan)
    report = plan.folder / "serving.json"
    load = ("--concurrency", plan.batches, "--requests", str(SERVED_REQUESTS), "--input-tokens", "64")
    with own_server((sys.executable, "-m", "llmserve.cli.owned_server"), plan.engine, ()) as server:
        asyncio.run(server.ready())
        flags = ("--protocol", "grpc", "--url", server.grpc, *load, "--output-tokens", "64", "--json", str(report))
        plan.succeed("llmserve bench", llmserve("bench", *flags), timeout_s=10 * MINUTE_S)
    runs = json.loads(report.read_text())["runs"]
    rows = [
        {
            "concurrency": each["concurrency"], "tokens_per_s": each["output_token_throughput"],
            "first_token_ms": each["time_to_first_token"]["p50"], "errors": each["error_request_count"],
        }
        for each in runs
    ]  # fmt: skip
    if any(row["errors"] for row in rows):
        raise StepFailed("requests failed", {"rows": rows})
    return {"rows": rows}


def memcheck(plan: Plan) -> Details:
    """Checks that no kernel reads or writes memory that is not its own."""
    return _sanitized(plan, "memcheck")


def racecheck(plan: Plan) -> Details:
    """Checks that no two threads of a program access its shared memory without synchronization."""
    return _sanitized(plan, "racecheck")


def _sanitized(plan: Plan, tool: str) -> Details:
    require_engine(plan)
    if shutil.which(SANITIZER) is None:
        raise NotRun(f"{SANITIZER} was not found; it comes with the CUDA toolkit")
    flags = ("--tool", tool, "--error-exitcode", str(ERROR_CODE), "--target-processes", "all")
    command = [SANITIZER, *flags, *llmserve("run", str(plan.engine), *SHORT_RUN)]
    done = plan.succeed(f"{SANITIZER} --tool {tool}", command, timeout_s=30 * MINUTE_S)
    return {"output": done.tail()}


def bandwidth(plan: Plan) -> Details:
    """Measures the GPU's limits: bytes copied, counting reads and writes, and products of floats."""
    require_machine(plan)
    report = _bandwidth_report(plan)
    command = _module("bandwidth", str(report))
    return dict(plan.reported(report, "measuring the GPU", command, timeout_s=5 * MINUTE_S))


def _bandwidth_report(plan: Plan) -> Path:
    return plan.folder / "bandwidth.json"


def _speed(plan: Plan, network: str, precision: str) -> Details:
    """Measures a tuned engine, and compares it with the peer if that was measured."""
    require_machine(plan)
    job = _job(plan, "tools.benchmark.ours_cuda", network, precision)
    report = plan.folder / f"speed-{network}-{precision}.jsonl"
    report.unlink(missing_ok=True)
    try:
        _work(plan, job, "prepare", report)
        plan.succeed("llmserve tune", llmserve("tune", str(engine_directory(job))), timeout_s=10 * MINUTE_S)
        _work(plan, job, "measure", report)
        idle = _idle(plan, engine_directory(job), plan.folder / f"idle-{network}-{precision}.json")
    finally:  # a large network's engine has the same size as its checkpoint
        shutil.rmtree(engine_directory(job), ignore_errors=True)
        if precision == PRECISIONS[-1]:
            shutil.rmtree(job.checkpoint, ignore_errors=True)
    found = _measured(plan, job, report)
    peer = _peer_report(plan, network)
    if precision == PEER_PRECISION and peer.is_file():
        found = beside(found, _measured(plan, job, peer))
    return {**found, "idle": idle}


def _peer(plan: Plan, network: str) -> Details:
    require_machine(plan)
    asked = plan.run("importing torch", [sys.executable, "-c", HAS_TORCH], timeout_s=5 * MINUTE_S)
    if asked.code != 0:
        raise NotRun(f"transformers, or torch with CUDA, is not installed: {asked.tail()}")
    job = _job(plan, "tools.benchmark.peers.torch_compiled", network, PEER_PRECISION)
    report = _peer_report(plan, network)
    report.unlink(missing_ok=True)
    _work(plan, job, "measure", report)
    return _measured(plan, job, report)


def _peer_report(plan: Plan, network: str) -> Path:
    return plan.folder / f"peer-{network}.jsonl"


def _job(plan: Plan, module: str, network: str, precision: str) -> Job:
    job = Job(module, precision, network, plan.folder, threads=0, cells=CELLS, passes=3)
    make_checkpoint(job.checkpoint, job.shape)
    return job


def _work(plan: Plan, job: Job, command: str, report: Path) -> None:
    worker = [sys.executable, "-m", "tools.benchmark.worker", command, job.to_json(), str(report)]
    plan.succeed(f"the worker's '{command}'", worker, timeout_s=30 * MINUTE_S)


def _measured(plan: Plan, job: Job, report: Path) -> Details:
    known = _bandwidth_report(plan)
    limits: dict[str, Any] = json.loads(known.read_text()) if known.is_file() else NO_LIMITS
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    return measured(lines, job, limits["copied_bytes_per_s"], limits["products_per_s"])


def _idle(plan: Plan, engine: Path, report: Path) -> list[Any]:
    batches = ",".join(str(cell.batch) for cell in CELLS if cell.phase == "decode")
    command = _module("idle", str(engine), str(report), batches)
    plan.succeed("measuring how long the GPU waits", command, timeout_s=10 * MINUTE_S)
    return list(json.loads(report.read_text()))


def speed_of(network: str, precision: str) -> Step:
    """Measures a network of random numbers, without scheduler and server. It passes if it completes."""

    def step(plan: Plan) -> Details:
        return _speed(plan, network, precision)

    step.__name__ = f"speed-{network}-{precision}"
    return step


def peer_of(network: str) -> Step:
    """Measures transformers with a static cache and torch.compile, on the same network and GPU."""

    def step(plan: Plan) -> Details:
        return _peer(plan, network)

    step.__name__ = f"peer-{network}"
    return step


STEPS: tuple[Step, ...] = (
    environment, build, law, bandwidth, *map(layers_of, LAYER_PRECISIONS), *map(states_of, HYBRIDS),
    memcheck, tune, contract, evaluation, parity, serving, racecheck,
    *(
        step
        for network in NETWORKS
        for step in (peer_of(network), *(speed_of(network, precision) for precision in PRECISIONS))
    ),
)  # fmt: skip
