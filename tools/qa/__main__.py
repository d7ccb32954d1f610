"""Runs groups of Triton's tests and prints what passed.

    python -m tools.qa DIR [--triton .venv-compat] [--group NAME ...]

DIR is a clone of triton-inference-server/server at a release, such as r24.10. The tests use localhost:8000 to 8002.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path

from tools.qa.group import Group
from tools.qa.groups import GROUPS
from tools.servers import Endpoint, llmserve_server, triton_server

PORTS = (8000, 8001, 8002)
PACKAGES = {
    "requests": "requests",
    "sseclient": "sseclient-py",
    "pytest": "pytest",
    "tritonclient": "tritonclient[all]",
}
TIMEOUT_S = 1800
CLONE = "git clone --depth 1 -b r24.10 https://github.com/triton-inference-server/server"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make qa", description="Triton's own tests against llmserve.")
    parser.add_argument("clone", type=Path, help=f"a clone of Triton's server: {CLONE}")
    parser.add_argument("--triton", type=Path, help="ask the real server of this environment (make compat) instead")
    parser.add_argument("--group", action="append", choices=[group.name for group in GROUPS])
    options = parser.parse_args(arguments)
    groups = [group for group in GROUPS if not options.group or group.name in options.group]
    if problems := _missing(options.clone, groups):
        print("\n".join(["make qa cannot run:", *problems]), file=sys.stderr)
        return 2
    results = {}
    for group in groups:
        print(f"{group.name} ...", file=sys.stderr, flush=True)
        results[group.name] = _run(group, options.clone, options.triton)
    print(table(groups, results, is_real=options.triton is not None))
    return 0 if options.triton or not unexpected(groups, results) else 1


def _missing(clone: Path, groups: Sequence[Group]) -> list[str]:
    """Returns all missing requirements."""
    if not (clone / "qa").is_dir():
        return [f"{clone} is no clone of Triton's server; make one: {CLONE}"]
    problems = [f"pip install {package}" for name, package in PACKAGES.items() if find_spec(name) is None]
    for group in groups:
        if not any((clone / group.folder / file).exists() for file in group.files):
            problems.append(f"{group.name}: {group.folder}/{group.files[0]} is not in {clone}")
        problems += [
            f"{group.name}: {name} is not in {clone}" for model in group.models for name in model.missing(clone)
        ]
    return problems


def _run(group: Group, clone: Path, triton: Path | None) -> dict[str, str]:
    """Returns test -> passed, skipped or the error."""
    with tempfile.TemporaryDirectory(prefix="qa-") as name:
        folder = Path(name)
        shutil.copytree(clone / "qa/common", folder / "qa/common")
        tests = shutil.copytree(clone / group.folder, folder / group.folder)
        repository = tests / group.repository if group.repository else folder / "models"
        repository.mkdir(parents=True)
        for model in group.models:
            model.write(clone, repository)
        files = [file for file in group.files if (tests / file).exists()]
        results: dict[str, str] = {}
        for targets in [[test] for test in collected(group, tests, files)] if group.is_fresh else [files]:
            try:
                with _server(group, repository, tests / group.log, triton):
                    for target in targets:
                        results |= run_tests(group, tests, target, results)
            except RuntimeError as error:  # the server did not start
                results |= dict.fromkeys(targets, " ".join(str(error).split())[-300:])
        return results


def _server(group: Group, repository: Path, log: Path, triton: Path | None) -> AbstractContextManager[Endpoint]:
    if triton is not None:
        return triton_server(
            triton.absolute(), repository, log, *group.flags, ports=PORTS, environment=group.environment
        )
    flags = [*group.flags, *group.own_flags]
    return llmserve_server(repository, log, *flags, ports=PORTS, environment=group.environment)


def collected(group: Group, tests: Path, files: Sequence[str]) -> list[str]:
    """Returns the tests in files, with pytest's names."""
    command = [*_command(group), *files, "--collect-only"]
    found = subprocess.run(
        command, cwd=tests, env={**os.environ, **group.environment}, capture_output=True, text=True, check=False
    )
    return [line for line in found.stdout.splitlines() if "::" in line]


def _command(group: Group) -> list[str]:
    select = ["-k", group.select] if group.select else []
    return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", *select]


def run_tests(group: Group, tests: Path, target: str, earlier: Mapping[str, str]) -> dict[str, str]:
    """`earlier`: results whose names are already used."""
    report = tests / "report.xml"
    report.unlink(missing_ok=True)
    command = [*_command(group), target, f"--junitxml={report}"]
    environment = {**os.environ, **group.environment}
    try:
        done = subprocess.run(
            command, cwd=tests, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {target: f"not over after {TIMEOUT_S} s"}
    if not report.exists():
        return {target: done.stdout[-2000:] + done.stderr[-2000:]}
    results: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.attrib["name"]
        if name in results or name in earlier:  # the same name in another class
            name = f"{case.attrib['classname'].rpartition('.')[2]}.{name}"
        results[name] = _outcome(case)
    return results


def _outcome(case: ElementTree.Element) -> str:
    for kind in ("failure", "error"):
        if (found := case.find(kind)) is not None:
            return (found.attrib.get("message") or kind).splitlines()[0][:160]
    return "skipped" if case.find("skipped") is not None else "passed"


def unexpected(groups: Sequence[Group], results: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Returns tests that fail without a known reason."""
    return [
        f"{group.name}: {test}"
        for group in groups
        for test, outcome in results[group.name].items()
        if outcome not in ("passed", "skipped") and test not in group.known
    ]


def table(groups: Sequence[Group], results: Mapping[str, Mapping[str, str]], *, is_real: bool) -> str:
    lines = [f"{'group':20} passed  of"]
    total = [0, 0]
    for group in groups:
        ran = {test: outcome for test, outcome in results[group.name].items() if outcome != "skipped"}
        failed = {test: outcome for test, outcome in ran.items() if outcome != "passed"}
        total = [total[0] + len(ran) - len(failed), total[1] + len(ran)]
        lines.append(f"{group.name:20} {len(ran) - len(failed):6} {len(ran):3}")
        lines += [
            f"    {test}: {outcome}" + (f" [known: {group.known[test]}]" if not is_real and test in group.known else "")
            for test, outcome in failed.items()
        ]
    return "\n".join([*lines, f"{'all':20} {total[0]:6} {total[1]:3}"])


if __name__ == "__main__":
    sys.exit(main())
