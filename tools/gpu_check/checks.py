"""The steps of `make check-gpu`. Each returns what the report says of it, or raises StepFailed or NotRun."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

from llmserve.engine.tensorrt_llm.fits import machine_problems
from llmserve.engine.tensorrt_llm.library import installed
from llmserve.errors import LlmserveError
from llmserve.evaluation.parity import ROUNDING_MARGIN
from tools.gpu_check.program import Finished, run
from tools.gpu_check.steps import Details, NotRun, StepFailed

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "build/checkpoints/baichuan2-tiny-docsum"
CONTRACT = "tests/contracts/test_engine.py"
CONTRACT_ENGINES = {"CONTRACT_ENGINES": "installed"}
CONTRACT_NEEDS = ("pytest", "pytest_asyncio", "pytest_timeout")
INSTALL = f"{sys.executable} -m pip install -e '.[check-gpu]'"
MINUTE_S = 60
REASON_CHARS = 400


@dataclass(frozen=True, slots=True)
class Plan:
    folder: Path  # for what is made on the way
    suite: Path
    num_samples: int | None  # None: the suite's
    batches: str  # "1,4,16"

    @property
    def engine(self) -> Path:
        return self.folder / "engine"

    @property
    def eval_report(self) -> Path:
        return self.folder / "eval.json"

    def steps(self) -> Mapping[str, Callable[[], Details]]:
        every = (environment, names, build, contract, evaluation, parity, benchmark)
        return {step.__name__: partial(step, self) for step in every}


def environment(plan: Plan) -> Details:
    """What `llmserve doctor` says of the machine."""
    done = run(_llmserve("doctor", "--json", "--target", "tensorrt_llm"), timeout_s=5 * MINUTE_S)
    try:
        report = json.loads(done.stdout)
    except ValueError:
        raise _failed("llmserve doctor", done) from None
    checks = report["targets"]["tensorrt_llm"]["checks"]
    unmet = [f"{check['need']}: {check['found']}" for check in checks if not check["is_met"]]
    if unmet:
        raise StepFailed("\n".join(unmet), report)
    return dict(report)


def names(plan: Plan) -> Details:
    """The installed package has what we use of it, and takes it as we pass it."""
    try:
        library = installed()
    except LlmserveError as error:
        raise NotRun("there is no TensorRT-LLM that we know") from error
    report = plan.folder / "names.json"
    done = run([sys.executable, "-m", "tools.gpu_check.names", str(report)], timeout_s=10 * MINUTE_S)
    if not report.is_file():
        raise _failed("importing tensorrt_llm", done)
    found = json.loads(report.read_text())
    details = {"library": str(library), **found}
    if found["problems"]:
        raise StepFailed("\n".join(found["problems"]), details)
    return details


def build(plan: Plan) -> Details:
    """The demo checkpoint becomes an engine that is complete and runs here."""
    _require_machine()
    flags = ("--target", "tensorrt_llm", "--output-dir", str(plan.engine))
    done = run(_llmserve("build", str(CHECKPOINT), *flags), timeout_s=30 * MINUTE_S)
    if done.code != 0:
        raise _failed("llmserve build", done)
    seen = run(_llmserve("inspect", str(plan.engine), "--verify", "--json"), timeout_s=5 * MINUTE_S)
    if seen.code != 0:
        raise _failed("llmserve inspect --verify", seen)
    report = json.loads(seen.stdout)
    manifest = report["manifest"]
    details = {key: manifest[key] for key in ("engine_digest", "device", "options", "files")}
    if report["problems_here"]:
        raise StepFailed("\n".join(report["problems_here"]), details)
    return details


def contract(plan: Plan) -> Details:
    """What every engine promises, on engines of the installed library: see tests/contracts."""
    _require_machine()
    missing = [name for name in CONTRACT_NEEDS if find_spec(name) is None]
    if missing:
        raise NotRun(f"{', '.join(missing)} not installed; {INSTALL}")
    report = plan.folder / "contract.xml"
    # what an unknown library warns of is not ours to refuse; its first engine may take minutes to compile
    flags = ("-q", f"--junitxml={report}", "-W", "default", "-p", "no:cacheprovider", "-o", "timeout=1200")
    command = [sys.executable, "-m", "pytest", CONTRACT, *flags]
    done = run(command, timeout_s=60 * MINUTE_S, environment=CONTRACT_ENGINES)
    if not report.is_file():
        raise _failed("pytest", done)
    cases = [_outcome(case) for case in ElementTree.parse(report).iter("testcase")]
    details = {outcome: {name: text for name, state, text in cases if state == outcome} for outcome in OUTCOMES}
    if bad := {**details["failure"], **details["error"]}:
        raise StepFailed("\n".join([f"{len(bad)} of {len(cases)} tests", *_by_reason(bad)]), details)
    if done.code != 0:
        raise _failed("pytest", done)
    return details


def evaluation(plan: Plan) -> Details:
    """The engine's answers against the stored ones of Hugging Face: ROUGE, and the gate's verdict."""
    _require_engine(plan)
    flags = ["--hf-model-dir", str(CHECKPOINT), "--suite", str(plan.suite), "--output", str(plan.eval_report)]
    if plan.num_samples is not None:
        flags += ["--num-samples", str(plan.num_samples)]
    done = run(_llmserve("eval", str(plan.engine), *flags), timeout_s=30 * MINUTE_S)
    if not plan.eval_report.is_file():
        raise _failed("llmserve eval", done)
    report = json.loads(plan.eval_report.read_text())
    details = {key: value for key, value in report.items() if key not in ("samples", "parity")}
    if not report["passed"]:
        raise StepFailed("\n".join(report["reasons"]) or report["verdict"], details)
    return details


def parity(plan: Plan) -> Details:
    """Every answer is the baseline's, token by token, or leaves it where the two best tokens were nearly equal."""
    if not plan.eval_report.is_file():
        raise NotRun("the evaluation left no answers")
    found = json.loads(plan.eval_report.read_text())["parity"]
    wrong = [each for each in found["divergences"] if each["margin"] > ROUNDING_MARGIN]
    if wrong:
        words = [f"{each['id']}: token {each['position']}, {each['margin']:.3f} nat" for each in wrong]
        headline = f"{len(wrong)} answers leave the baseline where it was sure (by more than {ROUNDING_MARGIN} nat)"
        raise StepFailed("\n".join([headline, *words]), found)
    return dict(found)


