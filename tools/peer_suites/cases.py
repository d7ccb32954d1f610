"""The results of the cases of a peer's suite."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

RESULTS = ("passed", "failed", "lacks", "cannot")
LACKS = re.compile(r"llmserve lacks: (.+)")
ROUTE = re.compile(r'"(?:GET|POST|OPTIONS|DELETE)",\s*"(/[^"]*)"')
MESSAGE = re.compile(r"[\"']message[\"']: (?:\"((?:[^\"\\]|\\.)*)\"|'((?:[^'\\]|\\.)*)')")


@dataclass(frozen=True)
class Case:
    """`failed`: llmserve behaves differently. `lacks`: it has no such feature. `cannot`: no text server on one CPU with
    another network could pass."""

    file: str
    name: str
    result: str
    reason: str = ""


@dataclass(frozen=True)
class Rules:
    """The rules for one suite's results."""

    cannot: Mapping[str, str]  # a pattern of "file::name" -> why
    wants: Mapping[str, str]  # a pattern of the failing line and its message -> why no other server passes it
    reasons: Mapping[str, str]  # such a pattern -> the missing feature
    own_network: re.Pattern[str] | None = None  # of a failing line that compares text of the suite's own network

    def case_of(self, element: ElementTree.Element) -> Case:
        file = element.get("classname", "").rpartition(".")[2] + ".py"
        name = element.get("name", "")
        found = {kind: element.find(kind) for kind in ("failure", "error", "skipped")}
        problem = next((found[kind] for kind in ("failure", "error", "skipped") if found[kind] is not None), None)
        if problem is None:
            return Case(file, name, "passed")
        for pattern, reason in self.cannot.items():
            if re.search(pattern, f"{file}::{name}"):
                return Case(file, name, "cannot", reason)
        if found["skipped"] is not None:
            return Case(file, name, "cannot", f"skipped by the suite: {problem.get('message', '')}")
        printed = "\n".join(text or "" for text in (element.findtext("system-out"), element.findtext("system-err")))
        return Case(file, name, *self._verdict(problem.text or "", printed))

    def _verdict(self, problem: str, printed: str) -> tuple[str, str]:
        """`problem`: the function up to the failing line, and its message."""
        lines = problem.splitlines()
        raised = next((line for line in reversed(lines) if line.startswith(">")), "")
        said = next((line[2:].strip() for line in lines if line.startswith("E ")), lines[-1] if lines else "")
        told = MESSAGE.findall(said) or MESSAGE.findall(printed)[-1:]
        refusal = "".join(told[0]) if told and re.search(r"\b400\b", said) else ""
        about = f"{raised}\n{said}\n{refusal}"
        if wanted := _reason(self.wants, about):
            return "cannot", wanted
        if lacked := LACKS.search(f"{printed}\n{said}"):
            return "lacks", lacked[1]
        if lacking := _reason(self.reasons, about):
            return "lacks", lacking
        if self.own_network is not None and self.own_network.search(raised):
            return "cannot", "the text or the token counts of the suite's own network"
        routes = ROUTE.findall(problem)
        if "404" in said and routes:
            return "lacks", f"route {routes[-1]}"
        if refusal:
            return "lacks", f"refused: {refusal}"
        return "failed", said


def _reason(patterns: Mapping[str, str], text: str) -> str:
    return next((reason for pattern, reason in patterns.items() if re.search(pattern, text)), "")


def table(cases: Sequence[Case]) -> str:
    """Counts by file, then reasons of the cases that did not pass, then the total share."""
    lines = [f"{'file':44}" + "".join(f"{each:>8}" for each in RESULTS)]
    for file in sorted({case.file for case in cases}):
        counts = Counter(case.result for case in cases if case.file == file)
        lines.append(f"{file:44}" + "".join(f"{counts[each]:8}" for each in RESULTS))
    reasons = Counter((case.file, case.result, case.reason) for case in cases if case.result != "passed")
    lines += ["", *(f"{file}: {count} {result}: {reason}" for (file, result, reason), count in sorted(reasons.items()))]
    counts = Counter(case.result for case in cases)
    told = ", ".join(f"{counts[each]} {each}" for each in RESULTS)
    possible = len(cases) - counts["cannot"]
    share = 100 * counts["passed"] / possible if possible else 0.0
    return "\n".join([*lines, "", f"{len(cases)} cases: {told}; {share:.1f} % of {possible} that can pass"])
