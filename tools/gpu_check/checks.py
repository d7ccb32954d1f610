"""The steps that every target has. Each returns its results for the report, or raises StepFailed or NotRun."""

from __future__ import annotations

import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias
from xml.etree import ElementTree

from llmserve.evaluation.judging.parity import ROUNDING_MARGIN
from tools.gpu_check.program import Finished, run
from tools.gpu_check.steps import Details, NotRun, StepFailed

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "build/checkpoints/baichuan2-tiny-docsum"
CONTRACT = "tests/contracts/test_engine.py"
CONTRACT_NEEDS = ("pytest", "pytest_asyncio", "pytest_timeout")
MINUTE_S = 60
# The contract's network is like published ones, because some engines' kernels require heads of 64 in 16 bits
CONTRACT_NETWORK: Mapping[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8}
CONTRACT_KERNELS = "CONTRACT_KERNELS"  # an environment variable: the file of the contract's kernels
REASON_CHARS = 400


@dataclass(frozen=True, slots=True)
class Subject:
    """The target that is checked."""

    target: str
    title: str  # of the page
    command: str  # of make; the report's name
    extras: str  # requirements that pip installs
    contract_engines: str  # CONTRACT_ENGINES of tests/contracts/engines.py
    lacks: str  # a few words for machines on which nothing can run
    machine_problems: Callable[[], Sequence[str]]  # why no engine can be built or run here


@dataclass(frozen=True, slots=True)
class Plan:
    subject: Subject
    folder: Path  # for intermediate files
    suite: Path
    num_samples: int | None  # None: the suite's
    batches: str = "1"  # "1,4,16"
    kit: Path | None = None  # from tools.gpu_kit
    ends: float = math.inf  # by time.monotonic()

    @property
    def engine(self) -> Path:
        return self.folder / "engine"

    @property
    def eval_report(self) -> Path:
        return self.folder / "eval.json"

    def kernels(self, name: str) -> Path | None:
        """The kit's kernels for a network, if it has any."""
        path = kernel_file(self.kit, name) if self.kit else None
        return path if path and path.is_file() else None

    def run(
        self, what: str, command: Sequence[str], *, timeout_s: float, environment: Mapping[str, str] | None = None
    ) -> Finished:
        """Runs a program until the time is up, which raises `NotRun`."""
        done = run(command, timeout_s=max(1.0, min(timeout_s, self.ends - time.monotonic())), environment=environment)
        if done.code is None and time.monotonic() >= self.ends:
            raise NotRun(f"the time limit was reached during {what}; continue with --resume")
        return done

    def succeed(self, what: str, command: Sequence[str], *, timeout_s: float) -> Finished:
        """Like `run`, but raises `StepFailed` if the exit code is not 0."""
        done = self.run(what, command, timeout_s=timeout_s)
        if done.code != 0:
            raise failed(what, done)
        return done

    def reported(self, report: Path, what: str, command: Sequence[str], *, timeout_s: float) -> Any:
        """Returns the JSON file that a program writes, however it ends. Raises `StepFailed` if there is none."""
        report.unlink(missing_ok=True)  # of an earlier run
        done = self.run(what, command, timeout_s=timeout_s)
        if not report.is_file():
            raise failed(what, done)
        return json.loads(report.read_text())


Step: TypeAlias = Callable[[Plan], Details]


def kernel_file(kit: Path, name: str) -> Path:
    """The file of a network's kernels."""
    return kit / "kernels" / f"{name}.zip"


def environment(plan: Plan) -> Details:
    """Reports the machine, with `llmserve doctor`."""
    target = plan.subject.target
    done = plan.run("llmserve doctor", llmserve("doctor", "--json", "--target", target), timeout_s=5 * MINUTE_S)
    try:
        report = json.loads(done.stdout)
    except ValueError:
        raise failed("llmserve doctor", done) from None
    checks = report["targets"][target]["checks"]
    unmet = [f"{check['need']}: {check['found']}" for check in checks if not check["is_met"]]
    if unmet:
        raise StepFailed("\n".join(unmet), {**report, "checks": checks})
    return {**report, "checks": checks}


def build(plan: Plan) -> Details:
    """Builds an engine from the demo checkpoint, which must be complete and run here."""
    require_machine(plan)
    flags = ["--target", plan.subject.target, "--dtype", "float16", "--output-dir", str(plan.engine)]
    if kernels := plan.kernels("demo"):
        flags += ["--kernels", str(kernels)]
    plan.succeed("llmserve build", llmserve("build", str(CHECKPOINT), *flags), timeout_s=30 * MINUTE_S)
    verifying = llmserve("inspect", str(plan.engine), "--verify", "--json")
    seen = plan.succeed("llmserve inspect --verify", verifying, timeout_s=5 * MINUTE_S)
    report = json.loads(seen.stdout)
    manifest = report["manifest"]
    details = {key: manifest[key] for key in ("engine_digest", "device", "options", "files")}
    if report["problems_here"]:
        raise StepFailed("\n".join(report["problems_here"]), details)
    return details


