"""Checks for `llmserve doctor`: what each target needs from a machine, what was found, and what to do."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Mapping, Sequence

from llmserve.cli.machine import required_packages
from llmserve.engine.registry import RUNTIMES, runtime_for
from llmserve.engine.runtime import Check, Needs
from llmserve.errors import Unsupported

OLDEST_PYTHON = (3, 11)


def check_targets() -> Mapping[str, Sequence[Check]]:
    return {target: check_target(target) for target in RUNTIMES}


def check_target(target: str) -> Sequence[Check]:
    return [_checked(need, ask) for need, ask in {**COMMON, **runtime_for(target).needs()}.items()]


def works(checks: Sequence[Check]) -> bool:
    return all(check.is_met for check in checks)


def _checked(need: str, ask: Callable[[str], Check]) -> Check:
    try:
        return ask(need)
    except Unsupported as error:  # llmserve's errors say what to do
        found, _, advice = str(error).partition("; ")
        return Check(need, False, found, advice)
    except Exception as error:  # a report on a broken machine must not fail
        return Check(need, False, f"cannot be determined: {type(error).__name__}: {error}")


def _python(need: str) -> Check:
    is_met = sys.version_info >= OLDEST_PYTHON
    advice = "" if is_met else f"install Python {'.'.join(map(str, OLDEST_PYTHON))} or newer"
    return Check(need, is_met, platform.python_version(), advice)


def _packages(need: str) -> Check:
    missing = [name for name, number in required_packages().items() if not number]
    found = f"not installed: {', '.join(missing)}" if missing else "all installed"
    return Check(need, not missing, found, f"pip install {' '.join(missing)}" if missing else "")


COMMON: Needs = {"Python": _python, "llmserve's packages": _packages}