def benchmark(plan: Plan) -> Details:
    """Tokens per second. Nothing is compared with a number from elsewhere, so it passes when it ends."""
    _require_engine(plan)
    report = plan.folder / "speed.json"
    command = [sys.executable, "-m", "tools.gpu_check.speed", str(plan.engine), str(report), plan.batches]
    done = run(command, timeout_s=20 * MINUTE_S)
    if not report.is_file():
        raise _failed("the benchmark", done)
    return dict(json.loads(report.read_text()))


OUTCOMES = ("passed", "failure", "error", "skipped")


def _outcome(case: ElementTree.Element) -> tuple[str, str, str]:
    """(name, one of OUTCOMES, the beginning of why)"""
    for state in OUTCOMES[1:]:
        if (found := case.find(state)) is not None:
            return case.attrib["name"], state, " ".join(found.attrib.get("message", "").split())[:REASON_CHARS]
    return case.attrib["name"], OUTCOMES[0], ""


def _by_reason(tests: Mapping[str, str]) -> list[str]:
    """A line for each reason: an engine that cannot be opened fails them all."""
    names: dict[str, list[str]] = defaultdict(list)
    for name, reason in tests.items():
        names[reason].append(name)
    return [
        f"{same[0]}{f' and {len(same) - 1} others' if len(same) > 1 else ''}: {reason}"
        for reason, same in names.items()
    ]


def _require_machine() -> None:
    if machine_problems():
        raise NotRun("there is no GPU, or no TensorRT-LLM that we know")


def _require_engine(plan: Plan) -> None:
    if not plan.engine.is_dir():
        raise NotRun("the build left no engine")


def _llmserve(*arguments: str) -> list[str]:
    """With this Python, wherever its scripts are."""
    return [sys.executable, "-c", "from llmserve.cli.main import main; main()", *arguments]


def _failed(what: str, done: Finished) -> StepFailed:
    if done.code is None:
        return StepFailed(f"{what} did not end in time", {"output": done.tail()})
    if done.code < 0:
        return StepFailed(f"{what} was ended by signal {-done.code}: {done.last_line()}", {"output": done.tail()})
    return StepFailed(f"{what} ended with exit code {done.code}: {done.last_line()}", {"output": done.tail()})