def contract(plan: Plan) -> Details:
    """Tests the contract of all engines on this machine's engines: see tests/contracts."""
    require_machine(plan)
    missing = [name for name in CONTRACT_NEEDS if find_spec(name) is None]
    if missing:
        install = f"{sys.executable} -m pip install -e '.[{plan.subject.extras}]'"
        raise NotRun(f"{', '.join(missing)} not installed; {install}")
    report = plan.folder / "contract.xml"
    report.unlink(missing_ok=True)  # of an earlier run
    # warnings of an unknown library are not our errors; its first engine may take minutes to compile
    flags = ("-q", f"--junitxml={report}", "-W", "default", "-p", "no:cacheprovider", "-o", "timeout=1200")
    command = [sys.executable, "-m", "pytest", CONTRACT, *flags]
    environment = {"CONTRACT_ENGINES": plan.subject.contract_engines}
    if kernels := plan.kernels("contract"):
        environment[CONTRACT_KERNELS] = str(kernels)
    done = plan.run("the contract", command, timeout_s=60 * MINUTE_S, environment=environment)
    if not report.is_file():
        raise failed("pytest", done)
    cases = [_outcome(case) for case in ElementTree.parse(report).iter("testcase")]
    details = {outcome: {name: text for name, state, text in cases if state == outcome} for outcome in OUTCOMES}
    if bad := {**details["failure"], **details["error"]}:
        raise StepFailed("\n".join([f"{len(bad)} of {len(cases)} tests", *_by_reason(bad)]), details)
    if done.code != 0:
        raise failed("pytest", done)
    return details


def evaluation(plan: Plan) -> Details:
    """Compares the engine's answers with stored ones of Hugging Face: ROUGE, and the gate's verdict."""
    require_engine(plan)
    flags = ["--hf-model-dir", str(CHECKPOINT), "--suite", str(plan.suite), "--output", str(plan.eval_report)]
    if plan.num_samples is not None:
        flags += ["--num-samples", str(plan.num_samples)]
    command = llmserve("eval", str(plan.engine), *flags)
    report = plan.reported(plan.eval_report, "llmserve eval", command, timeout_s=30 * MINUTE_S)
    details = {key: value for key, value in report.items() if key not in ("samples", "parity")}
    if not report["passed"]:
        raise StepFailed("\n".join(report["reasons"]) or report["verdict"], details)
    return details


def parity(plan: Plan) -> Details:
    """Checks that every answer equals the baseline's, or differs first where the two best tokens were nearly equal."""
    if not plan.eval_report.is_file():
        raise NotRun("the evaluation wrote no answers")
    found = json.loads(plan.eval_report.read_text())["parity"]
    wrong = [each for each in found["divergences"] if each["margin"] > ROUNDING_MARGIN]
    if wrong:
        words = [f"{each['id']}: token {each['position']}, {each['margin']:.3f} nat" for each in wrong]
        headline = f"{len(wrong)} answers leave the baseline where it was sure (by more than {ROUNDING_MARGIN} nat)"
        raise StepFailed("\n".join([headline, *words]), found)
    return dict(found)


OUTCOMES = ("passed", "failure", "error", "skipped")


def _outcome(case: ElementTree.Element) -> tuple[str, str, str]:
    """(name, one of OUTCOMES, the beginning of the reason)"""
    for state in OUTCOMES[1:]:
        if (found := case.find(state)) is not None:
            return case.attrib["name"], state, " ".join(found.attrib.get("message", "").split())[:REASON_CHARS]
    return case.attrib["name"], OUTCOMES[0], ""


def _by_reason(tests: Mapping[str, str]) -> list[str]:
    """A line for each reason, because an engine that cannot be opened fails all tests."""
    names: dict[str, list[str]] = defaultdict(list)
    for name, reason in tests.items():
        names[reason].append(name)
    return [
        f"{same[0]}{f' and {len(same) - 1} others' if len(same) > 1 else ''}: {reason}"
        for reason, same in names.items()
    ]


def require_machine(plan: Plan) -> None:
    if plan.subject.machine_problems():
        raise NotRun(plan.subject.lacks)


def require_engine(plan: Plan) -> None:
    if not plan.engine.is_dir():
        raise NotRun("the build wrote no engine")


def llmserve(*arguments: str) -> list[str]:
    """Runs llmserve with this Python, wherever its scripts are."""
    return [sys.executable, "-c", "from llmserve.cli.main import main; main()", *arguments]


def failed(what: str, done: Finished) -> StepFailed:
    if done.code is None:
        return StepFailed(f"{what} did not end in time", {"output": done.tail()})
    if done.code < 0:
        return StepFailed(f"{what} was ended by signal {-done.code}: {done.last_line()}", {"output": done.tail()})
    return StepFailed(f"{what} ended with exit code {done.code}: {done.last_line()}", {"output": done.tail()})
