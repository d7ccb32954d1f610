"""Runs peers' own tests of their servers, unmodified, against `llmserve serve`: `make peer-suites`.

The suites come from source distributions, of which nothing is kept here. Each case has passed, failed, lacks a feature
that llmserve does not have, or cannot be passed by any text server on one CPU with another network.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from xml.etree import ElementTree

from tools.peer_suites import llama_cpp, vllm
from tools.peer_suites.cases import table
from tools.peer_suites.sdist import FOLDER

SUITES = {"llama.cpp": llama_cpp, "vllm": vllm}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.peer_suites", description=__doc__)
    parser.add_argument("engine", type=Path, help="of a language model")
    parser.add_argument("--suite", choices=SUITES, action="append", help="both by default")
    parser.add_argument("--files", nargs="*", help="of the suite, such as test_chat.py; those that apply by default")
    parser.add_argument("-k", dest="expression", default="", help="only cases that match, as pytest has it")
    options = parser.parse_args()
    has_passed = True
    for name in options.suite or SUITES:
        suite = SUITES[name]
        report = FOLDER / f"report-{name}-{os.getpid()}.xml"
        suite.run(options.engine.resolve(), options.files, options.expression, report)
        cases = [suite.RULES.case_of(element) for element in ElementTree.parse(report).iter("testcase")]
        print(f"\n== {name}\n{table(cases)}", flush=True)
        has_passed = has_passed and any(case.result == "passed" for case in cases)
    raise SystemExit(0 if has_passed else 1)


if __name__ == "__main__":
    main()
