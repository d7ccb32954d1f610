"""Records deliberate changes of a suite: `llmserve eval bless` writes what changed, who approved it and why, next to
the suite.

`SUITE.blessings.jsonl` is a `sealed_log`. A release gate accepts a suite only if its margins, prompt and data equal
those in the last line, so an edit of the suite alone has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from llmserve import sealed_log
from llmserve.errors import InvalidArgument, raise_problems
from llmserve.evaluation.suite import Suite

SUFFIX = ".blessings.jsonl"


@dataclass(frozen=True, slots=True)
class Blessing:
    """Who approved a suite's rules, and when; the last line of its record."""

    rules: Mapping[str, Any]
    by: str
    why: str
    time: str


def now() -> str:
    """UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def trace_of(suite_path: Path) -> Path:
    return suite_path.with_suffix(SUFFIX)


def last_blessing(suite_path: Path) -> Blessing | None:
    """None if the suite was never blessed. `InvalidArgument` if its record was changed."""
    lines = sealed_log.read(trace_of(suite_path))
    if not lines:
        return None
    content = lines[-1].content
    try:
        return Blessing(content["rules"], str(content["by"]), str(content["why"]), str(content["time"]))
    except KeyError as error:
        raise InvalidArgument(f"the last line of {trace_of(suite_path)} lacks {error}") from error


def blessed_by(suite_path: Path, rules: Mapping[str, Any]) -> str:
    """Who blessed these rules of the suite, if they equal the last blessed ones; empty: nobody."""
    last = last_blessing(suite_path)
    return last.by if last is not None and last.rules == rules else ""


def bless(suite_path: Path, suite: Suite, *, by: str, why: str, signer: sealed_log.Signer | None = None) -> list[str]:
    """Add a line, and return what it changes. `InvalidArgument` without a name, a reason or a change."""
    last = last_blessing(suite_path)
    rules = suite.rules()
    problems = [text for wrong, text in (
        (not by.strip(), "name who approves the margins: --by NAME"),
        (not why.strip(), "give the reason: --why TEXT"),
        (last is not None and last.rules == rules, f"nothing has changed since {last.by if last else ''} blessed it"),
    ) if wrong]  # fmt: skip
    raise_problems(InvalidArgument, f"{suite_path} has not been blessed", problems)
    changes = _changes(last.rules if last else {}, rules)
    sealed_log.append(
        trace_of(suite_path), {"suite": suite.name, "rules": rules, "by": by, "why": why, "time": now()}, signer
    )
    return changes


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    before, after = _flat(old), _flat(new)
    return [
        f"{name}: {_words(before.get(name))} -> {_words(after.get(name))}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]


def _flat(rules: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in rules.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return found


def _words(value: Any) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
